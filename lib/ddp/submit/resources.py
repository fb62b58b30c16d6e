"""The request to Slurm: the given options, else the partition's own figures, within its limits."""

import dataclasses
import re

from ddp.options import fields, models
from ddp.problem import ParameterError, Problem, Step
from ddp.slurm import jobs, partition_limits
from slurm_ddp.slurm import times

Nodes = tuple[jobs.Capacity, ...]
_LEAD_S = (
    30,
    180,
)  # how long before its end a job is warned: enough to write a checkpoint, see payload.md 2.3
_LEAST_MEMORY_MB = 1024  # an interpreter with torch takes half of that
_TOO_LITTLE_MB = 256  # torchrun takes 220 of it, before any rank
_UNKNOWN_MB = 1  # slurm.conf(5), the default of RealMemory


@dataclasses.dataclass(frozen=True)
class Request:
    """The resources of a job."""

    partition: str
    num_nodes: int
    gpus_per_node: int
    cpus_per_task: int  # one task for each node: the ranks of a node share these
    memory_mb: int  # for each node; 0: the site's default
    time_limit: str | None  # in Slurm's notation; None: the partition's own
    lead_s: int  # how long before the time limit the job is warned
    nodelist: tuple[str, ...] = ()  # nodes that must be among them
    exclude: tuple[str, ...] = ()  # nodes that must not
    ranks: int = 1  # on each node without GPUs
    memory_per_cpu_mb: int = 0  # what `memory_mb` was given as, if so
    spare_nodes: int = 0  # beside `num_nodes`

    @property
    def ranks_per_node(self) -> int:
        """The ranks on each node: one for each GPU; without GPUs they share the cores."""
        return self.gpus_per_node or self.ranks


def training(params: models.Training, partitions: tuple[jobs.Partition, ...]) -> Request:
    """Compute a training job's request. Without parameters: all usable nodes of the default partition, whole.

    If some of the nodes have GPUs, only those count, with as many GPUs as each of them has.
    Raises ParameterError if the cluster does not have what is asked for.
    """
    partition = choose_partition(params, partitions)
    most = partition.limits
    if params.constraint is not None:
        partition = _with_features(params.constraint, partition)
    named, unwanted = hosts("nodelist", params.nodelist), hosts("exclude", params.exclude)
    _check_named(named, partition)
    spare = params.spare_nodes
    total = None if params.nodes is None else params.nodes + spare
    if total is not None and total < len(named):
        raise ParameterError(
            "nodes", f"{total} is less than the {len(named)} of nodelist; omit nodes"
        )
    _check("nodes" if params.nodes else "nodelist", total or len(named), most.max_nodes, "MaxNodes")
    _check("cpus-per-task", params.cpus_per_task or 0, most.max_cpus_per_node, "MaxCPUsPerNode")
    nodes = tuple(node for node in partition.nodes if node.name not in unwanted)
    if named and total in (None, len(named)):
        nodes = tuple(node for node in nodes if node.name in named)
    partition = dataclasses.replace(partition, nodes=nodes)
    candidates = partition.usable
    if not candidates:
        rest = _describe_unusable(partition)
        raise ParameterError(
            "exclude", f"leaves no usable node of partition {partition.name}{rest}"
        )
    if params.gpus_per_node is None and params.ranks and any(node.gpus for node in candidates):
        params = params.model_copy(update={"gpus_per_node": params.ranks})
    if params.gpus_per_node is None:
        candidates = tuple(node for node in candidates if node.gpus) or candidates
    gpus = (
        min(node.gpus for node in candidates)
        if params.gpus_per_node is None
        else params.gpus_per_node
    )
    candidates = _able(params, gpus, candidates, partition)
    if unfit := set(named) - {node.name for node in candidates}:
        text = f"{min(unfit)} has too few GPUs or cores, or too little memory; leave it out"
        raise ParameterError("nodelist", text)
    total = min(len(candidates), most.max_nodes or len(candidates)) if total is None else total
    if total <= spare:
        raise ParameterError(
            "spare-nodes", f"{spare} requested, and {total} nodes can be used; use a smaller number"
        )
    if total > len(candidates):
        what = f"{len(partition.usable)} usable{_describe_unusable(partition)}"
        if len(candidates) < len(partition.usable):
            what += f", {len(candidates)} of them with {_describe_needs(params)}"
        raise ParameterError("nodes", f"{total} requested, partition {partition.name} has {what}")
    cpus, memory_mb, per_cpu_mb = _amounts(params, gpus, candidates, most)
    limit, lead_s = _times(params.time_limit, partition)
    rest = (named, unwanted, params.ranks or 1, per_cpu_mb, spare)
    return Request(partition.name, total - spare, gpus, cpus, memory_mb, limit, lead_s, *rest)


