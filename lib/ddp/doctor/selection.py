"""Which nodes doctor examines, and why Slurm starts nothing on the others."""

import re

from ddp.doctor.facts import leading_number
from ddp.options import models
from ddp.problem import ParameterError
from ddp.slurm import partition_list, usable_nodes
from ddp.submit import resources
from slurm_ddp.slurm import nodes

MAX_NODES = 64  # in one call: every node connects to every other
MEMORY_MB = 1024  # of the probe


def choose_partition(
    params: models.Doctor, partitions: tuple[partition_list.Partition, ...]
) -> partition_list.Partition:
    """Choose the partition to examine; one without a usable node is examined too."""
    try:
        return resources.choose_partition(params, partitions)
    except ParameterError:
        names = (params.partition or "").split(",")
        named: list[partition_list.Partition] = []
        for partition in partitions:
            is_default = params.partition is None and partition.is_default
            if partition.name in names or is_default:
                named.append(partition)
        if named and named[0].nodes:
            return named[0]
        raise


def list_asked(params: models.Doctor, partition: partition_list.Partition) -> list[str]:
    """List the nodes that are named, or all of the partition. Raises ParameterError."""
    there = [node.name for node in partition.nodes if node.state != usable_nodes.OUTSIDE]
    if params.nodes is None:
        if len(there) > MAX_NODES:
            how = f"name at most {MAX_NODES}, such as {there[0]},{there[1]}"
            raise ParameterError("nodes", f"{partition.name} has {len(there)} nodes; {how}")
        return there

    names = list(resources.hosts("nodes", params.nodes))
    if len(names) > MAX_NODES:
        raise ParameterError("nodes", f"{len(names)} named; at most {MAX_NODES} at once")
    for name in names:
        if name not in there:
            place = f"partition {partition.name}"
            if params.reservation:
                place += f" in reservation {params.reservation}"
            known = ", ".join(there[:8])
            raise ParameterError("nodes", f"{name} is not a node of {place}; there are: {known}")
    return names


def find_unfit(
    asked: list[str], partition: partition_list.Partition, known: dict[str, nodes.Node]
) -> dict[str, str]:
    """Map the nodes that Slurm cannot start a step on now to the reason."""
    usable = {node.name for node in partition.usable}
    gone = {node.name for node in partition.nodes if node.state == usable_nodes.GONE}
    unfit: dict[str, str] = {}
    for name in asked:
        why = _why_unfit(known.get(name), is_usable=name in usable)
        if why:
            unfit[name] = why
    unfit |= dict.fromkeys(gone, usable_nodes.GONE)

    most = partition.limits.max_nodes
    if most:
        fit = [name for name in asked if name not in unfit]
        unfit |= dict.fromkeys(fit[most:], f"MaxNodes of partition {partition.name} is {most}")
    return unfit


def _why_unfit(node: nodes.Node | None, *, is_usable: bool) -> str:
    """Return why a node is unfit, or ""; the job's own reservation does not count."""
    if node is None:
        return "Slurm does not know it"
    allowed = {"MAINTENANCE", "NOT_RESPONDING"} if is_usable else set[str]()
    flags = sorted(node.flags & (partition_list.UNUSABLE - allowed))
    if flags or node.state not in ("IDLE", "MIXED", "ALLOCATED"):
        state = "+".join([node.state, *flags])
        return f"{state} ({node.reason})" if node.reason else state
    if node.flags & partition_list.POWER:
        return "busy: it is powered down, or not up yet"
    if node.state == "ALLOCATED" or free_cpus(node) == 0:
        return "busy: jobs use all its cores"
    if _free_memory_mb(node) < MEMORY_MB:
        return "busy: jobs use all its memory"
    return ""


def free_cpus(node: nodes.Node) -> int:
    """Return the number of unallocated CPUs; 1 if Slurm does not report it."""
    total = leading_number(node.fields.get("CPUEfctv", "0")) or 0
    if not total:
        return 1
    used = leading_number(node.fields.get("CPUAlloc", "0")) or 0
    return max(0, total - used)


def free_gpus(node: nodes.Node) -> int:
    """Return the number of unallocated GPUs."""
    used = re.search(r"gres/gpu=(\d+)", node.alloc_tres or "")
    return max(0, nodes.count_gres(node.gres, "gpu") - (int(used[1]) if used else 0))


def _free_memory_mb(node: nodes.Node) -> int:
    """Return the unallocated memory; enough for the probe if Slurm does not report it."""
    total = leading_number(node.fields.get("RealMemory", ""))
    used = leading_number(node.fields.get("AllocMem", ""))
    return MEMORY_MB if total is None or used is None else total - used
