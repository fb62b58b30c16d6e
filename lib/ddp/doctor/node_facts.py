"""The records of doctor, its facts and its findings, and how values are grouped and printed."""

import collections.abc
import dataclasses
import re
import typing

from ddp.measure import sampling
from ddp.slurm import access, jobs
from ddp.workspace import folders

Json = dict[str, typing.Any]
Level = typing.Literal["error", "warning", "note"]


@dataclasses.dataclass(frozen=True)
class Finding:
    """A problem, or a note."""

    level: Level  # error: a run would break; warning: it may suffer; note: good to know
    where: str  # a node's name, several, or a subject such as slurm or workspace
    text: str
    remedy: str  # what to type or do; a note may have none

    def __str__(self) -> str:
        return f"{self.level.upper()} {self.where}: {self.text}" + (f"\n    -> {self.remedy}" if self.remedy else "")


@dataclasses.dataclass(frozen=True)
class Facts:
    """What `gather` collected."""

    partition: jobs.Partition
    asked: tuple[str, ...]  # the nodes that were to be examined
    left_out: dict[str, str]  # node: why it cannot be examined
    reports: dict[str, Json]
    trouble: str  # srun's error output where some node returned no report
    config: dict[str, str]
    manifests: tuple[folders.Manifest, ...]
    damaged: tuple[str, ...]  # archives that do not match their manifests
    login: tuple[str, str]  # type and source of the workspace's mount on this host
    untrusted: str = ""  # the workspace's folder whose content others can replace, and what to type
    accounting: access.Accounting | None = None  # None: there is none, or slurmdbd does not respond
    sample: sampling.Sample | None = None  # None: not requested


def clock_offsets(facts: Facts) -> dict[str, float]:
    """Return the offset of each node's clock from the first node's, in seconds."""
    names = [name for name in facts.asked if name in facts.reports]
    if len(names) < 2:
        return {}
    peers = facts.reports[names[0]]["network"]["peers"]
    found = {name: float(peers[name]["clock_s"]) for name in names[1:] if "clock_s" in peers.get(name, {})}
    return {names[0]: 0.0} | found


def capacity(facts: Facts, name: str) -> jobs.Capacity:
    """Return the resources of a node that Slurm can allocate to a job."""
    nothing = jobs.Capacity(name, 0, 0, 0, "", is_usable=False)
    return next((node for node in facts.partition.nodes if node.name == name), nothing)


def threads(node: jobs.Capacity) -> int:
    """Return the threads of each rank of a job that takes the whole node, as ddp.node.node sets OMP_NUM_THREADS."""
    return max(1, node.cpus // (node.gpus or 1))


def first_few(names: collections.abc.Sequence[str]) -> str:
    """Join the first six names, for a line that must stay short."""
    return f"{', '.join(names[:6])}{', ...' if len(names) > 6 else ''}"


def grouped(values: dict[str, str]) -> dict[str, list[str]]:
    """Group the names by their value."""
    groups: dict[str, list[str]] = {}
    for name, value in sorted(values.items()):
        groups.setdefault(value, []).append(name)
    return groups


def spelled(groups: collections.abc.Mapping[str, collections.abc.Sequence[str]]) -> str:
    """List in one line which value is on which nodes."""
    return "; ".join(
        f"{value or 'unknown'} on {', '.join(names[:4])}{', ...' if len(names) > 4 else ''}"
        for value, names in groups.items()
    )


def release(text: str) -> tuple[int, ...]:
    """Parse the year and month of a release of Slurm; an empty tuple for any other text."""
    found = re.match(r"(\d+)\.(\d+)", text)
    return tuple(int(part) for part in found.groups()) if found else ()


def leading_number(text: str) -> int | None:
    """Parse the number at the beginning of a text like `30 sec`."""
    found = re.match(r"\d+", text)
    return int(found[0]) if found else None


def as_dict(value: object) -> Json:
    """Return the value where it is a dict, else an empty one."""
    return typing.cast(Json, value) if isinstance(value, dict) else {}