def remark(
    params: models.Training, request: Request, partitions: tuple[jobs.Partition, ...]
) -> list[str]:
    """Describe what the defaults make of nodes that differ: idle GPUs, and models that wait for each other."""
    partition = next(one for one in partitions if one.name == request.partition)
    if params.constraint is not None:
        partition = _with_features(params.constraint, partition)
    is_named = len(request.nodelist) == request.num_nodes + request.spare_nodes
    names = request.nodelist if is_named else [n.name for n in partition.usable]
    able = [n for n in partition.usable if n.name in names and n.name not in request.exclude]
    able = [n for n in able if n.gpus >= max(1, request.gpus_per_node)]
    found: list[str] = []
    if params.gpus_per_node is params.ranks is None and (
        rich := [n for n in able if n.gpus > request.gpus_per_node]
    ):
        text = f"{rich[0].name} has {rich[0].gpus} GPUs, {request.gpus_per_node} of them are used on each node"
        found.append(f"{text}; nodelist or exclude chooses equal nodes")
    if (
        request.gpus_per_node
        and len(kinds := {kind: n.name for n in able for kind in n.models or {""}}) > 1
    ):
        text = " and ".join(
            f"{kind or 'unnamed'} (such as {name})" for kind, name in sorted(kinds.items())
        )
        found.append(
            f"GPUs of several models, {text}: the slowest sets the pace; nodelist or constraint chooses one"
        )
    return found


