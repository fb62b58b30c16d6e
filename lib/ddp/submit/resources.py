"""The request to Slurm: the given options, else the partition's own figures."""

import dataclasses
import re

from ddp.base import ParameterError, TrainerError
from ddp.options import fields, models
from ddp.problem import Step
from ddp.slurm import jobs

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
    ranks: int = 1  # on each node without GPUs

    @property
    def ranks_per_node(self) -> int:
        """The ranks on each node: one for each GPU; without GPUs they share the cores."""
        return self.gpus_per_node or self.ranks


def training(params: models.Training, partitions: tuple[jobs.Partition, ...]) -> Request:
    """Compute a training job's request. Without parameters: all usable nodes of the default partition, whole.

    If some of the nodes have GPUs, only those count, with as many GPUs as each of them has.
    Raises ParameterError if the cluster does not have what is asked for.
    """
    partition = choose_partition(params.partition, partitions)
    if params.constraint is not None:
        partition = _with_features(params.constraint, partition)
    named, unwanted = _hosts("nodelist", params.nodelist), _hosts("exclude", params.exclude)
    _check_named(named, partition)
    if params.nodes is not None and params.nodes < len(named):
        raise ParameterError("nodes", f"{params.nodes} is less than the {len(named)} of nodelist; omit nodes")
    nodes = tuple(node for node in partition.nodes if node.name not in unwanted)
    if named and params.nodes in (None, len(named)):
        nodes = tuple(node for node in nodes if node.name in named)
    partition = dataclasses.replace(partition, nodes=nodes)
    candidates = partition.usable
    if not candidates:
        rest = _describe_unusable(partition)
        raise ParameterError("exclude", f"leaves no usable node of partition {partition.name}{rest}")
    if params.gpus_per_node is None and params.ranks and any(node.gpus for node in candidates):
        params = params.model_copy(update={"gpus_per_node": params.ranks})
    if params.gpus_per_node is None:
        candidates = tuple(node for node in candidates if node.gpus) or candidates
    gpus = min(node.gpus for node in candidates) if params.gpus_per_node is None else params.gpus_per_node
    candidates = _able(params, gpus, candidates, partition)
    if unfit := set(named) - {node.name for node in candidates}:
        text = f"{min(unfit)} has too few GPUs or cores, or too little memory; leave it out"
        raise ParameterError("nodelist", text)
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
    return Request(partition.name, num_nodes, gpus, cpus, memory_mb, limit, lead_s, named, unwanted, params.ranks or 1)


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
    is_only = name is None and len(partitions) == 1
    meant = (one for one in partitions if is_only or (one.is_default if name is None else one.name == name))
    found = next(meant, None)
    if found is None:
        what = f"no partition {name!r}" if name else "required, since Slurm has no default partition"
        known = ", ".join(partition.name for partition in partitions)
        raise ParameterError("partition", f"{what}; there are: {known}")
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
    if not any(node.is_usable for node in found):
        features = ", ".join(sorted({name for node in partition.usable for name in node.features})[:12]) or "none"
        text = f"no usable node of partition {partition.name} has {constraint}; its features are: {features}"
        raise ParameterError("constraint", text)
    return dataclasses.replace(partition, nodes=found)


def _hosts(name: str, hostlist: str | None) -> tuple[str, ...]:
    """List the nodes that a checked hostlist names. Raises ParameterError if it is no hostlist."""
    try:
        return tuple(dict.fromkeys(jobs.hostnames(hostlist))) if hostlist else ()
    except jobs.NotAnsweringError as e:
        raise TrainerError(f"Slurm: {e}") from e
    except jobs.SlurmError as e:
        raise ParameterError(name, f"{hostlist}: {e}") from e


def _check_named(names: tuple[str, ...], partition: jobs.Partition) -> None:
    """Raise ParameterError unless a job in the partition can have all of these nodes."""
    states = {node.name: "" if node.is_usable else node.state.lower() for node in partition.nodes}
    for name in names:
        if what := states.get(name, f"not in partition {partition.name}"):
            raise ParameterError("nodelist", f"{name} is {what}; see: scontrol show node {name}")


def _able(
    params: models.Training, gpus: int, candidates: tuple[jobs.Capacity, ...], partition: jobs.Partition
) -> tuple[jobs.Capacity, ...]:
    """Select the nodes that have what the job asks of each. Raises ParameterError if none has."""
    amounts: tuple[tuple[str, int | str | None, int, str], ...] = (
        ("gpus-per-node", params.gpus_per_node, gpus, "gpus"),
        ("cpus-per-task", params.cpus_per_task, params.cpus_per_task or 1, "cpus"),
        ("memory", params.memory, _memory_mb(params.memory), "memory_mb"),
    )
    for name, given, least, attribute in amounts:
        most = max(getattr(node, attribute) for node in candidates)
        if most < least:
            unit = "M" if name == "memory" else ""
            text = f"{given} requested, a node of partition {partition.name} has at most {most}{unit}"
            raise ParameterError(name, text)
        candidates = tuple(node for node in candidates if getattr(node, attribute) >= least)
    return candidates


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
