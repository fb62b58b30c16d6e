"""Checks of a request before anything is written; each error names the option."""

import concurrent.futures
import re

from ddp.base import ParameterError, Settings, TrainerError, ahead
from ddp.problem import Step
from ddp.slurm import access, jobs, policy, submissions
from ddp.workspace import folders, operations

# A run's scripts, logs and figures; checkpoints check for themselves
LEAST_FREE_BYTES, LEAST_FREE_FILES = 64 << 20, 100
_listing: concurrent.futures.Future[tuple[jobs.Partition, ...]] | None = None


def list_ahead() -> None:
    """Start to list the cluster's nodes: on a large cluster that takes as long as all else together."""
    global _listing  # noqa: PLW0603 - one command, one process
    _listing = ahead(jobs.partitions)


def partitions(reservation: str | None = None) -> tuple[jobs.Partition, ...]:
    """List Slurm's partitions with their nodes, as a job in the reservation meets them. Raises TrainerError."""
    with jobs.asking():
        found = access.present(_listing.result() if _listing is not None else jobs.partitions())
        return found if reservation is None else access.inside(found, reservation)


def trusted(contents: folders.Contents) -> None:
    """Raise TrainerError if others could replace what a job runs; nothing is submitted then."""
    if contents.untrusted:
        raise TrainerError(contents.untrusted)


def check_writable(settings: Settings, contents: folders.Contents) -> None:
    """Raise TrainerError if this user cannot write the folder of the runs."""
    if not contents.is_writable:
        hint = f"as root, on the filesystem's server or here: chown {settings.user} {settings.runs}"
        raise TrainerError(f"{settings.user} cannot write {settings.runs}; {hint}")


def workspace(settings: Settings, contents: folders.Contents) -> list[str]:
    """Check that a run can write to the workspace. Raises TrainerError."""
    trusted(contents)
    check_writable(settings, contents)
    if contents.free_bytes < LEAST_FREE_BYTES or contents.free_files < LEAST_FREE_FILES:
        what = f"{contents.free_bytes >> 20} MiB and {contents.free_files} files"
        raise TrainerError(f"{settings.runs} has room for {what} only; remove old runs, or enlarge the filesystem")
    return [f"workspace: {settings.runs} is writable, {contents.free_bytes >> 30} GiB are free"]


def judge(script: str, partition: str) -> str:
    """Check a script with `sbatch --test-only` and give its verdict. Raises TrainerError if Slurm rejects it."""
    try:
        return submissions.judge(script)
    except jobs.NotAnsweringError as e:
        raise TrainerError(f"Slurm: {e}") from e
    except jobs.SlurmError as e:
        raise refused(str(e), next((one for one in partitions() if one.name == partition), None)) from e


_CULPRITS = {
    "Accounts=": "account",
    "Qos=": "qos",
    **submissions.FINAL,
    "nvalid account": "account",
    "artition": "partition",
    "qos": "qos",
    "eservation": "reservation",
    "eature": "constraint",
    "ime limit": "time-limit",
    "emory": "memory",
    "ependency": "dependency",
}  # in sbatch's words, and the option that each points to
# A reason such as QOSMaxGRESPerUser (job_reason_str in slurm_protocol_defs.c): whose limit it is, and of what
_LIMIT = re.compile(r"\b(QOS|Assoc)(?:Max|Min|Grp)\w*?(GRES|Node|Mem|Wall|Cpu|CPU|Job)?\w*")
_LIMITED = {"GRES": "gpus-per-node", "Node": "nodes", "Mem": "memory", "Wall": "time-limit"}
_POLICY = "violates accounting/QOS policy"
_SHOW_QOS, _SHOW_ASSOC = "sacctmgr show qos", "sacctmgr show assoc where user=$USER"


def refused(stderr: str, partition: jobs.Partition | None = None) -> TrainerError:
    """Turn sbatch's error into ours, with the option's name if Slurm's words identify it, and the partition's lists.

    A limit is one of the QOS or of the account; that the account is missing is what Slurm calls an invalid one.
    """
    text = f"Slurm rejects the job: {stderr}"
    if found := _LIMIT.search(stderr):
        is_qos = found[1] == "QOS"
        text += f"; {found[0]} is a limit of the {'QOS' if is_qos else 'account'}, not a missing account"
        remedy = Step("show-limits", f"ask for less, or see it: {_SHOW_QOS if is_qos else _SHOW_ASSOC}")
        name = _LIMITED.get(found[2], "qos" if is_qos else None)
        return ParameterError(name, text, remedy=remedy) if name else TrainerError(text, remedy=remedy)
    if _POLICY in stderr:
        text += "; it exceeds a limit of the QOS, the account or the partition"
        see = f"see them: {_SHOW_QOS}; {_SHOW_ASSOC}; scontrol show partition"
        return TrainerError(text, remedy=Step("show-limits", see))
    name = next((name for word, name in _CULPRITS.items() if word in stderr), None)
    if partition:
        lists = {rule: who for rule, who in partition.limits.lists.items() if policy.OPTIONS[rule] == name}
        text += "".join(f"; partition {partition.name} has {rule}={','.join(who)}" for rule, who in lists.items())
    return TrainerError(text) if name is None else ParameterError(name, text)


def check_inside(settings: Settings, name: str, path: str, *, kinds: tuple[str, ...]) -> None:
    """Raise ParameterError unless the path, with all links followed, is one of these kinds in the workspace."""
    if not path.startswith(f"{settings.workspace}/"):
        raise ParameterError(name, f"{path} is outside the workspace {settings.workspace}")
    found = folders.locate(settings, path)
    if not found.is_inside:
        raise ParameterError(name, f"{path} leads to {found.real}, outside the workspace {settings.workspace}")
    check_readable(name, path, found, kinds)


def check_readable(name: str, path: str, found: operations.Place, kinds: tuple[str, ...]) -> None:
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
