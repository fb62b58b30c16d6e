"""What doctor found out, and what it makes of it: the records of both, and how nodes are told in a line."""

import collections.abc
import dataclasses
import re
import typing

from ddp.measure import sampling
from ddp.workspace import folders
from slurm_ddp.slurm import access, jobs

Json = dict[str, typing.Any]
Level = typing.Literal["error", "warning", "note"]


@dataclasses.dataclass(frozen=True)
class Finding:
    """Something that is not as it must be, or that is good to know."""

    level: Level  # error: a run would break; warning: it may suffer; note: good to know
    where: str  # a node's name, several, or what it is about
    text: str
    remedy: str  # what to type or do; a note may have none

    def __str__(self) -> str:
        return f"{self.level.upper()} {self.where}: {self.text}" + (f"\n    -> {self.remedy}" if self.remedy else "")


@dataclasses.dataclass(frozen=True)
class Facts:
    """What was gathered."""

    partition: jobs.Partition
    asked: tuple[str, ...]  # the nodes that were to be examined
    left_out: dict[str, str]  # node: why it could not be
    reports: dict[str, Json]
    trouble: str  # srun's words where some node gave no answer
    config: dict[str, str]
    manifests: tuple[folders.Manifest, ...]
    damaged: tuple[str, ...]  # archives that are not what their manifests say
    login: tuple[str, str]  # type and source of the workspace's mount on this host
    untrusted: str = ""  # the workspace's folder whose content others can replace, and what to type
    accounting: access.Accounting | None = None  # None: there is none, or it gives no answer
    sample: sampling.Sample | None = None  # None: it was not asked for


def clock_offsets(facts: Facts) -> dict[str, float]:
    """Return each node's clock against the first's, in seconds."""
    names = [name for name in facts.asked if name in facts.reports]
    if len(names) < 2:
        return {}
    peers = facts.reports[names[0]]["network"]["peers"]
    found = {name: float(peers[name]["clock_s"]) for name in names[1:] if "clock_s" in peers.get(name, {})}
    return {names[0]: 0.0} | found


def capacity(facts: Facts, name: str) -> jobs.Capacity:
    """Return what Slurm says that a node can give to a job."""
    nothing = jobs.Capacity(name, 0, 0, 0, "", is_usable=False)
    return next((node for node in facts.partition.nodes if node.name == name), nothing)


def threads(node: jobs.Capacity) -> int:
    """Return the threads of each rank of a job that takes the whole node, as ddp.node.node sets OMP_NUM_THREADS."""
    return max(1, node.cpus // (node.gpus or 1))


def first_few(names: collections.abc.Sequence[str]) -> str:
    """Return the first names, for a line that must stay short."""
    return f"{', '.join(names[:6])}{', ...' if len(names) > 6 else ''}"


def grouped(values: dict[str, str]) -> dict[str, list[str]]:
    """Return the names by their value."""
    groups: dict[str, list[str]] = {}
    for name, value in sorted(values.items()):
        groups.setdefault(value, []).append(name)
    return groups


def spelled(groups: collections.abc.Mapping[str, collections.abc.Sequence[str]]) -> str:
    """Return in a line which value is on which nodes."""
    return "; ".join(
        f"{value or 'unknown'} on {', '.join(names[:4])}{', ...' if len(names) > 4 else ''}"
        for value, names in groups.items()
    )


def release(text: str) -> tuple[int, ...]:
    """Return the year and month that a release of Slurm is named after; nothing of any other text."""
    found = re.match(r"(\d+)\.(\d+)", text)
    return tuple(int(part) for part in found.groups()) if found else ()


def leading_number(text: str) -> int | None:
    """Return the number that a text like `30 sec` begins with."""
    found = re.match(r"\d+", text)
    return int(found[0]) if found else None


def as_dict(value: object) -> Json:
    """Return the value where it is a dict, else an empty one."""
    return typing.cast(Json, value) if isinstance(value, dict) else {}
