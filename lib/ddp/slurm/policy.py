"""The limits of a partition, under the names of slurm.conf(5), and whose jobs it takes."""

import collections.abc
import contextlib
import dataclasses
import grp
import os
import pwd

Record = collections.abc.Mapping[str, str]
_KINDS = {"Groups": "partition", "Accounts": "account", "Qos": "qos"}
OPTIONS = {f"{rule}{what}": option for what, option in _KINDS.items() for rule in ("Allow", "Deny")}


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a job in the partition may ask for; None: any amount."""

    max_nodes: int | None = None
    max_cpus_per_node: int | None = None
    max_memory_mb: int | None = None  # on a node
    max_memory_per_cpu_mb: int | None = None
    default_memory_mb: int | None = None  # on a node, of a job that asks for none
    default_memory_per_cpu_mb: int | None = None
    max_array_size: int | None = None  # the cluster's
    is_exclusive: bool = False  # jobs get whole nodes
    lists: collections.abc.Mapping[str, tuple[str, ...]] = dataclasses.field(
        default_factory=dict[str, tuple[str, ...]]
    )


def read(partition: Record, cluster: Record) -> Limits:
    """Read a partition as `scontrol show partition` prints it; its limits of memory replace the cluster's."""
    most_mb, most_per_cpu_mb = _memory("Max", partition, cluster)
    # Without associations Slurm 24.11 lets each account that it knows into a partition
    ignored = (
        ""
        if "associations" in cluster.get("AccountingStorageEnforce", "associations")
        else "account"
    )
    lists = {name: partition.get(name, "") for name, option in OPTIONS.items() if option != ignored}
    by_gpu = "DefMemPerGPU" in partition.get("JobDefaults", "")
    default_mb, default_per_cpu_mb = (None, None) if by_gpu else _memory("Def", partition, cluster)
    return Limits(
        max_nodes=_number(partition, "MaxNodes"),
        max_cpus_per_node=_number(partition, "MaxCPUsPerNode"),
        max_memory_mb=most_mb,
        max_memory_per_cpu_mb=most_per_cpu_mb,
        default_memory_mb=default_mb,
        default_memory_per_cpu_mb=default_per_cpu_mb,
        max_array_size=int(size)
        if (size := cluster.get("MaxArraySize", "")).isdecimal()
        else None,  # 0: no arrays
        is_exclusive=partition.get("OverSubscribe") == "EXCLUSIVE",
        lists={
            name: tuple(text.split(",")) for name, text in lists.items() if text not in ("", "ALL")
        },
    )


def refusal(
    partition: str, limits: Limits, *, account: str | None, qos: str | None
) -> tuple[str, str] | None:
    """Return the option and the reason why a partition does not take this process's user; None if it does."""
    for name, listed in limits.lists.items():
        option = OPTIONS[name]
        given = account if option == "account" else qos
        mine = _groups() if option == "partition" else {given}
        names = {one.lower() for one in mine if one not in (None, "", "(null)")}
        if names and names.isdisjoint(map(str.lower, listed)) == name.startswith("Allow"):
            who = "your groups" if option == "partition" else given
            return option, f"partition {partition} does not take {who}: {name}={','.join(listed)}"
    return None


def _groups() -> set[str | None]:
    """List the groups of the user, as slurmctld looks them up; of an unknown user none."""
    found: set[str | None] = set()
    with contextlib.suppress(KeyError):  # a group without a name
        about = pwd.getpwuid(os.geteuid())
        found |= {grp.getgrgid(gid).gr_name for gid in os.getgrouplist(about.pw_name, about.pw_gid)}
    return found


def _memory(kind: str, partition: Record, cluster: Record) -> tuple[int | None, int | None]:
    """Return the limit, or the default, of a node and of a core in MiB."""
    names = (f"{kind}MemPerNode", f"{kind}MemPerCPU")
    source = partition if any(_number(partition, name) for name in names) else cluster
    return _number(source, names[0]), _number(source, names[1])


def _number(record: Record, name: str) -> int | None:
    text = record.get(name, "")
    return int(text) if text.isdecimal() and int(text) else None
