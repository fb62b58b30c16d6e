"""This process's place among the ranks that torchrun started, and how they meet.

They meet at a store of torch.distributed, before anything that could hang is started.
"""

# pyright: basic, reportPrivateImportUsage=false
import dataclasses
import datetime
import json
import os
import socket
import time
import typing

import torch.distributed as dist

from ddptrain.ground import errors

INIT_TIMEOUT_S = 120
# For the others to read why none enters: without torchrun, the store ends with rank 0's process
READ_S = 10
_LAUNCH = "start me with torchrun"


@dataclasses.dataclass(frozen=True)
class Place:
    """This process's place among the ranks, before anything is connected."""

    rank: int
    size: int
    local_rank: int
    local_size: int


def place() -> Place:
    """Return this process's place from torchrun's environment.

    Raises UserError if that is contradictory.
    """
    env = os.environ
    if "RANK" not in env or "WORLD_SIZE" not in env:
        if "SLURM_STEP_ID" in env and env.get("SLURM_STEP_NUM_TASKS", "1") != "1":
            what = "srun's tasks would each train alone"
            raise errors.UserError(f"{what}; {_LAUNCH}, one for each node")
        return Place(0, 1, 0, 1)
    try:
        found = Place(
            int(env["RANK"]),
            int(env["WORLD_SIZE"]),
            int(env.get("LOCAL_RANK", "0")),
            int(env.get("LOCAL_WORLD_SIZE", "1")),
        )
    except ValueError as e:
        raise errors.UserError(
            f"the launcher's environment is not a number ({e}); {_LAUNCH}"
        ) from e
    if not 0 <= found.rank < found.size:
        raise errors.UserError(f"RANK={found.rank} is not below WORLD_SIZE={found.size}; {_LAUNCH}")
    return found


def connect(here: Place) -> typing.Any:
    """Return the store that the ranks meet at."""
    env = os.environ
    timeout = datetime.timedelta(seconds=INIT_TIMEOUT_S)
    try:
        store, _, _ = next(iter(dist.rendezvous("env://", here.rank, here.size, timeout=timeout)))
        # A static rendezvous keeps its store when the ranks are started again (torch 2.13), and
        # with it the addresses of ranks that have ended: a rank that reads one too early would wait
        # without end.
        return dist.PrefixStore(f"attempt/{restarts()}", store)
    except (dist.DistNetworkError, dist.DistStoreError, ValueError) as e:
        where = f"{env.get('MASTER_ADDR')}:{env.get('MASTER_PORT')}"
        if head := env.get("HEAD_NODE"):
            where += f" ({head})"
        text = f"the rendezvous at {where} failed on {host()}: {str(e).splitlines()[0]}"
        raise errors.UserError(f"{text}; is the port reachable from there?", retry=True) from e


def second_client() -> typing.Any:
    """Return another connection to the store for another thread: calls may wait for minutes."""
    client = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        wait_for_workers=False,
        timeout=datetime.timedelta(seconds=30),
    )
    return dist.PrefixStore(f"attempt{restarts()}", client)


def host() -> str:
    """Name this host for messages: Slurm's name of the node, which need not be the machine's."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def meet(
    store: typing.Any, here: Place, own: dict[str, object], problem: str | None
) -> list[dict[str, object]]:
    """Wait until every rank has joined, and collect their places, before anything that could hang.

    Rank 0 returns the places, the others none: to send all of them to all would take the square of
    the ranks' number. Raises SharedError naming the absent ranks, or the first one's problem.
    """
    prefix = f"ddptrain/{restarts()}"
    store.set(f"{prefix}/rank/{here.rank}", json.dumps({**own, "problem": problem}))
    store.add(f"{prefix}/joined", 1)
    if here.rank == 0:
        members, verdict = _receive(store, prefix, here.size)
        may_retry = not members  # a rank that never joined may join the next attempt
        store.set(f"{prefix}/all", json.dumps([verdict, may_retry]))
        if verdict:
            _wait_for_readers(store, prefix)
    else:
        members = []
        store.wait([f"{prefix}/all"], datetime.timedelta(seconds=INIT_TIMEOUT_S + 30))
        verdict, may_retry = json.loads(store.get(f"{prefix}/all"))
        store.add(f"{prefix}/read", 1)
    if verdict:
        raise errors.SharedError(verdict, retry=may_retry)
    return members


def _wait_for_readers(store: typing.Any, prefix: str) -> None:
    """Wait a little until the ranks that have joined know why none enters."""
    deadline = time.monotonic() + READ_S
    while time.monotonic() < deadline:
        others = store.add(f"{prefix}/joined", 0) - 1
        if store.add(f"{prefix}/read", 0) >= others:
            return
        time.sleep(0.05)


def _receive(store: typing.Any, prefix: str, size: int) -> tuple[list[dict[str, object]], str]:
    """Return the members, once all have joined, and their problem, or an empty text."""
    deadline = time.monotonic() + INIT_TIMEOUT_S
    while store.add(f"{prefix}/joined", 0) < size:
        if time.monotonic() > deadline:
            return [], _name_absent(store, prefix, size)
        time.sleep(0.05)

    keys = [f"{prefix}/rank/{rank}" for rank in range(size)]
    members: list[dict[str, object]] = []
    bad: list[dict[str, object]] = []
    for text in store.multi_get(keys):
        member = json.loads(text)
        members.append({key: member[key] for key in ("rank", "host", "device")})
        if member["problem"]:
            bad.append(member)
    if not bad:
        return members, ""
    problem = str(bad[0]["problem"])
    if len(bad) < size:
        problem = f"rank {bad[0]['rank']} on {bad[0]['host']}: {problem}"
    return members, problem


def _name_absent(store: typing.Any, prefix: str, size: int) -> str:
    absent = [rank for rank in range(size) if not store.check([f"{prefix}/rank/{rank}"])]
    some = ", ".join(str(rank) for rank in absent[:16])
    if len(absent) > 16:
        some += " ..."
    count = f"{len(absent)} of {size} ranks never joined within {INIT_TIMEOUT_S} s"
    return f"{count}: {some}; look at their logs"


def restarts() -> str:
    """Return how many times torchrun has started the ranks again."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
