"""The Hugging Face token: a Juju secret, in a file that only the submit user can read for as long as a job may need it.

The file lies in the workspace, since every node must find it, below a folder of mode 0700 and one for each unit, which
looks after its own. A job is told the path alone (HF_TOKEN_PATH), so that the token is in no script and no environment.
A job that ends by itself removes the file; after a signal it may come back, so then the trainer does, once Slurm no
longer knows the job as waiting or running.
"""

import collections.abc
import contextlib
import logging

from ddp.base import Settings
from ddp.options import fields
from ddp.workspace import folders, operations
from slurm_ddp.slurm import jobs

# huggingface_hub reads the file at each request: constants.py HF_TOKEN_PATH, utils/_auth.py get_token.
VARIABLE = "HF_TOKEN_PATH"
FOLDER = ".secrets"

logger = logging.getLogger(__name__)


def path(settings: Settings, run: str) -> str:
    """Return the file that a run's job, or all jobs of a sweep, find the token in."""
    return str(settings.folder / FOLDER / _owner(settings) / f"{run}.hf-token")


def is_wanted(settings: Settings, params: fields.Training) -> bool:
    """Return whether a training gets the token: one that names a file of its own in `env` does not."""
    return bool(settings.token) and VARIABLE not in {name for name, _ in fields.variables(params.env)}


def deliver(settings: Settings, run: str) -> None:
    """Write the file of a run that is about to be submitted. Raises WorkspaceError."""
    folders.ensure_folders(settings, (FOLDER,))
    _ask(settings, operations.keep_token, run=run, token=settings.token)


def drop(settings: Settings, run: str) -> None:
    """Remove the file of a run unless a job of it is waiting or running; what fails is made good by `sync`."""
    if not settings.token:
        return
    with contextlib.suppress(jobs.SlurmError, folders.WorkspaceError):
        if not any(job.is_active for job in jobs.jobs(user=settings.user, name=run)):
            _ask(settings, operations.drop_token, run=run)


def sync(settings: Settings) -> None:
    """Give the newest token to the jobs that wait or run, and remove the files of those that are gone.

    Without a token all of this unit's files go. Raises WorkspaceError.
    """
    active: list[str] | None = None  # not known: nothing is removed
    if settings.token and jobs.is_installed():
        with contextlib.suppress(jobs.SlurmError):
            active = [job.name for job in jobs.jobs(user=settings.user) if job.is_active]
    told = _ask(settings, operations.sync_tokens, token=settings.token, active=active)
    if told["removed"] or told["replaced"]:
        logger.info("files with the token: %d removed, %d replaced", told["removed"], told["replaced"])


def withdraw(settings: Settings) -> None:
    """Remove all of this unit's files; the unit goes, and nobody would look after them."""
    try:
        _ask(settings, operations.sync_tokens, timeout_s=10, token="", active=None)
    except folders.WorkspaceError as e:
        logger.warning("files with the token may be left in %s: %s", settings.folder / FOLDER, e)


def _ask(
    settings: Settings,
    operation: collections.abc.Callable[..., folders.Json],
    *,
    timeout_s: float = 30,
    **arguments: object,
) -> folders.Json:
    secrets = str(settings.folder / FOLDER)
    return folders.call(settings, operation, timeout_s=timeout_s, secrets=secrets, owner=_owner(settings), **arguments)


def _owner(settings: Settings) -> str:
    return settings.unit.replace("/", "-") or "ddp"
