"""The request to Slurm: the given options, or else the partition's figures, within its limits."""

import collections.abc
import dataclasses

from ddp.options import fields, models
from ddp.problem import ParameterError, Problem, Step
from ddp.slurm import features, jobs, partition_limits, partition_list
from slurm_ddp.slurm import times

Nodes = tuple[partition_list.Capacity, ...]
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

    partition: str  # or several, separated by commas: Slurm takes the one that starts first
    num_nodes: int
    gpus_per_node: int
    cpus_per_task: int  # one task for each node: the ranks of a node share these
    memory_mb: int  # for each node; 0: the site's default
    time_limit: str | None  # in Slurm's notation; None: the partition's own
    lead_s: int  # how long before the time limit the job is warned
    nodelist: tuple[str, ...] = ()  # nodes that must be among them
    exclude: tuple[str, ...] = ()  # nodes that must not
    ranks: int = 0  # on each node, if asked for
    memory_per_cpu_mb: int = 0  # what `memory_mb` was given as, if so
    spare_nodes: int = 0  # in addition to `num_nodes`
    gpu_types: str = ""  # with their numbers, such as a100:2, if they are given

    @property
    def ranks_per_node(self) -> int:
        """The ranks on each node: one for each GPU; without GPUs they share the cores."""
        return self.ranks or self.gpus_per_node or 1


@dataclasses.dataclass(frozen=True)
class _Hosts:
    """The nodes that a job names, and how many it asks for."""

    named: tuple[str, ...]  # that must be among its nodes
    unwanted: tuple[str, ...]  # that must not
    total: int | None  # with the spare ones; None: as many as there are

    @property
    def are_all_named(self) -> bool:
        """Whether the job runs on the named nodes and on no other."""
        return bool(self.named) and self.total in (None, len(self.named))


def training(params: models.Training, partitions: tuple[partition_list.Partition, ...]) -> Request:
    """Compute a training job's request.

    Without parameters: all usable nodes of the default partition, whole.

    If some of the nodes have GPUs, only those count, with as many GPUs as each of them has. With
    several partitions the figures fit each of them. Raises ParameterError if the cluster lacks the
    requested resources.
    """
    if params.gpus_per_node and params.gpus_of_gres:
        text = f"--gres asks for GPUs, too ({params.gpus_of_gres}); omit one of them"
        raise ParameterError("gpus-per-node", text)
    if params.constraint is not None:
        params = _check_constraint(params, partitions)
    chosen = choose_partitions(params, partitions)
    found = _fitting(params, chosen)
    if len(found) > 1:
        params = _with_least(params, found)
        found = _fitting(params, chosen)
    return _common(found, params.partition or chosen[0].name)


def _fitting(
    params: models.Training, chosen: collections.abc.Sequence[partition_list.Partition]
) -> list[Request]:
    """Compute the requests to the partitions that can fulfil them.

    Raises ParameterError if none can.
    """
    found: list[Request] = []
    refusals: list[ParameterError] = []
    for partition in chosen:
        try:
            found.append(_request(params, partition))
        except ParameterError as e:
            refusals.append(e)
    if not found:
        raise refusals[0]
    return found


def _with_least(params: models.Training, found: list[Request]) -> models.Training:
    """Fill options that are not given with the least of all partitions."""
    least: dict[str, object] = {}
    if params.nodes is None:
        least["nodes"] = min(one.num_nodes for one in found)
    if params.gpus is None:
        least["gpus_per_node"] = str(min(one.gpus_per_node for one in found))
    if params.cpus_per_task is None:
        least["cpus_per_task"] = min(one.cpus_per_task for one in found)
    return params.model_copy(update=least)


def _common(found: list[Request], partition: str) -> Request:
    """Make one request of those to several partitions; they differ in memory and the warning."""
    return dataclasses.replace(
        found[0],
        partition=partition,
        memory_mb=min(one.memory_mb for one in found),
        lead_s=min(one.lead_s for one in found),
    )


