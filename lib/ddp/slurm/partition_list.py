"""The cluster's partitions with their nodes, and the resources that each node has for jobs."""

import dataclasses
import re

from ddp.slurm import jobs, partition_limits
from slurm_ddp.slurm import nodes, show, times

_KEPT = "MAINTENANCE"
UNUSABLE = frozenset(
    {"DRAIN", "FAIL", _KEPT, "NOT_RESPONDING", "INVALID_REG", "INVAL", "REBOOT_ISSUED"}
)
# Flags of a node whose slurmd starts when a job needs it
POWER = frozenset({"POWERED_DOWN", "POWERING_UP"})
_USABLE = frozenset({"IDLE", "ALLOCATED", "MIXED", "COMPLETING"})


@dataclasses.dataclass(frozen=True)
class Capacity:
    """The resources of a node that a job can have."""

    name: str
    cpus: int
    memory_mb: int  # without what Slurm keeps for itself
    gpus: int
    state: str  # as scontrol prints it
    is_usable: bool  # it takes jobs, now or once the ones on it have ended
    features: frozenset[str] = frozenset()
    is_kept: bool = False  # in a MAINT reservation, it takes only the reservation's own jobs
    # Of its slurmd, if that registered the node itself and has to run now
    endpoint: tuple[str, int] | None = None
    # Numbers of its GPUs by their types in gres.conf; GPUs without a type have none here
    gpu_types: tuple[tuple[str, int], ...] = ()

    @property
    def models(self) -> frozenset[str]:
        """The types of its GPUs."""
        return frozenset(kind for kind, _ in self.gpu_types)

    def has_gpus(self, kind: str, number: int) -> bool:
        """Return whether it has so many GPUs of a type, or of any with ""."""
        there = dict(self.gpu_types).get(kind, 0) if kind else self.gpus
        return there >= number


@dataclasses.dataclass(frozen=True)
class Partition:
    """A partition with its nodes."""

    name: str
    is_default: bool
    is_up: bool
    max_time_s: int | None  # None: UNLIMITED
    default_time_s: int | None  # None: NONE, then the maximum counts
    nodes: tuple[Capacity, ...]
    preempt_mode: str = ""  # its own, or the cluster's
    limits: partition_limits.Limits = dataclasses.field(default_factory=partition_limits.Limits)

    @property
    def usable(self) -> tuple[Capacity, ...]:
        """The nodes that take jobs."""
        return tuple(node for node in self.nodes if node.is_usable)


def partitions() -> tuple[Partition, ...]:
    """List all partitions with their nodes and limits, hidden ones too, in Slurm's order.

    Raises SlurmError.
    """
    text = jobs.ask("scontrol", "-a", "show", "partition", "-o")
    records = [record for record in show.records(text) if "PartitionName" in record]
    members: dict[str, list[Capacity]] = {}
    for node in show_nodes():
        for name in node.fields.get("Partitions", "").split(","):
            members.setdefault(name, []).append(_capacity(node))

    cluster = jobs.configuration()
    return tuple(
        _partition(record, cluster, members.get(record["PartitionName"], [])) for record in records
    )


def _partition(
    record: dict[str, str], cluster: dict[str, str], members: list[Capacity]
) -> Partition:
    return Partition(
        name=record["PartitionName"],
        is_default=record.get("Default") == "YES",
        is_up=record.get("State") == "UP",
        max_time_s=times.parse_time(record.get("MaxTime", "")),
        default_time_s=times.parse_time(record.get("DefaultTime", "")),
        nodes=tuple(members),
        preempt_mode=record.get("PreemptMode", ""),
        limits=partition_limits.read(record, cluster),
    )


def show_nodes() -> tuple[nodes.Node, ...]:
    """List all nodes. Raises SlurmError."""
    try:
        return tuple(nodes.show_all())
    except nodes.ControllerSilent as e:
        raise jobs.NotAnsweringError(str(e)) from e
    except nodes.NodeError as e:
        raise jobs.SlurmError(str(e)) from e


def _capacity(node: nodes.Node) -> Capacity:
    fields = node.fields
    takes_jobs = _takes_jobs(node)
    is_kept = _KEPT in node.flags
    memory_mb = _amount(fields.get("RealMemory", "0")) - _amount(fields.get("MemSpecLimit", "0"))
    features = (show.value(fields, "AvailableFeatures") or "").split(",")
    return Capacity(
        name=node.name,
        cpus=_amount(fields.get("CPUEfctv", "0")),
        memory_mb=max(memory_mb, 0),
        gpus=nodes.count_gres(node.gres, "gpu"),
        state=node.state_text,
        is_usable=takes_jobs and not is_kept,
        features=frozenset(filter(None, features)),
        is_kept=takes_jobs and is_kept,
        endpoint=_endpoint(node),
        gpu_types=_gpu_types(node.gres),
    )


def _gpu_types(gres: str | None) -> tuple[tuple[str, int], ...]:
    found: list[tuple[str, int]] = []
    for (name, kind), number in nodes.gres_items(gres).items():
        if name == "gpu" and kind:
            found.append((kind, number))
    return tuple(found)


def _takes_jobs(node: nodes.Node) -> bool:
    """Return whether a node takes jobs, apart from a reservation that keeps it."""
    ignored = {_KEPT}
    if node.flags & POWER:
        ignored.add("NOT_RESPONDING")
    return node.state in _USABLE and not node.flags & (UNUSABLE - ignored)


def _endpoint(node: nodes.Node) -> tuple[str, int] | None:
    """Return the address and port of a slurmd that registered its node and has to run now."""
    address = node.address or ""
    is_booting = bool(node.flags & POWER)
    is_numeric = re.fullmatch(r"[0-9.]+|[0-9A-Fa-f:]+", address) is not None
    if not node.is_dynamic or is_booting or not is_numeric:
        return None
    return address, _amount(node.fields.get("Port", "6818"))


def _amount(text: str) -> int:
    """Return the number that a text begins with, or 0."""
    found = re.match(r"\d+", text)
    return int(found[0]) if found else 0
