"""What is checked of a request before anything is written, each by the parameter's name."""

import collections.abc
import re
import typing

from ddp.base import Ahead, ParameterError, Settings, TrainerError
from ddp.slurm import access, jobs
from ddp.workspace import folders

LEAST_FREE_BYTES, LEAST_FREE_FILES = (
    64 << 20,
    100,
)  # a run's scripts, logs and figures; checkpoints check for themselves


_listing: Ahead[tuple[jobs.Partition, ...]] | None = None


def list_ahead() -> None:
    """Begin to list the cluster's nodes: that of a large cluster takes as long as all else together."""
    global _listing  # noqa: PLW0603 - one command, one process
    _listing = Ahead(jobs.partitions)


def partitions(reservation: str | None = None) -> tuple[jobs.Partition, ...]:
    """Return Slurm's partitions with their nodes, as a job in the reservation meets them. Raises TrainerError."""
    try:
        found = _listing() if _listing is not None else jobs.partitions()
        if reservation is None:
            return found
        try:
            return access.inside(found, reservation)
        except jobs.NotAnsweringError:
            raise
        except jobs.SlurmError:  # it does not tell of reservations; its verdict on the job counts
            return found
    except jobs.SlurmError as e:
        raise TrainerError(f"Slurm: {e}") from e


class Place(typing.Protocol):
    """The parameters that say on whose account, and under which rules, a job runs."""

    @property
    def account(self) -> str | None: ...  # noqa: D102
    @property
    def qos(self) -> str | None: ...  # noqa: D102
    @property
    def reservation(self) -> str | None: ...  # noqa: D102


def admission(settings: Settings, place: Place, partition: jobs.Partition) -> list[str]:
    """Return in words what was looked up. Raises ParameterError for an account, QOS or reservation that cannot be had.

    Slurm is asked only for what is named; where it does not tell, its verdict on the job counts.
    """
    passed: list[str] = []
    if place.account is not None or place.qos is not None:
        known = accounting(settings)
        for name, value, look_up in (("account", place.account, _account), ("qos", place.qos, _qos)):
            if value is None:
                continue
            _check_gate(name, value, partition)
            if known is None:
                passed.append(f"{name}: {value} could not be looked up, since no slurmdbd answers; Slurm decides")
            else:
                look_up(settings, place, known, partition)
                passed.append(f"{name}: {value} is there and {settings.user} may use it")
    if place.reservation is not None:
        passed.append(_check_reservation(settings, place.reservation, partition))
    return passed


def accounting(settings: Settings) -> access.Accounting | None:
    """Ask the accounting for the submit user's accounts and QOS; None without accounting, or without an answer."""
    try:
        return access.accounting(user=settings.user, configuration=jobs.configuration())
    except jobs.SlurmError as e:
        raise TrainerError(f"Slurm: {e}") from e


def _account(settings: Settings, place: Place, known: access.Accounting, partition: jobs.Partition) -> None:
    wanted = (place.account or "").lower()
    mine = known.charged(partition.name)
    if wanted in mine:
        return
    if known.accounts and wanted not in known.accounts:
        raise ParameterError("account", f"no account {place.account!r}; there are: {_some(known.accounts)}")
    if "associations" in known.enforces:
        remedy = f"an administrator adds one with: sacctmgr add user {settings.user} account={wanted}"
        text = f"{settings.user} may not charge {wanted} in {partition.name}, but: {_some(mine)}; {remedy}"
        raise ParameterError("account", text)


def _qos(settings: Settings, place: Place, known: access.Accounting, _: jobs.Partition) -> None:
    wanted = (place.qos or "").lower()
    mine = known.allowed_qos(place.account)
    if known.qos and wanted not in known.qos:
        raise ParameterError("qos", f"no QOS {place.qos!r}; there are: {_some(known.qos)}")
    if "qos" in known.enforces and wanted not in mine:
        with_account = f" with account {place.account}" if place.account else ""
        remedy = f"an administrator adds it with: sacctmgr modify user {settings.user} set qos+={wanted}"
        raise ParameterError("qos", f"{settings.user} may not use {wanted}{with_account}, but: {_some(mine)}; {remedy}")