def _request(params: models.Training, partition: partition_list.Partition) -> Request:
    """Compute a training job's request to one partition.

    Raises ParameterError if it cannot be fulfilled.
    """
    most = partition.limits
    if params.constraint is not None:
        partition = _with_features(params.constraint, partition)
    wanted = _hosts(params, partition)
    partition = _within(partition, wanted)
    usable = partition.usable
    if not usable:
        rest = _describe_unusable(partition)
        text = f"leaves no usable node of partition {partition.name}{rest}"
        raise ParameterError("exclude", text)

    params = _with_gpus_for_ranks(params, usable)
    gpus, candidates = _choose_gpus(params, usable)
    candidates = _able(params, gpus, candidates, partition)
    total = _count_nodes(params, wanted, candidates, partition)
    cpus, memory_mb, per_cpu_mb = _amounts(params, gpus, candidates, most)
    limit, lead_s = _times(params.time_limit, partition)
    return Request(
        partition.name,
        total - params.spare_nodes,
        gpus,
        cpus,
        memory_mb,
        limit,
        lead_s,
        nodelist=wanted.named,
        exclude=wanted.unwanted,
        ranks=1 if params.launcher == "node" else params.ranks_per_node or 0,
        memory_per_cpu_mb=per_cpu_mb,
        spare_nodes=params.spare_nodes,
        gpu_types=_typed(params.gpus),
    )


def _typed(gpus: str | None) -> str:
    """Return the GPUs as they are given if they have types, or ""."""
    if gpus is None:
        return ""
    has_types = any(kind for kind, _ in fields.parse_gpus(gpus))
    return gpus if has_types else ""


def _hosts(params: models.Training, partition: partition_list.Partition) -> _Hosts:
    """Read the options that name or count nodes.

    Raises ParameterError if the partition does not allow them.
    """
    named = hosts("nodelist", params.nodelist)
    unwanted = hosts("exclude", params.exclude)
    _check_named(named, partition)
    total = None if params.nodes is None else params.nodes + params.spare_nodes
    if total is not None and total < len(named):
        text = f"{total} is less than the {len(named)} of nodelist; omit nodes"
        raise ParameterError("nodes", text)

    most = partition.limits
    option = "nodes" if params.nodes else "nodelist"
    _check(option, total or len(named), most.max_nodes, "MaxNodes")
    _check("cpus-per-task", params.cpus_per_task or 0, most.max_cpus_per_node, "MaxCPUsPerNode")
    return _Hosts(named, unwanted, total)


def _within(partition: partition_list.Partition, wanted: _Hosts) -> partition_list.Partition:
    """Limit a partition to the nodes that the job may have."""
    nodes = [node for node in partition.nodes if node.name not in wanted.unwanted]
    if wanted.are_all_named:
        nodes = [node for node in nodes if node.name in wanted.named]
    return dataclasses.replace(partition, nodes=tuple(nodes))


def _with_gpus_for_ranks(params: models.Training, nodes: Nodes) -> models.Training:
    """Give each rank that is asked for a GPU, where nodes have some.

    Raises ParameterError if no node has that many.
    """
    ranks = params.ranks_per_node
    most = max((node.gpus for node in nodes), default=0)
    if params.gpus is not None or not ranks or not most:
        return params
    if ranks > most:
        text = f"{ranks} ranks take a GPU each, and a node has at most {most}"
        raise ParameterError("ranks-per-node", f"{text}; to share them, give gpus-per-node")
    return params.model_copy(update={"gpus_per_node": str(ranks)})


def _choose_gpus(params: models.Training, nodes: Nodes) -> tuple[int, Nodes]:
    """Choose the GPUs on each node, and the nodes that count: those with GPUs, if any has some."""
    if params.num_gpus is not None:
        return params.num_gpus, nodes
    candidates = tuple(node for node in nodes if node.gpus) or nodes
    return min(node.gpus for node in candidates), candidates


def _count_nodes(
    params: models.Training, wanted: _Hosts, candidates: Nodes, partition: partition_list.Partition
) -> int:
    """Return the number of nodes, with the spare ones.

    Raises ParameterError if there are not as many.
    """
    if unfit := set(wanted.named) - {node.name for node in candidates}:
        text = f"{min(unfit)} has too few GPUs or cores, or too little memory; leave it out"
        raise ParameterError("nodelist", text)

    total = wanted.total
    if total is None:
        total = min(len(candidates), partition.limits.max_nodes or len(candidates))
    spare = params.spare_nodes
    if total <= spare:
        text = f"{spare} requested, and {total} nodes can be used; use a smaller number"
        raise ParameterError("spare-nodes", text)
    if total > len(candidates):
        usable = partition.usable
        what = f"{len(usable)} usable{_describe_unusable(partition)}"
        if len(candidates) < len(usable):
            what += f", {len(candidates)} of them with {_describe_needs(params)}"
        raise ParameterError("nodes", f"{total} requested, partition {partition.name} has {what}")
    return total


