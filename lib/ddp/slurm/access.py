"""The nodes of a reservation."""

import collections.abc
import dataclasses

from ddp.slurm import jobs
from slurm_ddp.slurm import commands, show

_SCONTROL = commands.find("scontrol")
_OPEN = frozenset({"FLEX", "ANY_NODES"})  # its jobs may have other nodes, too (scontrol(1), Flags)
OUTSIDE = "outside the reservation"


def inside(partitions: collections.abc.Iterable[jobs.Partition], reservation: str) -> tuple[jobs.Partition, ...]:
    """Return the partitions as a job in this reservation meets them: with its nodes, kept ones (MAINT) included.

    Nodes outside the reservation are marked as such and as unusable. Raises SlurmError.
    """
    found = tuple(partitions)
    records = show.records(jobs.ask(_SCONTROL, "show", "reservations", "-o"))
    nothing: dict[str, str] = {}
    one = next((record for record in records if record.get("ReservationName") == reservation), nothing)
    nodes, flags = show.value(one, "Nodes"), frozenset((show.value(one, "Flags") or "").split(","))
    if not nodes or flags & _OPEN:
        return found
    names = frozenset(jobs.hostnames(nodes))

    def meet(node: jobs.Capacity) -> jobs.Capacity:
        if node.name not in names:
            return dataclasses.replace(node, state=OUTSIDE, is_usable=False)
        return dataclasses.replace(node, is_usable=node.is_usable or (node.is_kept and "MAINT" in flags))

    return tuple(dataclasses.replace(part, nodes=tuple(map(meet, part.nodes))) for part in found)