def preparation(params: models.Resources, partitions: tuple[jobs.Partition, ...]) -> Request:
    """Compute the request to prepare a dataset: half a node, at least one core and 2 GiB where it has them."""
    partition = choose_partition(params, partitions)
    node = max(partition.usable, key=lambda node: (node.cpus, node.memory_mb))
    cpus = max(1, min(node.cpus // 2, partition.limits.max_cpus_per_node or node.cpus))
    memory_mb = bounded_mb(
        None, min(node.memory_mb, max(2048, node.memory_mb // 2)), cpus, partition.limits
    )
    limit, lead_s = _times(params.time_limit, partition)
    return Request(partition.name, 1, 0, cpus, memory_mb, limit, lead_s)


def check_array(name: str, size: int, partitions: tuple[jobs.Partition, ...]) -> None:
    """Raise ParameterError if an array of this size is larger than the cluster allows."""
    _check(name, size, partitions[0].limits.max_array_size if partitions else None, "MaxArraySize")


def choose_partition(
    params: models.Place, partitions: tuple[jobs.Partition, ...]
) -> jobs.Partition:
    """Return the named partition or the default one. Raises ParameterError unless it takes jobs, and this user's."""
    name = params.partition
    if not partitions:
        raise Problem(
            "Slurm has no partition yet", remedy=Step("add-partition", "add one to slurm.conf")
        )
    is_only = name is None and len(partitions) == 1
    meant = (
        one
        for one in partitions
        if is_only or (one.is_default if name is None else one.name == name)
    )
    found = next(meant, None)
    if found is None:
        what = (
            f"no partition {name!r}" if name else "required, since Slurm has no default partition"
        )
        known = ", ".join(partition.name for partition in partitions)
        raise ParameterError("partition", f"{what}; there are: {known}")
    if not found.is_up:
        step = Step(
            "partition-up",
            f"an administrator types: scontrol update partitionname={found.name} state=up",
        )
        raise ParameterError("partition", f"{found.name} is not up", remedy=step)
    if not found.usable:
        raise ParameterError(
            "partition",
            f"{found.name} has no usable node{_describe_unusable(found)}; see: sinfo -R",
        )
    if refusal := partition_limits.refusal(
        found.name, found.limits, account=params.account, qos=params.qos
    ):
        raise ParameterError(*refusal)
    return found


def _amounts(
    params: models.Training, gpus: int, nodes: Nodes, most: partition_limits.Limits
) -> tuple[int, int, int]:
    """Compute the cores and the memory on a node, and the memory for each core or 0. Raises ParameterError."""
    most_cpus, least_mb = most.max_cpus_per_node or fields.MAX_CPUS, min(n.memory_mb for n in nodes)
    whole, per_cpu_mb = (
        params.exclusive or most.is_exclusive,
        fields.memory_mb(params.mem_per_cpu or fields.SITE),
    )
    share = min(n.cpus if whole else _share(n.cpus, gpus, n.gpus) for n in nodes)
    cpus = params.cpus_per_task or min(share, most_cpus)
    if per_cpu_mb and not params.cpus_per_task:
        cpus = max(1, min(cpus, min(least_mb, most.max_memory_mb or least_mb) // per_cpu_mb))
    if params.memory == fields.SITE:
        _check_site(
            most.default_memory_mb or cpus * (most.default_memory_per_cpu_mb or 0), cpus, least_mb
        )
    if not per_cpu_mb:
        share = min(n.memory_mb if whole else _memory(n, cpus, gpus) for n in nodes)
        return cpus, bounded_mb(params.memory, share, cpus, most), 0
    if params.memory is not None:
        raise ParameterError("mem-per-cpu", "omit one of memory and mem-per-cpu")
    _check("mem-per-cpu", per_cpu_mb, most.max_memory_per_cpu_mb, "MaxMemPerCPU", "M")
    _check(
        "mem-per-cpu",
        per_cpu_mb * cpus,
        most.max_memory_mb,
        f"MaxMemPerNode, for {cpus} cores",
        "M",
    )
    _check("mem-per-cpu", per_cpu_mb * cpus, least_mb, f"memory of a node, for {cpus} cores", "M")
    return cpus, per_cpu_mb * cpus, per_cpu_mb


def _check_site(default_mb: int, cpus: int, node_mb: int) -> None:
    """Raise ParameterError if what the site gives a job is too little for torch, or more than a node has."""
    what = f"the site's default for {cpus} cores (DefMemPerCPU, DefMemPerNode)"
    if 0 < default_mb < _TOO_LITTLE_MB:
        raise ParameterError(
            "memory", f"{default_mb}M is {what}, and torch alone takes more; name an amount"
        )
    if default_mb > node_mb > _UNKNOWN_MB:
        raise ParameterError(
            "memory", f"{default_mb}M is {what}, and a node has {node_mb}M; name an amount"
        )


def _check(name: str, amount: int, limit: int | None, what: str, unit: str = "") -> None:
    """Raise ParameterError if an amount exceeds a limit."""
    if limit is not None and amount > limit:
        raise ParameterError(name, f"{amount}{unit} exceeds the limit of {limit}{unit} ({what})")


def bounded_mb(given: str | None, share_mb: int, cpus: int, most: partition_limits.Limits) -> int:
    """Compute the memory on a node within the limits; 0 where the site decides, or Slurm does not know a node's."""
    memory_mb = _memory_mb(given)
    by_cpus = most.max_memory_per_cpu_mb and most.max_memory_per_cpu_mb * cpus
    bounds = {"MaxMemPerNode": most.max_memory_mb, f"MaxMemPerCPU, for {cpus} cores": by_cpus}
    for what, bound in bounds.items():
        _check("memory", memory_mb, bound, what, "M")
    if given == fields.SITE or (not given and share_mb <= _UNKNOWN_MB):
        return 0
    return memory_mb or min([share_mb, *filter(None, bounds.values())])


def _with_features(constraint: str, partition: jobs.Partition) -> jobs.Partition:
    """Limit a partition to the nodes that the constraint allows; Slurm evaluates one with both & and |."""
    wanted = set(re.split(r"[&|]", constraint))
    least = 1 if "|" in constraint else len(wanted)
    is_mixed = "&" in constraint and "|" in constraint
    found = tuple(
        node for node in partition.nodes if is_mixed or len(wanted & node.features) >= least
    )
    if not any(node.is_usable for node in found):
        features = (
            ", ".join(sorted({name for node in partition.usable for name in node.features})[:12])
            or "none"
        )
        text = f"no usable node of partition {partition.name} has {constraint}; its features are: {features}"
        raise ParameterError("constraint", text)
    return dataclasses.replace(partition, nodes=found)


def hosts(name: str, hostlist: str | None) -> tuple[str, ...]:
    """List the nodes that a checked hostlist names. Raises ParameterError if it is no hostlist."""
    try:
        return tuple(dict.fromkeys(jobs.hostnames(hostlist))) if hostlist else ()
    except jobs.NotAnsweringError as e:
        raise Problem(f"Slurm: {e}") from e
    except jobs.SlurmError as e:
        raise ParameterError(name, f"{hostlist}: {e}") from e


def _check_named(names: tuple[str, ...], partition: jobs.Partition) -> None:
    """Raise ParameterError unless a job in the partition can have all of these nodes."""
    states = {node.name: "" if node.is_usable else node.state.lower() for node in partition.nodes}
    for name in names:
        if what := states.get(name, f"not in partition {partition.name}"):
            raise ParameterError("nodelist", f"{name} is {what}; see: scontrol show node {name}")


def _able(
    params: models.Training, gpus: int, candidates: Nodes, partition: jobs.Partition
) -> Nodes:
    """Select the nodes that have what the job asks of each. Raises ParameterError if none has."""
    per_cpu_mb = fields.memory_mb(params.mem_per_cpu or fields.SITE)
    amounts: tuple[tuple[str, int | str | None, int, str], ...] = (
        ("gpus-per-node", params.gpus_per_node, gpus, "gpus"),
        ("cpus-per-task", params.cpus_per_task, params.cpus_per_task or 1, "cpus"),
        ("memory", params.memory, _memory_mb(params.memory), "memory_mb"),
        ("mem-per-cpu", params.mem_per_cpu, per_cpu_mb * (params.cpus_per_task or 1), "memory_mb"),
    )
    for name, given, least, attribute in amounts:
        most = max(getattr(node, attribute) for node in candidates)
        if most < least:
            unit = "M" if attribute == "memory_mb" else ""
            text = (
                f"{given} requested, a node of partition {partition.name} has at most {most}{unit}"
            )
            raise ParameterError(name, text)
        candidates = tuple(node for node in candidates if getattr(node, attribute) >= least)
    return candidates


def _memory_mb(given: str | None) -> int:
    """Convert the option; 0 without one. Raises ParameterError if torch alone takes more."""
    memory_mb = fields.memory_mb(given) if given else 0
    if given not in (None, fields.SITE) and memory_mb < _TOO_LITTLE_MB:
        meant = f"; {given}G?" if given.isdecimal() else ""
        raise ParameterError(
            "memory", f"{given} is {memory_mb} MiB, and torch alone takes more{meant}"
        )
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
    seconds = (
        times.parse_time(wanted) if wanted else partition.default_time_s or partition.max_time_s
    )
    if wanted and partition.max_time_s and (seconds is None or seconds > partition.max_time_s):
        most = times.format_time(partition.max_time_s)
        raise ParameterError(
            "time-limit", f"{wanted} exceeds partition {partition.name}'s limit; use at most {most}"
        )
    least, most_s = _LEAD_S
    lead_s = most_s if seconds is None else min(most_s, max(least, seconds // 5))
    return (times.format_time(seconds) if seconds else "UNLIMITED") if wanted else None, lead_s


def _describe_needs(params: models.Training) -> str:
    """Describe what only some of the usable nodes have."""
    needs = {
        "GPUs": params.gpus_per_node,
        "cores": params.cpus_per_task,
        "of memory": params.memory,
    }
    needs["of memory for each core"] = params.mem_per_cpu
    return ", ".join(f"{amount} {what}" for what, amount in needs.items() if amount) or "GPUs"


def _describe_unusable(partition: jobs.Partition) -> str:
    others = [
        f"{node.name} is {node.state.lower()}" for node in partition.nodes if not node.is_usable
    ]
    if not others:
        return ""
    return f" ({', '.join(others[:4])}{', ...' if len(others) > 4 else ''})"