def remark(
    params: models.Training, request: Request, partitions: tuple[partition_list.Partition, ...]
) -> list[str]:
    """Remark on nodes that differ: GPUs stay idle, or fast ones wait for slow ones."""
    nodes = _nodes_of(params, request, partitions)
    is_default = params.gpus is None and params.ranks_per_node is None
    found: list[str] = []
    if params.constraint is not None and params.nodes is None and not params.nodelist:
        constraint = features.Constraint(params.constraint)
        if not constraint.is_clear:
            text = f"only Slurm evaluates constraint {params.constraint}"
            text += f", so the job asks for as many nodes as sbatch, {constraint.num_nodes}"
            found.append(f"{text}; nodes asks for more")
    if is_default and (idle := _remark_on_idle_gpus(request, nodes)):
        found.append(idle)
    is_untyped = bool(request.gpus_per_node) and not request.gpu_types
    if is_untyped and (mixed := _remark_on_models(nodes)):
        found.append(mixed)
    return found


def _nodes_of(
    params: models.Training, request: Request, partitions: tuple[partition_list.Partition, ...]
) -> list[partition_list.Capacity]:
    """List the nodes that Slurm may choose for a request with GPUs."""
    names = request.partition.split(",")
    are_all_named = len(request.nodelist) == request.num_nodes + request.spare_nodes
    found: dict[str, partition_list.Capacity] = {}
    for partition in partitions:
        if partition.name not in names:
            continue
        for node in _allowed(params.constraint, partition.usable):
            if node.name in request.exclude or node.gpus < max(1, request.gpus_per_node):
                continue
            if node.name in request.nodelist or not are_all_named:
                found[node.name] = node
    return list(found.values())


def _remark_on_idle_gpus(request: Request, nodes: list[partition_list.Capacity]) -> str:
    for node in nodes:
        if node.gpus > request.gpus_per_node:
            text = f"{node.name} has {node.gpus} GPUs, {request.gpus_per_node} of them are used"
            return f"{text} on each node; nodelist or exclude chooses equal nodes"
    return ""


def _remark_on_models(nodes: list[partition_list.Capacity]) -> str:
    kinds = {kind: node.name for node in nodes for kind in node.models or {""}}
    if len(kinds) < 2:
        return ""
    named = [f"{kind or 'unnamed'} (such as {name})" for kind, name in sorted(kinds.items())]
    text = f"GPUs of several models, {' and '.join(named)}: the slowest sets the pace"
    return f"{text}; nodelist or constraint chooses one"


def preparation(
    params: models.Resources, partitions: tuple[partition_list.Partition, ...]
) -> Request:
    """Compute the request to prepare a dataset: half a node, at least one core and 2 GiB."""
    chosen = choose_partitions(params, partitions)
    found = [_half_a_node(params, partition) for partition in chosen]
    cpus = min(one.cpus_per_task for one in found)
    request = _common(found, params.partition or chosen[0].name)
    return dataclasses.replace(request, cpus_per_task=cpus)