def _check_gate(name: str, value: str, partition: jobs.Partition) -> None:
    """Raise ParameterError where the partition keeps this account or QOS out."""
    key = {"account": "Accounts", "qos": "Qos"}[name]
    for rule, names in partition.access:
        if rule == f"Allow{key}" and value.lower() not in names:
            raise ParameterError(name, f"partition {partition.name} lets in only: {_some(sorted(names))}")
        if rule == f"Deny{key}" and value.lower() in names:
            raise ParameterError(name, f"partition {partition.name} keeps out: {_some(sorted(names))}")


def _check_reservation(settings: Settings, name: str, partition: jobs.Partition) -> str:
    try:
        found = {one.name: one for one in access.reservations()}
    except jobs.NotAnsweringError as e:
        raise TrainerError(f"Slurm: {e}") from e
    except jobs.SlurmError as e:
        return f"reservation: {name} could not be looked up ({e}); Slurm decides"
    if (one := found.get(name)) is None:
        raise ParameterError("reservation", f"no reservation {name!r}; there are: {_some(sorted(found))}")
    if one.partition and one.partition != partition.name:
        text = f"{name} is in partition {one.partition}, not {partition.name}; add partition={one.partition}"
        raise ParameterError("reservation", text)
    barred = f"-{settings.user}" in one.users
    denies = any(user.startswith("-") for user in one.users)  # then all others may (scontrol(1), Users)
    allowed = () if denies else one.users
    if barred or (allowed and not one.accounts and settings.user not in allowed):
        text = f"{name} is not for {settings.user}" + (f", but for: {_some(allowed)}" if allowed else "")
        change = f"users{'-' if barred else '+'}={settings.user}"
        remedy = f"an administrator changes that with: scontrol update reservation={name} {change}"
        raise ParameterError("reservation", f"{text}; {remedy}")
    return f"reservation: {name} is there" + ("" if one.is_active else f" and begins at {one.start}")


def _some(names: collections.abc.Sequence[str]) -> str:
    return ", ".join(names[:16]) + (", ..." if len(names) > 16 else "") or "none"


_NEVER = {
    "afterok": frozenset({"FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE"}),
    "afternotok": frozenset({"COMPLETED"}),
}  # what a job has come to with which the condition can no longer come true (sbatch(1), --dependency)


def dependency(settings: Settings, text: str | None) -> list[str]:
    """Return in words that all jobs of a checked `dependency` are there. Raises ParameterError for one that is not."""
    for condition in re.split(r"[,?]", text or ""):
        kind, *words = condition.split(":")
        for word in words:
            number = int(re.split(r"[_+]", word)[0])
            try:
                known = jobs.queued(number)
            except jobs.SlurmError as e:
                raise TrainerError(f"Slurm: {e}") from e
            if known is None:
                hint = f"see: {settings.typed('list-runs')}; for one that ended long ago omit dependency"
                raise ParameterError("dependency", f"Slurm knows no job {number}; {hint}")
            if known.array_id is None and known.state in _NEVER.get(kind, ()):
                text = f"job {number} is {known.state}, so {condition} can never come true; omit it"
                raise ParameterError("dependency", text)
    return [f"dependency: Slurm knows the jobs of {text}"] if text else []


def mail(settings: Settings, types: str | None, address: str | None) -> list[str]:
    """Return in words who is written to. Raises ParameterError for an address that nothing would be sent to."""
    if types is None:
        if address is not None:
            raise ParameterError("mail-user", "nothing is sent without mail-type; add mail-type=END,FAIL")
        return []
    try:
        program = jobs.configuration().get("MailProg", "")
    except jobs.SlurmError as e:
        raise TrainerError(f"Slurm: {e}") from e
    return [f"mail: {types} to {address or settings.user}; slurmctld sends it with {program or 'its MailProg'}"]


