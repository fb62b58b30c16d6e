"""The round trips between hosts, which say which of them share a fast network."""

# pyright: basic, reportPrivateImportUsage=false
import time

import torch
import torch.distributed as dist

from ddptrain.world import distributed

_TRIES = 4  # the first one connects


def measure(world: distributed.World) -> dict[str, dict[str, float]]:
    """Return the shortest round trips in ms between all hosts, on rank 0.

    Every rank calls it. The first ranks of the hosts meet in pairs, in as many rounds as there are
    hosts: each with each other.
    """
    hosts: list[str] = world.broadcast([str(member["host"]) for member in world.members])
    leaders = [hosts.index(host) for host in dict.fromkeys(hosts)]
    own: dict[str, float] = {}
    for turn in range(len(leaders)):
        peer = _peer(world.rank, leaders, turn)
        if peer is not None:
            own[hosts[peer]] = _measure_with(world, peer)

    found: dict[str, dict[str, float]] = {}
    for rank, trips in enumerate(world.collect(own)):
        if trips:
            found[hosts[rank]] = trips
    return found


def _peer(rank: int, leaders: list[int], turn: int) -> int | None:
    """Return whom a rank meets in a round: those whose numbers add up to the round's."""
    if rank not in leaders:
        return None
    peer = leaders[(turn - leaders.index(rank)) % len(leaders)]
    return None if peer == rank else peer


def _measure_with(world: distributed.World, peer: int) -> float:
    """Return the shortest round trip in ms between this rank and another, which calls it, too."""
    ball = torch.zeros(1)
    trips_ms: list[float] = []
    for _ in range(_TRIES):
        began = time.perf_counter()
        if world.rank < peer:
            dist.send(ball, peer, group=world.control)
            dist.recv(ball, peer, group=world.control)
        else:
            dist.recv(ball, peer, group=world.control)
            dist.send(ball, peer, group=world.control)
        trips_ms.append((time.perf_counter() - began) * 1e3)
    return min(trips_ms)