def _half_a_node(params: models.Resources, partition: partition_list.Partition) -> Request:
    node = max(partition.usable, key=lambda node: (node.cpus, node.memory_mb))
    most_cpus = partition.limits.max_cpus_per_node or node.cpus
    cpus = max(1, min(node.cpus // 2, most_cpus))
    half_mb = max(2048, node.memory_mb // 2)
    memory_mb = bounded_mb(None, min(node.memory_mb, half_mb), cpus, partition.limits)
    limit, lead_s = _times(params.time_limit, partition)
    return Request(partition.name, 1, 0, cpus, memory_mb, limit, lead_s)


def check_array(name: str, size: int, partitions: tuple[partition_list.Partition, ...]) -> None:
    """Raise ParameterError if an array of this size is larger than the cluster allows."""
    _check(name, size, partitions[0].limits.max_array_size if partitions else None, "MaxArraySize")


def choose_partitions(
    params: models.Place, partitions: tuple[partition_list.Partition, ...]
) -> list[partition_list.Partition]:
    """Return the named partitions, or the default one; those that cannot take the job are left out.

    Raises ParameterError unless one takes jobs, and this user's.
    """
    names = [name for name in (params.partition or "").split(",") if name]
    named = [_named_partition(name, partitions) for name in dict.fromkeys(names)]
    found: list[partition_list.Partition] = []
    refusals: list[ParameterError] = []
    for partition in named or [_named_partition(None, partitions)]:
        try:
            _check_partition(params, partition)
        except ParameterError as e:
            refusals.append(e)
        else:
            found.append(partition)
    if not found:
        raise refusals[0]
    return found


def choose_partition(
    params: models.Place, partitions: tuple[partition_list.Partition, ...]
) -> partition_list.Partition:
    """Return the first of the named partitions that takes jobs, or the default one.

    Raises ParameterError unless one takes jobs, and this user's.
    """
    return choose_partitions(params, partitions)[0]


def _check_partition(params: models.Place, partition: partition_list.Partition) -> None:
    """Raise ParameterError unless a partition takes jobs, and this user's."""
    name = partition.name
    if not partition.is_up:
        text = f"an administrator types: scontrol update partitionname={name} state=up"
        step = Step("partition-up", text)
        raise ParameterError("partition", f"{name} is not up", remedy=step)
    if not partition.usable:
        text = f"{name} has no usable node{_describe_unusable(partition)}; see: sinfo -R"
        raise ParameterError("partition", text)
    if refusal := partition_limits.refusal(
        name, partition.limits, account=params.account, qos=params.qos
    ):
        raise ParameterError(*refusal)


def _named_partition(
    name: str | None, partitions: tuple[partition_list.Partition, ...]
) -> partition_list.Partition:
    """Return the partition of a name; without one the default, or the only one.

    Raises ParameterError.
    """
    if not partitions:
        step = Step("add-partition", "add one to slurm.conf")
        raise Problem("Slurm has no partition yet", remedy=step)
    if name is None and len(partitions) == 1:
        return partitions[0]
    for one in partitions:
        is_meant = one.is_default if name is None else one.name == name
        if is_meant:
            return one

    known = ", ".join(partition.name for partition in partitions)
    what = f"no partition {name!r}" if name else "required, since Slurm has no default partition"
    raise ParameterError("partition", f"{what}; there are: {known}")


def _amounts(
    params: models.Training, gpus: int, nodes: Nodes, most: partition_limits.Limits
) -> tuple[int, int, int]:
    """Compute the cores and the memory on a node, and the memory for each core or 0.

    Raises ParameterError.
    """
    per_cpu_mb = params.mem_per_cpu_mb
    least_mb = min(node.memory_mb for node in nodes)
    is_whole = params.exclusive or most.is_exclusive

    cpus = params.cpus_per_task
    if cpus is None:
        cpus = _default_cpus(params, gpus, nodes, most)
    if params.memory_mb == 0:
        default_mb = most.default_memory_mb or cpus * (most.default_memory_per_cpu_mb or 0)
        _check_site(default_mb, cpus, least_mb)

    if per_cpu_mb:
        _check_per_cpu(params, per_cpu_mb, cpus, least_mb, most)
        return cpus, per_cpu_mb * cpus, per_cpu_mb
    share_mb = least_mb
    if not is_whole:
        share_mb = min(_memory(node, cpus, gpus) for node in nodes)
    return cpus, bounded_mb(params.memory_mb, share_mb, cpus, most), 0


def _default_cpus(
    params: models.Training, gpus: int, nodes: Nodes, most: partition_limits.Limits
) -> int:
    """Return the cores that go with a node's GPUs, as many as each node has, with memory."""
    if params.exclusive or most.is_exclusive:
        cpus = min(node.cpus for node in nodes)
    else:
        cpus = min(_share(node.cpus, gpus, node.gpus) for node in nodes)
    cpus = min(cpus, most.max_cpus_per_node or fields.MAX_CPUS)
    if not params.mem_per_cpu_mb:
        return cpus

    memory_mb = min(node.memory_mb for node in nodes)
    memory_mb = min(memory_mb, most.max_memory_mb or memory_mb)
    return max(1, min(cpus, memory_mb // params.mem_per_cpu_mb))


def _check_per_cpu(
    params: models.Training, per_cpu_mb: int, cpus: int, node_mb: int, most: partition_limits.Limits
) -> None:
    """Raise ParameterError if a node, or the partition, has less memory than the cores take."""
    name = "mem-per-cpu"
    if params.memory is not None:
        raise ParameterError(name, "omit one of memory and mem-per-cpu")
    total_mb = per_cpu_mb * cpus
    for_cores = f"for {cpus} cores"
    _check(name, per_cpu_mb, most.max_memory_per_cpu_mb, "MaxMemPerCPU", "M")
    _check(name, total_mb, most.max_memory_mb, f"MaxMemPerNode, {for_cores}", "M")
    _check(name, total_mb, node_mb, f"memory of a node, {for_cores}", "M")


def _check_site(default_mb: int, cpus: int, node_mb: int) -> None:
    """Raise ParameterError if the site's default is too small for torch or too large for a node."""
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


def bounded_mb(
    wanted_mb: int | None, share_mb: int, cpus: int, most: partition_limits.Limits
) -> int:
    """Compute the memory on a node within the limits: the wanted amount, or else a share.

    Returns 0 if the site decides, or Slurm does not know a node's memory.
    """
    by_cpus = most.max_memory_per_cpu_mb and most.max_memory_per_cpu_mb * cpus
    _check("memory", wanted_mb or 0, most.max_memory_mb, "MaxMemPerNode", "M")
    _check("memory", wanted_mb or 0, by_cpus, f"MaxMemPerCPU, for {cpus} cores", "M")
    if wanted_mb is not None:
        return wanted_mb
    if share_mb <= _UNKNOWN_MB:
        return 0
    return min(filter(None, (share_mb, most.max_memory_mb, by_cpus)))


def _check_constraint(
    params: models.Training, partitions: tuple[partition_list.Partition, ...]
) -> models.Training:
    """Check that nodes have the words of a constraint, and count its nodes if only Slurm can.

    Raises ParameterError for a word that no node has.
    """
    constraint = features.Constraint(params.constraint or "")
    known: set[str] = set()
    for partition in partitions:
        for node in partition.nodes:
            known |= node.features
    for word in constraint.words:
        if word not in known:
            listed = ", ".join(sorted(known)[:12]) or "none"
            text = f"no node of the cluster has {word}; its features are: {listed}"
            raise ParameterError("constraint", text)
    if constraint.is_clear or params.nodes or params.nodelist:
        return params

    # Slurm lets a node satisfy several of its counts: more nodes than there are is not an error yet
    most = max((len(partition.usable) for partition in partitions), default=1)
    num_nodes = min(constraint.num_nodes, max(1, most))
    return params.model_copy(update={"nodes": num_nodes})


def _with_features(
    constraint: str, partition: partition_list.Partition
) -> partition_list.Partition:
    """Limit a partition to the nodes that the constraint may allow.

    Raises ParameterError if none of them is usable.
    """
    found = _allowed(constraint, partition.nodes)
    if not any(node.is_usable for node in found):
        known: set[str] = set()
        for node in partition.usable:
            known |= node.features
        listed = ", ".join(sorted(known)[:12]) or "none"
        text = f"no usable node of partition {partition.name} has {constraint}"
        raise ParameterError("constraint", f"{text}; its features are: {listed}")
    return dataclasses.replace(partition, nodes=found)


def _allowed(constraint: str | None, nodes: Nodes) -> Nodes:
    """Select the nodes that a constraint may allow."""
    if constraint is None:
        return nodes
    allows = features.Constraint(constraint).allows
    return tuple(node for node in nodes if allows(node.features))


def hosts(name: str, hostlist: str | None) -> tuple[str, ...]:
    """List the nodes that a checked hostlist names. Raises ParameterError if it is invalid."""
    try:
        return tuple(dict.fromkeys(jobs.hostnames(hostlist))) if hostlist else ()
    except jobs.NotAnsweringError as e:
        raise Problem(f"Slurm: {e}") from e
    except jobs.SlurmError as e:
        raise ParameterError(name, f"{hostlist}: {e}") from e


def _check_named(names: tuple[str, ...], partition: partition_list.Partition) -> None:
    """Raise ParameterError unless a job in the partition can have all of these nodes."""
    states = {node.name: "" if node.is_usable else node.state.lower() for node in partition.nodes}
    for name in names:
        if what := states.get(name, f"not in partition {partition.name}"):
            raise ParameterError("nodelist", f"{name} is {what}; see: scontrol show node {name}")


def _able(
    params: models.Training, gpus: int, candidates: Nodes, partition: partition_list.Partition
) -> Nodes:
    """Select the nodes that are large enough for the job. Raises ParameterError if none is."""
    _check_memory(params)
    candidates = _with_types(params.gpus, candidates, partition)
    per_core_mb = params.mem_per_cpu_mb * (params.cpus_per_task or 1)
    amounts: tuple[tuple[str, int | str | None, int, str], ...] = (
        ("gpus-per-node", params.gpus, gpus, "gpus"),
        ("cpus-per-task", params.cpus_per_task, params.cpus_per_task or 1, "cpus"),
        ("memory", params.memory, params.memory_mb or 0, "memory_mb"),
        ("mem-per-cpu", params.mem_per_cpu, per_core_mb, "memory_mb"),
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


def _with_types(gpus: str | None, nodes: Nodes, partition: partition_list.Partition) -> Nodes:
    """Select the nodes with GPUs of the given types. Raises ParameterError if none has them."""
    if not gpus or not _typed(gpus):
        return nodes
    wanted = fields.parse_gpus(gpus)
    able = [node for node in nodes if all(node.has_gpus(*one) for one in wanted)]
    if able:
        return tuple(able)
    there = sorted({f"{kind}:{number}" for node in nodes for kind, number in node.gpu_types})
    text = f"{gpus} requested, nodes of partition {partition.name} have {', '.join(there[:8])}"
    raise ParameterError("gpus-per-node", text if there else f"{text}no GPUs with a type")


def _check_memory(params: models.Training) -> None:
    """Raise ParameterError if torch alone takes more than the memory that is asked for."""
    given, memory_mb = params.memory, params.memory_mb
    if given and memory_mb and memory_mb < _TOO_LITTLE_MB:
        meant = f"; {given}G?" if given.isdecimal() else ""
        text = f"{given} is {memory_mb} MiB, and torch alone takes more{meant}"
        raise ParameterError("memory", text)


def _share(total: int, wanted: int, there: int) -> int:
    """Compute the share of a node's cores that goes with `wanted` of its `there` GPUs."""
    return max(1, total * wanted // there) if wanted and there else max(1, total)


def _memory(node: partition_list.Capacity, cpus: int, gpus: int) -> int:
    """Compute the memory that goes with the larger of the two shares of a node, in MiB."""
    share = max(cpus / max(node.cpus, 1), gpus / node.gpus if node.gpus else 0.0)
    return max(min(_LEAST_MEMORY_MB, node.memory_mb), int(node.memory_mb * min(share, 1.0)))


def _times(wanted: str | None, partition: partition_list.Partition) -> tuple[str | None, int]:
    """Compute the time limit to request, and how long before its end the job is warned."""
    seconds = partition.default_time_s or partition.max_time_s
    limit = None
    if wanted:
        seconds = times.parse_time(wanted)
        limit = times.format_time(seconds) if seconds else "UNLIMITED"
        most_s = partition.max_time_s
        if most_s and (seconds is None or seconds > most_s):
            text = f"{wanted} exceeds partition {partition.name}'s limit"
            text += f"; use at most {times.format_time(most_s)}"
            raise ParameterError("time-limit", text)

    least_lead_s, most_lead_s = _LEAD_S
    if seconds is None:
        return limit, most_lead_s
    return limit, min(most_lead_s, max(least_lead_s, seconds // 5))


def _describe_needs(params: models.Training) -> str:
    """Describe the requirements that only some of the usable nodes meet."""
    needs = {
        "GPUs": params.gpus,
        "cores": params.cpus_per_task,
        "of memory": params.memory,
    }
    needs["of memory for each core"] = params.mem_per_cpu
    return ", ".join(f"{amount} {what}" for what, amount in needs.items() if amount) or "GPUs"


def _describe_unusable(partition: partition_list.Partition) -> str:
    others = [
        f"{node.name} is {node.state.lower()}" for node in partition.nodes if not node.is_usable
    ]
    if not others:
        return ""
    return f" ({', '.join(others[:4])}{', ...' if len(others) > 4 else ''})"
