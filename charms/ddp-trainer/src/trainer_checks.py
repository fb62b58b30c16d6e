"""What is checked of a request before anything is written, each by the parameter's name."""

import trainer_workspace
from slurm_ddp.slurm import jobs
from trainer_base import ParameterError, Settings, TrainerError

LEAST_FREE_BYTES, LEAST_FREE_FILES = (
    64 << 20,
    100,
)  # a run's scripts, logs and figures; checkpoints check for themselves


def partitions() -> tuple[jobs.Partition, ...]:
    """Return Slurm's partitions with their nodes. Raises TrainerError."""
    try:
        return jobs.partitions()
    except jobs.SlurmError as e:
        raise TrainerError(f"Slurm: {e}") from e


def workspace(settings: Settings, contents: trainer_workspace.Contents) -> list[str]:
    """Return in words what was checked of the workspace. Raises TrainerError where a run could not write there."""
    if not contents.is_writable:
        hint = f"as root: chown {settings.user} {settings.runs}"
        raise TrainerError(f"{settings.user} cannot write {settings.runs}; {hint}")
    if contents.free_bytes < LEAST_FREE_BYTES or contents.free_files < LEAST_FREE_FILES:
        what = f"{contents.free_bytes >> 20} MiB and {contents.free_files} files"
        raise TrainerError(f"{settings.runs} has room for {what} only; remove old runs, or enlarge the filesystem")
    return [f"workspace: {settings.runs} can be written by {settings.user}, {contents.free_bytes >> 30} GiB are free"]


def judge(settings: Settings, script: str) -> str:
    """Return what `sbatch --test-only` says of a script. Raises TrainerError where Slurm refuses it."""
    try:
        return jobs.judge(script, user=settings.user_to_be)
    except jobs.NotAnsweringError as e:
        raise TrainerError(f"Slurm: {e}") from e
    except jobs.SlurmError as e:
        raise refused(str(e)) from e


def refused(said: str) -> TrainerError:
    """Return the error for what sbatch said, with the parameter's name where Slurm's words tell which it is."""
    culprits = {
        "ccount": "account", "artition": "partition", "QOS": "qos", "qos": "qos", "eservation": "reservation",
        "eature": "constraint", "ime limit": "time-limit", "emory": "memory",
    }  # fmt: skip
    for word, name in culprits.items():
        if word in said:
            return ParameterError(name, f"Slurm refuses the job: {said}")
    return TrainerError(f"Slurm refuses the job: {said}")


def check_inside(settings: Settings, name: str, path: str, *, kinds: tuple[str, ...]) -> None:
    """Raise ParameterError unless the path, with all links followed, is one of these kinds in the workspace."""
    if not path.startswith(f"{settings.workspace}/"):
        raise ParameterError(name, f"{path} is outside the workspace {settings.workspace}")
    found = trainer_workspace.locate(settings, path)
    if not found.is_inside:
        raise ParameterError(name, f"{path} leads to {found.real}, outside the workspace {settings.workspace}")
    if found.kind == "absent":
        raise ParameterError(name, f"{path} is not there")
    if found.kind not in kinds:
        raise ParameterError(name, f"{path} is not a {' or '.join(kinds)}")
    if not found.is_readable:
        raise ParameterError(name, f"{path} cannot be read by {settings.user}")


def label(path: str) -> str:
    """Return the first part of a run's name for a script."""
    stem = path.rsplit("/", 1)[-1].removesuffix(".py")
    return "".join(c if c.isalnum() or c in "._-" else "-" for c in stem).strip("._-")[:40] or "script"