def hosts(name: str, text: str, known: collections.abc.Collection[str]) -> tuple[str, ...]:
    """Return the nodes that a checked hostlist names. Raises ParameterError for one that Slurm does not know."""
    try:
        names = tuple(dict.fromkeys(jobs.hostnames(text)))
    except jobs.NotAnsweringError as e:
        raise TrainerError(f"Slurm: {e}") from e
    except jobs.SlurmError as e:
        raise ParameterError(name, f"{text}: {e}") from e
    if strangers := [node for node in names if node not in known]:
        raise ParameterError(name, f"Slurm knows no node {strangers[0]}; there are: {_some(sorted(known))}")
    return names


def trusted(contents: folders.Contents) -> None:
    """Raise TrainerError where others could replace what a job runs; nothing is submitted then."""
    if contents.untrusted:
        raise TrainerError(contents.untrusted)


def workspace(settings: Settings, contents: folders.Contents) -> list[str]:
    """Return in words what was checked of the workspace. Raises TrainerError where a run could not write there."""
    trusted(contents)
    if not contents.is_writable:
        hint = f"as root: chown {settings.user} {settings.runs}"
        raise TrainerError(f"{settings.user} cannot write {settings.runs}; {hint}")
    if contents.free_bytes < LEAST_FREE_BYTES or contents.free_files < LEAST_FREE_FILES:
        what = f"{contents.free_bytes >> 20} MiB and {contents.free_files} files"
        raise TrainerError(f"{settings.runs} has room for {what} only; remove old runs, or enlarge the filesystem")
    return [f"workspace: {settings.runs} can be written by {settings.user}, {contents.free_bytes >> 30} GiB are free"]


def judge(script: str) -> str:
    """Check a script with `sbatch --test-only`: its output. Raises TrainerError where Slurm refuses it."""
    try:
        return jobs.judge(script)
    except jobs.NotAnsweringError as e:
        raise TrainerError(f"Slurm: {e}") from e
    except jobs.SlurmError as e:
        raise refused(str(e)) from e


def refused(stderr: str) -> TrainerError:
    """Turn sbatch's error into ours, with the parameter's name where Slurm's words identify it."""
    culprits = {
        "ccount": "account", "artition": "partition", "QOS": "qos", "qos": "qos", "eservation": "reservation",
        "eature": "constraint", "ime limit": "time-limit", "emory": "memory",
    }  # fmt: skip
    for word, name in culprits.items():
        if word in stderr:
            return ParameterError(name, f"Slurm refuses the job: {stderr}")
    return TrainerError(f"Slurm refuses the job: {stderr}")


def check_inside(settings: Settings, name: str, path: str, *, kinds: tuple[str, ...]) -> None:
    """Raise ParameterError unless the path, with all links followed, is one of these kinds in the workspace."""
    if not path.startswith(f"{settings.workspace}/"):
        raise ParameterError(name, f"{path} is outside the workspace {settings.workspace}")
    found = folders.locate(settings, path)
    if not found.is_inside:
        raise ParameterError(name, f"{path} leads to {found.real}, outside the workspace {settings.workspace}")
    if found.kind == "absent":
        raise ParameterError(name, f"{path} is not there")
    if found.kind not in kinds:
        raise ParameterError(name, f"{path} is not a {' or '.join(kinds)}")
    if not found.is_readable:
        raise ParameterError(
            name, f"{path} cannot be read by {settings.user}; as root: chown -R {settings.user}: {path}"
        )


def check_script(settings: Settings, path: str) -> None:
    """Raise ParameterError unless a script is a file that this user can read, wherever it lies."""
    found = folders.locate(settings, path)
    if found.kind == "absent":
        raise ParameterError("workload", f"{path} is not there")
    if found.kind != "file":
        raise ParameterError("workload", f"{path} is not a file")
    if not found.is_readable:
        raise ParameterError("workload", f"{path} cannot be read by {settings.user}")


def label(path: str) -> str:
    """Return the first part of a run's name for a script."""
    stem = path.rsplit("/", 1)[-1].removesuffix(".py")
    return "".join(c if c.isalnum() or c in "._-" else "-" for c in stem).strip("._-")[:40] or "script"
