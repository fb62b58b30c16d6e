"""The nodes that a job can get: inside a reservation, and on machines that still exist."""

import concurrent.futures
import contextlib
import dataclasses
import socket

from ddp.slurm import jobs, partition_list
from slurm_ddp.slurm import show

_OPEN = frozenset({"FLEX", "ANY_NODES"})  # its jobs may have other nodes, too (scontrol(1), Flags)
OUTSIDE = "outside the reservation"
# Slurm notices that within SlurmdTimeout, and sends jobs there until then
GONE = "without a slurmd that answers"
_MOST_ASKED = 128  # all at once
_PATIENCE_S = 1.0


def inside(
    partitions: tuple[partition_list.Partition, ...], reservation: str
) -> tuple[partition_list.Partition, ...]:
    """Return the partitions as a job in this reservation meets them, kept nodes (MAINT) included.

    Raises SlurmError.
    """
    flags: set[str] = set()
    hostlists: list[str] = []
    for record in _reservations(reservation):
        flags |= set((show.value(record, "Flags") or "").split(","))
        if nodes := show.value(record, "Nodes"):
            hostlists.append(nodes)
    if not hostlists or flags & _OPEN:
        return partitions
    names = frozenset(jobs.hostnames(",".join(hostlists)))
    has_kept = "MAINT" in flags

    def meet(node: partition_list.Capacity) -> partition_list.Capacity:
        if node.name not in names:
            return dataclasses.replace(node, state=OUTSIDE, is_usable=False)
        is_usable = node.is_usable or (node.is_kept and has_kept)
        return dataclasses.replace(node, is_usable=is_usable)

    return tuple(
        dataclasses.replace(part, nodes=tuple(map(meet, part.nodes))) for part in partitions
    )


def _reservations(wanted: str) -> list[dict[str, str]]:
    """List the reservations of these names, separated by commas, as scontrol shows them."""
    names = wanted.split(",")
    shown = show.records(jobs.ask("scontrol", "show", "reservations", "-o"))
    return [record for record in shown if record.get("ReservationName") in names]


def present(
    partitions: tuple[partition_list.Partition, ...],
) -> tuple[partition_list.Partition, ...]:
    """Mark nodes as gone if their slurmd cannot be reached while others of the partition can.

    A machine that was removed leaves the node that it registered in Slurm.
    """
    is_reached = _reach(partitions)

    def look(part: partition_list.Partition) -> partition_list.Partition:
        # If no node answers, a firewall stands between this host and all of them
        if not any(is_reached.get(node.name) for node in part.nodes):
            return part
        nodes: list[partition_list.Capacity] = []
        for node in part.nodes:
            if is_reached.get(node.name, True):
                nodes.append(node)
            else:
                gone = dataclasses.replace(node, state=GONE, is_usable=False, is_kept=False)
                nodes.append(gone)
        return dataclasses.replace(part, nodes=tuple(nodes))

    return tuple(map(look, partitions))


def _reach(partitions: tuple[partition_list.Partition, ...]) -> dict[str, bool]:
    """Try to connect to each slurmd that has to run now; {} if there is only one, or very many."""
    endpoints: dict[str, tuple[str, int]] = {}
    for part in partitions:
        for node in part.nodes:
            if node.endpoint is not None:
                endpoints[node.name] = node.endpoint
    if not 1 < len(endpoints) <= _MOST_ASKED:
        return {}
    with concurrent.futures.ThreadPoolExecutor(len(endpoints)) as pool:
        answers = pool.map(_is_reached, endpoints.values())
        return dict(zip(endpoints, answers, strict=True))


def _is_reached(endpoint: tuple[str, int]) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(endpoint, timeout=_PATIENCE_S):
        return True
    return False
