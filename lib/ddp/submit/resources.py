"""The request to Slurm: the given options, else the partition's own figures."""

import collections.abc
import dataclasses
import re

from ddp.base import ParameterError, TrainerError
from ddp.options import fields, models
from ddp.problem import Step
from ddp.slurm import jobs
from ddp.submit import checks

_LEAD_S = (30, 180)  # how long before its end a job is warned: enough to write a checkpoint, see payload.md 2.3
_LEAST_MEMORY_MB = 1024  # an interpreter with torch takes half of that
_TOO_LITTLE_MB = 256  # torchrun takes 220 of it, before any rank


@dataclasses.dataclass(frozen=True)
class Request:
    """The resources of a job."""

    partition: str
    num_nodes: int
    gpus_per_node: int
    cpus_per_task: int  # one task for each node: the ranks of a node share these
    memory_mb: int  # for each node
    time_limit: str | None  # in Slurm's notation; None: the partition's own
    lead_s: int  # how long before the time limit the job is warned
    nodelist: tuple[str, ...] = ()  # nodes that must be among them
    exclude: tuple[str, ...] = ()  # nodes that must not

    @property
    def ranks_per_node(self) -> int:
        """The ranks on each node: one for each GPU, or one that uses all cores."""
        return self.gpus_per_node or 1


@dataclasses.dataclass(frozen=True)
class _Wanted:
    """An option that asks each node for an amount."""

    name: str
    given: int | str | None
    least: int
    has: collections.abc.Callable[[jobs.Capacity], int]

    def fitting(self, nodes: tuple[jobs.Capacity, ...], partition: jobs.Partition) -> tuple[jobs.Capacity, ...]:
        """Select the nodes that have at least so much. Raises ParameterError if none has."""
        found = tuple(node for node in nodes if self.has(node) >= self.least)
        if not found:
            most = f"{max(map(self.has, nodes))}{'M' if self.name == 'memory' else ''}"
            text = f"{self.given} requested, a node of partition {partition.name} has at most {most}"
            raise ParameterError(self.name, text)
        return found


def training(params: models.Training, partitions: tuple[jobs.Partition, ...]) -> Request:
    """Compute a training job's request. Without parameters: all usable nodes of the default partition, whole.

    If some of the nodes have GPUs, only those count, with as many GPUs as each of them has.
    Raises ParameterError if the cluster does not have what is asked for.
    """
    partition = choose_partition(params.partition, partitions)
    if params.constraint is not None:
        partition = _with_features(params.constraint, partition)
    named, unwanted = _named(params, partition, partitions)
    if params.nodes is not None and params.nodes < len(named):
        raise ParameterError("nodes", f"{params.nodes} is less than the {len(named)} of nodelist; omit nodes")
    if unwanted:
        partition = _without(unwanted, partition)
    if named and params.nodes in (None, len(named)):
        partition = dataclasses.replace(partition, nodes=tuple(n for n in partition.nodes if n.name in named))
    candidates = partition.usable
    if params.gpus_per_node is None:
        candidates = tuple(node for node in candidates if node.gpus) or candidates
    gpus = min(node.gpus for node in candidates) if params.gpus_per_node is None else params.gpus_per_node
    wanted = (
        _Wanted("gpus-per-node", params.gpus_per_node, gpus, lambda node: node.gpus),
        _Wanted("cpus-per-task", params.cpus_per_task, params.cpus_per_task or 1, lambda node: node.cpus),
        _Wanted("memory", params.memory, _memory_mb(params.memory), lambda node: node.memory_mb),
    )
    for wish in wanted:
        candidates = wish.fitting(candidates, partition)
    if unfit := [name for name in named if name not in {node.name for node in candidates}]:
        raise ParameterError("nodelist", f"{unfit[0]} has too few GPUs or cores, or too little memory; leave it out")
    num_nodes = len(candidates) if params.nodes is None else params.nodes
    if num_nodes > len(candidates):
        rest = _describe_unusable(partition)
        raise ParameterError(
            "nodes", f"{num_nodes} requested, partition {partition.name} has {len(candidates)} usable{rest}"
        )
    whole = params.exclusive
    cpus = params.cpus_per_task or min(n.cpus if whole else _share(n.cpus, gpus, n.gpus) for n in candidates)
    shares = (n.memory_mb if whole else _memory(n, cpus, gpus) for n in candidates)
    memory_mb = _memory_mb(params.memory) or min(shares)
    limit, lead_s = _times(params.time_limit, partition)
    return Request(partition.name, num_nodes, gpus, cpus, memory_mb, limit, lead_s, named, unwanted)


