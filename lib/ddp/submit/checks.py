"""Checks of a request before anything is written; each error names the option."""

import collections.abc
import re

from ddp import remedies
from ddp.base import Ahead, ParameterError, Settings, TrainerError
from ddp.problem import Command
from ddp.slurm import access, jobs
from ddp.workspace import folders

LEAST_FREE_BYTES, LEAST_FREE_FILES = (
    64 << 20,
    100,
)  # a run's scripts, logs and figures; checkpoints check for themselves
_listing: Ahead[tuple[jobs.Partition, ...]] | None = None


def list_ahead() -> None:
    """Start to list the cluster's nodes: on a large cluster that takes as long as all else together."""
    global _listing  # noqa: PLW0603 - one command, one process
    _listing = Ahead(jobs.partitions)


def partitions(reservation: str | None = None) -> tuple[jobs.Partition, ...]:
    """List Slurm's partitions with their nodes, as a job in the reservation meets them. Raises TrainerError."""
    try:
        found = _listing() if _listing is not None else jobs.partitions()
        if reservation is None:
            return found
        try:
            return access.inside(found, reservation)
        except jobs.NotAnsweringError:
            raise
        except jobs.SlurmError:  # it does not show reservations; its verdict on the job counts
            return found
    except jobs.SlurmError as e:
        raise TrainerError(f"Slurm: {e}") from e


def _some(names: collections.abc.Sequence[str]) -> str:
    return ", ".join(names[:16]) + (", ..." if len(names) > 16 else "") or "none"


# Ends of a job with which the condition can no longer come true (sbatch(1), --dependency)
_NEVER = {
    "afterok": frozenset({"FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE"}),
    "afternotok": frozenset({"COMPLETED"}),
}


def dependency(text: str | None) -> list[str]:
    """Check that Slurm knows all jobs of a `dependency`. Raises ParameterError."""
    for condition in re.split(r"[,?]", text or ""):
        kind, *words = condition.split(":")
        for word in words:
            number = int(re.split(r"[_+]", word)[0])
            try:
                known = jobs.queued(number)
            except jobs.SlurmError as e:
                raise TrainerError(f"Slurm: {e}") from e
            if known is None:
                why = f"Slurm knows no job {number}; omit it if it ended long ago"
                raise ParameterError("dependency", why, remedy=Command("list"))
            if known.array_id is None and known.state in _NEVER.get(kind, ()):
                why = f"job {number} is {known.state}, so {condition} can never come true; omit it"
                raise ParameterError("dependency", why)
    return [f"dependency: Slurm knows the jobs of {text}"] if text else []


def mail(settings: Settings, types: str | None, address: str | None) -> list[str]:
    """Report who gets mail. Raises ParameterError for an address that nothing would be sent to."""
    if types is None:
        if address is not None:
            raise ParameterError("mail-user", "nothing is sent without the option mail-type, such as END,FAIL")
        return []
    return [f"mail: {types} to {address or settings.user}, by slurmctld"]


def hosts(name: str, text: str, known: collections.abc.Collection[str]) -> tuple[str, ...]:
    """List the nodes that a checked hostlist names. Raises ParameterError for one that Slurm does not know."""
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
    """Raise TrainerError if others could replace what a job runs; nothing is submitted then."""
    if contents.untrusted:
        raise TrainerError(contents.untrusted)


def check_writable(settings: Settings, contents: folders.Contents) -> None:
    """Raise TrainerError if this user cannot write the folder of the runs."""
    if not contents.is_writable:
        remedy = remedies.change_owner(settings.user, str(settings.runs))
        raise TrainerError(f"{settings.user} cannot write {settings.runs}", remedy=remedy)


def workspace(settings: Settings, contents: folders.Contents) -> list[str]:
    """Check that a run can write to the workspace. Raises TrainerError."""
    trusted(contents)
    check_writable(settings, contents)
    if contents.free_bytes < LEAST_FREE_BYTES or contents.free_files < LEAST_FREE_FILES:
        what = f"{contents.free_bytes >> 20} MiB and {contents.free_files} files"
        raise TrainerError(f"{settings.runs} has room for {what} only; remove old runs, or enlarge the filesystem")
    return [f"workspace: {settings.runs} is writable, {contents.free_bytes >> 30} GiB are free"]


def judge(script: str) -> str:
    """Check a script with `sbatch --test-only` and give its verdict. Raises TrainerError if Slurm rejects it."""
    try:
        return jobs.judge(script)
    except jobs.NotAnsweringError as e:
        raise TrainerError(f"Slurm: {e}") from e
    except jobs.SlurmError as e:
        raise refused(str(e)) from e


_CULPRITS = {
    "ccount": "account",
    "artition": "partition",
    "QOS": "qos",
    "qos": "qos",
    "eservation": "reservation",
    "eature": "constraint",
    "ime limit": "time-limit",
    "emory": "memory",
}  # in sbatch's words, and the option that each points to


def refused(stderr: str) -> TrainerError:
    """Turn sbatch's error into ours, with the option's name if Slurm's words identify it."""
    text = f"Slurm rejects the job: {stderr}"
    name = next((name for word, name in _CULPRITS.items() if word in stderr), None)
    return TrainerError(text) if name is None else ParameterError(name, text)


def check_inside(settings: Settings, name: str, path: str, *, kinds: tuple[str, ...]) -> None:
    """Raise ParameterError unless the path, with all links followed, is one of these kinds in the workspace."""
    if not path.startswith(f"{settings.workspace}/"):
        raise ParameterError(name, f"{path} is outside the workspace {settings.workspace}")
    found = folders.locate(settings, path)
    if not found.is_inside:
        raise ParameterError(name, f"{path} leads to {found.real}, outside the workspace {settings.workspace}")
    check_readable(name, path, found, kinds)


def check_readable(name: str, path: str, found: folders.Place, kinds: tuple[str, ...]) -> None:
    """Raise ParameterError unless a path is one of these kinds and this account can read it."""
    if found.kind == "absent":
        raise ParameterError(name, f"{path} does not exist")
    if found.kind not in kinds:
        raise ParameterError(name, f"{path} is not a {' or '.join(kinds)}")
    if not found.is_readable:
        raise ParameterError(name, f"{path} is not readable for this account; its owner can chmod -R a+rX {path}")


def label(path: str) -> str:
    """Derive the first part of a run's name from a script's."""
    stem = path.rsplit("/", 1)[-1].removesuffix(".py")
    return "".join(c if c.isalnum() or c in "._-" else "-" for c in stem).strip("._-")[:40] or "script"
