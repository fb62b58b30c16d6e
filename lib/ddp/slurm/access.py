"""Who may run where: accounts and QOS of the accounting, reservations, and what a partition lets in.

Names are those that Slurm prints; the accounting keeps accounts and QOS in small letters (sacctmgr(1)).
"""

import collections.abc
import dataclasses

from ddp.slurm import jobs
from slurm_ddp.run import CommandError, run
from slurm_ddp.slurm import commands, show

_SACCTMGR = commands.find("sacctmgr")
_SCONTROL = commands.find("scontrol")
_OPEN = frozenset({"FLEX", "ANY_NODES"})  # its jobs may have other nodes, too (scontrol(1), Flags)
OUTSIDE = "outside the reservation"


@dataclasses.dataclass(frozen=True)
class Association:
    """An account that a user may charge."""

    account: str
    partition: str  # empty: any
    qos: frozenset[str]


@dataclasses.dataclass(frozen=True)
class Accounting:
    """What slurmdbd knows, as far as it tells the one who asks."""

    accounts: tuple[str, ...]
    qos: tuple[str, ...]
    mine: tuple[Association, ...]  # the user's
    enforces: frozenset[str]  # associations, limits, qos ... (slurm.conf(5), AccountingStorageEnforce)

    def charged(self, partition: str) -> tuple[str, ...]:
        """Return the accounts that the user may charge in a partition."""
        found = {one.account for one in self.mine if one.partition in ("", partition)}
        return tuple(sorted(found))

    def allowed_qos(self, account: str | None) -> tuple[str, ...]:
        """Return the QOS that the user may ask for, with this account or any."""
        found = [one.qos for one in self.mine if account is None or one.account == account.lower()]
        return tuple(sorted(frozenset[str]().union(*found)))


@dataclasses.dataclass(frozen=True)
class Reservation:
    """A reservation: nodes that Slurm keeps for some accounts or jobs."""

    name: str
    is_active: bool
    users: tuple[str, ...]  # who may use it; empty: not restricted by user
    accounts: tuple[str, ...]
    partition: str  # empty: any
    start: str
    nodes: str = ""  # a hostlist; empty: not given by node
    flags: frozenset[str] = frozenset()


def accounting(*, user: str, configuration: collections.abc.Mapping[str, str]) -> Accounting | None:
    """Ask the accounting for the accounts and QOS of `user`; None without accounting, or without an answer.

    `configuration` is what `jobs.configuration` returns: which cluster of the accounting this is, and what is enforced.
    """
    if not configuration.get("AccountingStorageType", "").endswith("slurmdbd"):
        return None
    cluster = configuration.get("ClusterName", "")
    where = [f"cluster={cluster}"] if cluster else []
    try:
        accounts = _sacctmgr("account", "format=Account")
        qos = _sacctmgr("qos", "format=Name")
        mine = _sacctmgr("associations", "where", f"user={user}", *where, "format=Account,Partition,QOS")
    except CommandError:
        return None
    rows = [line.split("|") for line in mine]
    return Accounting(
        accounts=tuple(sorted(set(accounts))),
        qos=tuple(sorted(set(qos))),
        mine=tuple(
            Association(row[0], row[1], frozenset(name.lstrip("+") for name in row[2].split(",") if name))
            for row in rows
            if len(row) >= 3 and row[0]
        ),
        enforces=_enforced(configuration.get("AccountingStorageEnforce", "")),
    )


def reservations() -> tuple[Reservation, ...]:
    """Return the reservations that there are now. Raises SlurmError."""
    text = jobs.ask(_SCONTROL, "show", "reservations", "-o")
    return tuple(
        Reservation(
            name=record["ReservationName"],
            is_active=record.get("State") == "ACTIVE",
            users=_names(record, "Users"),
            accounts=_names(record, "Accounts"),
            partition=show.value(record, "PartitionName") or "",
            start=record.get("StartTime", ""),
            nodes=show.value(record, "Nodes") or "",
            flags=frozenset(_names(record, "Flags")),
        )
        for record in show.records(text)
        if "ReservationName" in record
    )


def inside(partitions: collections.abc.Iterable[jobs.Partition], reservation: str) -> tuple[jobs.Partition, ...]:
    """Return the partitions as a job in this reservation meets them: with its nodes, kept ones (MAINT) included.

    Nodes outside the reservation are marked as such and as unusable. Raises SlurmError.
    """
    found = tuple(partitions)
    one = next((one for one in reservations() if one.name == reservation), None)
    if one is None or not one.nodes or one.flags & _OPEN:
        return found
    names = frozenset(jobs.hostnames(one.nodes))

    def meet(node: jobs.Capacity) -> jobs.Capacity:
        if node.name not in names:
            return dataclasses.replace(node, state=OUTSIDE, is_usable=False)
        return dataclasses.replace(node, is_usable=node.is_usable or (node.is_kept and "MAINT" in one.flags))

    return tuple(dataclasses.replace(part, nodes=tuple(map(meet, part.nodes))) for part in found)


def _sacctmgr(*words: str) -> list[str]:
    """Return the lines of `sacctmgr show`; the words were the same from 24.11 to 26.05."""
    answer = run(_SACCTMGR, "-n", "-P", "show", *words, timeout=30, cwd="/")
    return [line.strip() for line in answer.stdout.splitlines() if line.strip()]


def _enforced(text: str) -> frozenset[str]:
    """Parse AccountingStorageEnforce; `qos`, `limits`, `safe` and `all` each imply `associations`."""
    words = frozenset(word.strip().lower() for word in text.split(",")) - {"", "none", "(null)", "0"}
    if "all" in words:
        words |= {"qos", "limits", "wckeys"}
    return words | {"associations"} if words - {"nojobs", "nosteps"} else words


def _names(record: collections.abc.Mapping[str, str], key: str) -> tuple[str, ...]:
    return tuple(name for name in (show.value(record, key) or "").split(",") if name)
