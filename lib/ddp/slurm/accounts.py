"""Slurm's accounting: its accounts, who may use them, and how sacctmgr changes that."""

import dataclasses
import re

from ddp.problem import ParameterError, Problem, Step
from ddp.slurm import jobs

_WITHOUT = "Slurm keeps no accounts here: it has no slurmdbd"
_ADD_DATABASE = Step("add-slurmdbd", "see: scontrol show config | grep AccountingStorageType")
_START_DATABASE = Step("start-slurmdbd", "is slurmdbd up? see: systemctl status slurmdbd")
_BE_ADMINISTRATOR = Step("be-administrator", "type it as root, or as an administrator of Slurm")
# Printed by sacctmgr if slurmdbd does not answer, and if it refuses (24.11.5)
_SILENT = re.compile(r"talking to the database|PersistInit|persistent connection")
_DENIED = re.compile(r"ermission denied|Only admins|privilege")

Change = tuple[str, ...]  # the words behind `sacctmgr`


@dataclasses.dataclass(frozen=True)
class Accounting:
    """A cluster whose jobs are charged to accounts."""

    cluster: str
    is_enforced: bool  # Slurm refuses a job of a user without an account

    def accounts(self) -> frozenset[str]:
        """List the accounts of this cluster. Raises Problem."""
        return frozenset(_column("Account", "associations", f"cluster={self.cluster}"))

    def accounts_of(self, user: str) -> tuple[str, ...]:
        """List the accounts that a user may use, by name. Raises Problem."""
        where = (f"cluster={self.cluster}", f"user={user}")
        return tuple(sorted(set(_column("Account", "associations", *where))))

    def users_of(self, account: str) -> frozenset[str]:
        """List the people who may use an account. Raises Problem."""
        where = (f"cluster={self.cluster}", f"account={account}")
        return frozenset(_column("User", "associations", *where))

    def qos_of(self, user: str) -> tuple[str, ...]:
        """List the qualities of service that a user may ask for, by name. Raises Problem."""
        where = (f"cluster={self.cluster}", f"user={user}")
        names: set[str] = set()
        for cell in _column("QOS", "associations", *where):
            names |= {name for name in cell.split(",") if name}
        return tuple(sorted(names))

    def add_account(self, account: str) -> Change:
        """Return the change that makes an account."""
        return ("add", "account", account, f"cluster={self.cluster}")

    def add_user(self, user: str, account: str) -> Change:
        """Return the change that lets a user use an account."""
        return ("add", "user", user, f"cluster={self.cluster}", f"account={account}")

    def remove_user(self, user: str, account: str) -> Change:
        """Return the change that takes an account from a user."""
        where = (f"name={user}", f"cluster={self.cluster}", f"account={account}")
        return ("delete", "user", "where", *where)


def read() -> Accounting:
    """Ask Slurm about its accounting. Raises Problem if it runs without slurmdbd."""
    with jobs.asking():
        found = jobs.configuration()
    if "slurmdbd" not in found.get("AccountingStorageType", ""):
        raise Problem(_WITHOUT, remedy=_ADD_DATABASE)
    enforced = found.get("AccountingStorageEnforce", "")
    return Accounting(found.get("ClusterName", ""), "associations" in enforced)


def apply(change: Change) -> None:
    """Change Slurm's accounting. Raises Problem."""
    _ask("--immediate", *change)


def typed(change: Change) -> str:
    """Return the line that does the same in a terminal."""
    return " ".join(("sacctmgr", *change))


def explain_refusal(words: str, user: str, account: str, contact: str) -> Problem | None:
    """Return why a user may not use an account or a QOS, and what to ask for.

    None if Slurm's words have another reason, or slurmdbd does not tell.

    Args:
        words: Slurm's refusal.
        user: the user.
        account: the one that the job names, or "" for the user's default.
        contact: whom to ask, or "" for the operator.
    """
    try:
        accounting = read()
        if "nvalid account" in words:
            return _explain_account(accounting, user, account, contact)
        if "nvalid qos" in words:
            return _explain_qos(accounting, words, user, contact)
    except Problem:  # Slurm's own words remain
        return None
    return None


def _explain_account(
    accounting: Accounting, user: str, account: str, contact: str
) -> Problem | None:
    theirs = accounting.accounts_of(user)
    if not theirs:
        what = f"{user} has no account in Slurm on cluster {accounting.cluster}, so it takes no job"
        return Problem(what, remedy=_ask_for_account(user, account or "ACCOUNT", contact))
    if account and account.lower() not in theirs:
        what = f"{user} may not use {account}; you may use {', '.join(theirs)}"
        return ParameterError("account", what, remedy=_ask_for_account(user, account, contact))
    return None


def _explain_qos(accounting: Accounting, words: str, user: str, contact: str) -> Problem | None:
    theirs = accounting.qos_of(user)
    if not theirs:
        return None
    what = f"Slurm rejects the job: {words}; {user} may use {', '.join(theirs)}"
    ask = f"ask {_whom(contact)} for: sacctmgr modify user {user} set qos+=NAME"
    return ParameterError("qos", what, remedy=Step("ask-for-qos", ask))


def _ask_for_account(user: str, account: str, contact: str) -> Step:
    text = f"ask {_whom(contact)} for: ddp user add {user} --account {account}"
    return Step("ask-for-account", text, {"user": user, "account": account})


def _whom(contact: str) -> str:
    return contact or "the cluster's operator"


def _column(name: str, kind: str, *where: str) -> list[str]:
    """Return a column of sacctmgr's answer, without empty cells. Raises Problem."""
    argv = ("--noheader", "--parsable2", "show", kind, "where", *where, f"format={name}")
    return [line.strip() for line in _ask(*argv).splitlines() if line.strip()]


def _ask(*argv: str) -> str:
    """Run sacctmgr and return its output. Raises Problem."""
    try:
        return jobs.ask("sacctmgr", *argv)
    except jobs.SlurmError as e:
        words = str(e)
    if _SILENT.search(words):
        raise Problem(f"slurmdbd does not answer: {words}", remedy=_START_DATABASE)
    if _DENIED.search(words):
        raise Problem(f"Slurm's accounting: {words}", remedy=_BE_ADMINISTRATOR)
    raise Problem(f"Slurm's accounting: {words}")
