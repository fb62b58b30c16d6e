"""The nodes that a job can have: those of a reservation, and those whose machines are there."""

import concurrent.futures
import contextlib
import dataclasses
import socket

from ddp.slurm import jobs
from slurm_ddp.slurm import show

_OPEN = frozenset({"FLEX", "ANY_NODES"})  # its jobs may have other nodes, too (scontrol(1), Flags)
OUTSIDE = "outside the reservation"
GONE = "without a slurmd that answers"  # Slurm notices that within SlurmdTimeout, and sends jobs there until then
_MOST_ASKED, _PATIENCE_S = 128, 1.0  # all at once


def inside(partitions: tuple[jobs.Partition, ...], reservation: str) -> tuple[jobs.Partition, ...]:
    """Return the partitions as a job in this reservation meets them, kept nodes (MAINT) included. Raises SlurmError."""
    records = show.records(jobs.ask("scontrol", "show", "reservations", "-o"))
    nothing: dict[str, str] = {}
    one = next(
        (record for record in records if record.get("ReservationName") == reservation), nothing
    )
    nodes, flags = show.value(one, "Nodes"), frozenset((show.value(one, "Flags") or "").split(","))
    if not nodes or flags & _OPEN:
        return partitions
    names = frozenset(jobs.hostnames(nodes))

    def meet(node: jobs.Capacity) -> jobs.Capacity:
        if node.name not in names:
            return dataclasses.replace(node, state=OUTSIDE, is_usable=False)
        return dataclasses.replace(
            node, is_usable=node.is_usable or (node.is_kept and "MAINT" in flags)
        )

    return tuple(
        dataclasses.replace(part, nodes=tuple(map(meet, part.nodes))) for part in partitions
    )


def present(partitions: tuple[jobs.Partition, ...]) -> tuple[jobs.Partition, ...]:
    """Mark the nodes whose slurmd cannot be reached, while another's of the partition can, as gone and unusable.

    A machine that was removed leaves the node that it registered in Slurm.
    """
    endpoints = {
        node.name: node.endpoint for part in partitions for node in part.nodes if node.endpoint
    }
    reached = dict[str, bool]()
    if 1 < len(endpoints) <= _MOST_ASKED:
        with concurrent.futures.ThreadPoolExecutor(len(endpoints)) as pool:
            reached = dict(zip(endpoints, pool.map(_is_reached, endpoints.values()), strict=True))

    def look(part: jobs.Partition) -> jobs.Partition:
        if not any(
            reached.get(node.name) for node in part.nodes
        ):  # a firewall between this host and all of them
            return part
        gone = {"state": GONE, "is_usable": False, "is_kept": False}
        nodes = (
            node if reached.get(node.name, True) else dataclasses.replace(node, **gone)
            for node in part.nodes
        )
        return dataclasses.replace(part, nodes=tuple(nodes))

    return tuple(map(look, partitions))


def _is_reached(endpoint: tuple[str, int]) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(endpoint, timeout=_PATIENCE_S):
        return True
    return False