def preparation(params: models.Resources, partitions: tuple[jobs.Partition, ...]) -> Request:
    """Compute the request to prepare a dataset: half a node, at least one core and 2 GiB where it has them."""
    partition = choose_partition(params.partition, partitions)
    node = max(partition.usable, key=lambda node: (node.cpus, node.memory_mb))
    cpus = max(1, node.cpus // 2)
    memory_mb = min(node.memory_mb, max(2048, node.memory_mb // 2))
    limit, lead_s = _times(params.time_limit, partition)
    return Request(partition.name, 1, 0, cpus, memory_mb, limit, lead_s)


def choose_partition(name: str | None, partitions: tuple[jobs.Partition, ...]) -> jobs.Partition:
    """Return the named partition or the default one. Raises ParameterError unless it takes jobs."""
    if not partitions:
        raise TrainerError("Slurm has no partition yet", remedy=Step("add-partition", "add one to slurm.conf"))
    known = ", ".join(partition.name for partition in partitions)
    if name is None:
        found = next((partition for partition in partitions if partition.is_default), None)
        if found is None and len(partitions) > 1:
            raise ParameterError("partition", f"required, since Slurm has no default partition; there are: {known}")
        found = found or next(iter(partitions))
    else:
        found = next((partition for partition in partitions if partition.name == name), None)
        if found is None:
            raise ParameterError("partition", f"no partition {name!r}; there are: {known}")
    if not found.is_up:
        step = Step("partition-up", f"an administrator types: scontrol update partitionname={found.name} state=up")
        raise ParameterError("partition", f"{found.name} is not up", remedy=step)
    if not found.usable:
        raise ParameterError("partition", f"{found.name} has no usable node{_describe_unusable(found)}; see: sinfo -R")
    return found


def _with_features(constraint: str, partition: jobs.Partition) -> jobs.Partition:
    """Limit a partition to the nodes that the constraint allows; Slurm evaluates one with both & and |."""
    wanted = set(re.split(r"[&|]", constraint))
    least = 1 if "|" in constraint else len(wanted)
    is_mixed = "&" in constraint and "|" in constraint
    found = tuple(node for node in partition.nodes if is_mixed or len(wanted & node.features) >= least)
    known = {name for node in partition.usable for name in node.features}
    if not any(node.is_usable for node in found) or wanted - {
        name for node in partition.nodes for name in node.features
    }:
        what = next(iter(sorted(wanted - known)), constraint)
        features = ", ".join(sorted(known)[:12]) or "none"
        raise ParameterError(
            "constraint", f"no usable node of partition {partition.name} has {what}; its features are: {features}"
        )
    return dataclasses.replace(partition, nodes=found)


def _named(
    params: models.Training, partition: jobs.Partition, partitions: tuple[jobs.Partition, ...]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """List the nodes of `nodelist` and of `exclude`. Raises ParameterError if a job could not have them so."""
    known = {node.name for one in partitions for node in one.nodes}
    named = checks.hosts("nodelist", params.nodelist, known) if params.nodelist else ()
    unwanted = checks.hosts("exclude", params.exclude, known) if params.exclude else ()
    there = {node.name: node for node in partition.nodes}
    for name in named:
        if name in unwanted:
            raise ParameterError("nodelist", f"{name} is in exclude, too; remove it from one of them")
        if name not in there:
            having = f" with {params.constraint}" if params.constraint else ""
            raise ParameterError("nodelist", f"{name} is not in partition {partition.name}{having}")
        if not there[name].is_usable:
            raise ParameterError("nodelist", f"{name} is {there[name].state.lower()}; see: scontrol show node {name}")
    return named, unwanted


def _without(unwanted: tuple[str, ...], partition: jobs.Partition) -> jobs.Partition:
    rest = tuple(node for node in partition.nodes if node.name not in unwanted)
    if not any(node.is_usable for node in rest):
        others = _describe_unusable(dataclasses.replace(partition, nodes=rest))
        raise ParameterError("exclude", f"leaves no usable node of partition {partition.name}{others}")
    return dataclasses.replace(partition, nodes=rest)


def _memory_mb(given: str | None) -> int:
    """Convert the option; 0 without one. Raises ParameterError if torch alone takes more."""
    memory_mb = fields.memory_mb(given) if given else 0
    if given and memory_mb < _TOO_LITTLE_MB:
        meant = f"; {given}G?" if given.isdecimal() else ""
        raise ParameterError("memory", f"{given} is {memory_mb} MiB, and torch alone takes more{meant}")
    return memory_mb


def _share(total: int, wanted: int, there: int) -> int:
    """Compute the share of a node's cores that goes with `wanted` of its `there` GPUs; all of them without GPUs."""
    return max(1, total * wanted // there) if wanted and there else max(1, total)


def _memory(node: jobs.Capacity, cpus: int, gpus: int) -> int:
    """Compute the memory that goes with the larger of the two shares of a node, in MiB."""
    share = max(cpus / max(node.cpus, 1), gpus / node.gpus if node.gpus else 0.0)
    return max(min(_LEAST_MEMORY_MB, node.memory_mb), int(node.memory_mb * min(share, 1.0)))


def _times(wanted: str | None, partition: jobs.Partition) -> tuple[str | None, int]:
    """Compute the time limit to request, and how long before its end the job is warned."""
    seconds = jobs.parse_time(wanted) if wanted else partition.default_time_s or partition.max_time_s
    if wanted and partition.max_time_s and (seconds is None or seconds > partition.max_time_s):
        most = jobs.format_time(partition.max_time_s)
        raise ParameterError("time-limit", f"{wanted} exceeds partition {partition.name}'s limit; use at most {most}")
    least, most_s = _LEAD_S
    lead_s = most_s if seconds is None else min(most_s, max(least, seconds // 5))
    return (jobs.format_time(seconds) if seconds else "UNLIMITED") if wanted else None, lead_s


def _describe_unusable(partition: jobs.Partition) -> str:
    others = [f"{node.name} is {node.state.lower()}" for node in partition.nodes if not node.is_usable]
    if not others:
        return ""
    return f" ({', '.join(others[:4])}{', ...' if len(others) > 4 else ''})"
