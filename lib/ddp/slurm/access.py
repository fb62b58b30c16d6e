"""What Slurm keeps for whom: whether a user has an account, and the nodes of a reservation."""

import collections.abc
import dataclasses

from ddp.slurm import jobs
from slurm_ddp.run import CommandError, run
from slurm_ddp.slurm import commands, show

_SACCTMGR = commands.find("sacctmgr")
_SCONTROL = commands.find("scontrol")
_OPEN = frozenset({"FLEX", "ANY_NODES"})  # its jobs may have other nodes, too (scontrol(1), Flags)
_NO_ASSOCIATION = frozenset({"", "none", "(null)", "0", "nojobs", "nosteps"})
OUTSIDE = "outside the reservation"


@dataclasses.dataclass(frozen=True)
class Accounting:
    """The accounts in slurmdbd, and those of one user."""

    accounts: tuple[str, ...]
    mine: tuple[tuple[str, str], ...]  # account and partition; without a partition: in any
    is_required: bool  # each job needs an account (slurm.conf(5), AccountingStorageEnforce)

    def lacks_account(self, partition: str) -> bool:
        """Return whether Slurm rejects all jobs of the user in a partition."""
        return self.is_required and not any(place in ("", partition) for _, place in self.mine)


def accounting(*, user: str, configuration: collections.abc.Mapping[str, str]) -> Accounting | None:
    """Ask slurmdbd for the accounts of `user`; None without slurmdbd, or without an answer.

    `configuration` is what `jobs.configuration` returns: which cluster of the accounting this is, and what is enforced.
    """
    if not configuration.get("AccountingStorageType", "").endswith("slurmdbd"):
        return None
    cluster = configuration.get("ClusterName", "")
    where = [f"cluster={cluster}"] if cluster else []
    try:
        accounts = _sacctmgr("account", "format=Account")
        mine = _sacctmgr("associations", "where", f"user={user}", *where, "format=Account,Partition")
    except CommandError:
        return None
    words = {word.strip().lower() for word in configuration.get("AccountingStorageEnforce", "").split(",")}
    pairs = (line.partition("|") for line in mine)
    return Accounting(
        accounts=tuple(sorted(set(accounts))),
        mine=tuple((account, partition) for account, _, partition in pairs if account),
        is_required=bool(words - _NO_ASSOCIATION),
    )


def inside(partitions: collections.abc.Iterable[jobs.Partition], reservation: str) -> tuple[jobs.Partition, ...]:
    """Return the partitions as a job in this reservation meets them: with its nodes, kept ones (MAINT) included.

    Nodes outside the reservation are marked as such and as unusable. Raises SlurmError.
    """
    found = tuple(partitions)
    records = show.records(jobs.ask(_SCONTROL, "show", "reservations", "-o"))
    nothing: dict[str, str] = {}
    one = next((record for record in records if record.get("ReservationName") == reservation), nothing)
    nodes, flags = show.value(one, "Nodes"), frozenset((show.value(one, "Flags") or "").split(","))
    if not nodes or flags & _OPEN:
        return found
    names = frozenset(jobs.hostnames(nodes))

    def meet(node: jobs.Capacity) -> jobs.Capacity:
        if node.name not in names:
            return dataclasses.replace(node, state=OUTSIDE, is_usable=False)
        return dataclasses.replace(node, is_usable=node.is_usable or (node.is_kept and "MAINT" in flags))

    return tuple(dataclasses.replace(part, nodes=tuple(map(meet, part.nodes))) for part in found)


def _sacctmgr(*words: str) -> list[str]:
    """Return the lines of `sacctmgr show`; the words were the same from 24.11 to 26.05."""
    answer = run(_SACCTMGR, "-n", "-P", "show", *words, timeout=30, cwd="/")
    return [line.strip() for line in answer.stdout.splitlines() if line.strip()]
