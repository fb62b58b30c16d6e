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
    """The most that a job in the partition may ask for; None means no limit."""

    max_nodes: int | None = None
    max_cpus_per_node: int | None = None
    max_memory_mb: int | None = None  # on a node
    max_memory_per_cpu_mb: int | None = None
    default_memory_mb: int | None = None  # on a node, of a job that asks for none
    default_memory_per_cpu_mb: int | None = None
    max_array_size: int | None = None  # the cluster's
    is_exclusive: bool = False  # jobs get whole nodes
    # By a name such as AllowGroups
    lists: collections.abc.Mapping[str, tuple[str, ...]] = dataclasses.field(
        default_factory=dict[str, tuple[str, ...]]
    )


def read(partition: Record, cluster: Record) -> Limits:
    """Read a partition as scontrol prints it; its memory limits replace the cluster's."""
    max_mb, max_per_cpu_mb = _memory("Max", partition, cluster)
    default_mb, default_per_cpu_mb = _memory("Def", partition, cluster)
    if "DefMemPerGPU" in partition.get("JobDefaults", ""):
        default_mb = None
        default_per_cpu_mb = None
    array_size = cluster.get("MaxArraySize", "")  # 0: no arrays
    return Limits(
        max_nodes=_number(partition, "MaxNodes"),
        max_cpus_per_node=_number(partition, "MaxCPUsPerNode"),
        max_memory_mb=max_mb,
        max_memory_per_cpu_mb=max_per_cpu_mb,
        default_memory_mb=default_mb,
        default_memory_per_cpu_mb=default_per_cpu_mb,
        max_array_size=int(array_size) if array_size.isdecimal() else None,
        is_exclusive=partition.get("OverSubscribe") == "EXCLUSIVE",
        lists=_lists(partition, cluster),
    )


def _lists(partition: Record, cluster: Record) -> dict[str, tuple[str, ...]]:
    """Return the groups, accounts and QOS that the partition allows or denies, by rule."""
    # Without associations Slurm 24.11 lets each account that it knows into a partition
    enforced = cluster.get("AccountingStorageEnforce", "associations")
    ignores_accounts = "associations" not in enforced
    found: dict[str, tuple[str, ...]] = {}
    for name, option in OPTIONS.items():
        text = partition.get(name, "")
        is_ignored = option == "account" and ignores_accounts
        if text not in ("", "ALL") and not is_ignored:
            found[name] = tuple(text.split(","))
    return found


def refusal(
    partition: str, limits: Limits, *, account: str | None, qos: str | None
) -> tuple[str, str] | None:
    """Return the option and the reason why a partition rejects this process's user, or None."""
    given = {"account": account, "qos": qos}
    for name, listed in limits.lists.items():
        option = OPTIONS[name]
        mine = _groups() if option == "partition" else {given[option]}
        names = {one.lower() for one in mine if one not in (None, "", "(null)")}
        if not names or any("," in one for one in names):  # Slurm chooses from a list
            continue
        is_listed = not names.isdisjoint(map(str.lower, listed))
        if is_listed != name.startswith("Allow"):
            who = "your groups" if option == "partition" else given[option]
            return option, f"partition {partition} does not take {who}: {name}={','.join(listed)}"
    return None


def _groups() -> set[str | None]:
    """List the groups of the user as slurmctld looks them up; an unknown user has none."""
    found: set[str | None] = set()
    with contextlib.suppress(KeyError):  # a group without a name
        about = pwd.getpwuid(os.geteuid())
        found |= {grp.getgrgid(gid).gr_name for gid in os.getgrouplist(about.pw_name, about.pw_gid)}
    return found


def _memory(kind: str, partition: Record, cluster: Record) -> tuple[int | None, int | None]:
    """Return the limit, or the default, of a node and of a core in MiB."""
    names = (f"{kind}MemPerNode", f"{kind}MemPerCPU")
    has_own = any(_number(partition, name) for name in names)
    source = partition if has_own else cluster
    return _number(source, names[0]), _number(source, names[1])


def _number(record: Record, name: str) -> int | None:
    """Read a limit; 0 means none."""
    text = record.get(name, "")
    if not text.isdecimal():
        return None
    return int(text) or None
