"""add-user, sync-users: let people use an account of Slurm's accounting."""

import collections.abc
import grp
import pwd

from ddp.actions import prerequisites
from ddp.options import models
from ddp.problem import ParameterError, Results, Step
from ddp.results.progress import Log
from ddp.results.tables import Table
from ddp.settings import Settings
from ddp.slurm import accounts

Changes = collections.abc.Sequence[accounts.Change]
_MAKE_ACCOUNT = Step("new-account", "to make it add --new-account")


def add_user(_: Settings, params: models.AddUser, log: Log) -> Results:
    """Let a user use an account; does nothing if they may already. Raises Problem."""
    account = params.account.lower()
    _check_person(params.user)
    accounting = _accounting()
    changes = _additions(accounting, account, [params.user], may_make=params.new_account)

    shown = {"user": params.user, "account": account}
    return shown | _carry_out(accounting, changes, log, is_dry=params.dry_run)


def sync_users(_: Settings, params: models.SyncUsers, log: Log) -> Results:
    """Let each member of a group use an account. Raises Problem."""
    account = (params.account or params.group).lower()
    members = _members(params.group)
    people = [name for name in members if _is_person(name)]
    accounting = _accounting()
    before = accounting.users_of(account)
    left = sorted(before - set(members) - {"root"})

    changes = _additions(accounting, account, people, may_make=params.new_account)
    if params.remove:
        changes += [accounting.remove_user(name, account) for name in left]

    rows = [["USER", "NOW"]]
    for name in members:
        rows.append([name, _state(name, before, people)])
    for name in left:
        rows.append([name, "removed" if params.remove else "not in the group, kept"])
    shown = {"group": params.group, "account": account, "users": Table(rows)}
    return shown | _carry_out(accounting, changes, log, is_dry=params.dry_run)


def _state(name: str, before: frozenset[str], people: list[str]) -> str:
    if name not in people:
        return "unknown on this host, left out"
    return "kept" if name in before else "added"


def _accounting() -> accounts.Accounting:
    if problem := prerequisites.slurm_problem():
        raise problem
    return accounts.read()


def _additions(
    accounting: accounts.Accounting, account: str, people: list[str], *, may_make: bool
) -> list[accounts.Change]:
    """Return the changes that let these people use the account. Raises ParameterError."""
    existing = accounting.accounts()
    if account in existing:
        before = accounting.users_of(account)
        return [accounting.add_user(name, account) for name in people if name not in before]
    if not may_make:
        others = ", ".join(sorted(existing - {"root"}))
        text = f"Slurm has no account {account}"
        text += f"; there is {others}" if others else ""
        raise ParameterError("account", text, remedy=_MAKE_ACCOUNT)
    additions = [accounting.add_user(name, account) for name in people]
    return [accounting.add_account(account), *additions]


def _carry_out(
    accounting: accounts.Accounting, changes: Changes, log: Log, *, is_dry: bool
) -> Results:
    """Make the changes, or show them. Raises Problem."""
    lines = [accounts.typed(change) for change in changes]
    shown: Results = {"changes": str(len(lines))}
    if is_dry:
        shown["would-run"] = "\n".join(lines) or "nothing"
    else:
        for change, line in zip(changes, lines, strict=True):
            accounts.apply(change)
            log(line)

    if not accounting.is_enforced:
        text = "Slurm takes jobs of everybody until AccountingStorageEnforce has associations"
        shown["enforced"] = f"no: {text}"
    return shown


def _members(group: str) -> list[str]:
    """List a group's members by name. Raises ParameterError."""
    try:
        found = grp.getgrnam(group)
    except KeyError:
        raise _unknown("group", "group", group) from None
    members = sorted(set(found.gr_mem) - {"root"})
    if not members:
        text = f"the group {group} lists no members; users whose primary group it is are not listed"
        raise ParameterError("group", text)
    return members


def _check_person(name: str) -> None:
    """Raise ParameterError unless this host knows an account of this name other than root."""
    if name == "root":
        raise ParameterError("user", "jobs never run as root; name an ordinary account")
    if not _is_person(name):
        raise _unknown("user", "passwd", name)


def _is_person(name: str) -> bool:
    try:
        return pwd.getpwnam(name).pw_uid != 0
    except KeyError:
        return False


def _unknown(option: str, database: str, name: str) -> ParameterError:
    """Return the error of a name that the directory of accounts lacks."""
    how = f"add it to the directory (LDAP); is sssd up? see: getent {database} {name}"
    text = f"this host knows no {option} {name}"
    return ParameterError(option, text, remedy=Step("look-up", how))
