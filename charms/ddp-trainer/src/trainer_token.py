"""The Hugging Face token: a Juju secret, in a file that only the submit user can read for as long as a job may need it.

The file lies in the workspace, since every node must find it, below a folder of mode 0700 and one for each unit, which
looks after its own. A job is told the path alone (HF_TOKEN_PATH), so that the token is in no script and no environment.
A job that ends by itself removes the file; after a signal it may come back, so then the trainer does, once Slurm no
longer knows the job as waiting or running.
"""

import collections.abc
import contextlib
import logging
import re

import trainer_params
import trainer_workspace
from slurm_ddp.slurm import jobs
from trainer_base import ParameterError, Settings

# huggingface_hub reads the file at each request: constants.py HF_TOKEN_PATH, utils/_auth.py get_token.
VARIABLE = "HF_TOKEN_PATH"
FOLDER = ".secrets"
OPTION = "hf-token"
MAX_CHARACTERS = 4096

logger = logging.getLogger(__name__)


def parse(content: collections.abc.Mapping[str, str] | None, app: str) -> str:
    """Return the token in a secret's content, None if it cannot be read. Raises ParameterError, without the token."""
    if content is None:
        raise ParameterError(OPTION, f"there is no such secret, or it is not granted: juju grant-secret NAME {app}")
    again = "juju update-secret NAME token=hf_..."
    token = content.get("token")
    if token is None:
        raise ParameterError(OPTION, f"the secret has no key token: {again}")
    if not re.fullmatch(r"[!-~]+", token, re.ASCII):
        what = "is empty" if not token else "holds blanks, line breaks or what is not ASCII"
        raise ParameterError(OPTION, f"the secret's token {what}: {again}")
    if len(token) > MAX_CHARACTERS:
        raise ParameterError(
            OPTION, f"the secret's token has {len(token)} characters, at most {MAX_CHARACTERS}: {again}"
        )
    return token


def path(settings: Settings, run: str) -> str:
    """Return the file that a run's job, or all jobs of a sweep, find the token in."""
    return str(settings.workspace / FOLDER / _owner(settings) / f"{run}.hf-token")


def is_wanted(settings: Settings, params: trainer_params.Training) -> bool:
    """Return whether a training gets the token: one that names a file of its own in `env` does not."""
    return bool(settings.token) and VARIABLE not in {name for name, _ in trainer_params.variables(params.env)}


def deliver(settings: Settings, run: str) -> None:
    """Write the file of a run that is about to be submitted. Raises WorkspaceError."""
    trainer_workspace.ensure_folders(settings, (FOLDER,))
    _ask(settings, "keep_token", run=run, token=settings.token)


def drop(settings: Settings, run: str) -> None:
    """Remove the file of a run unless a job of it is waiting or running; what fails is made good by `sync`."""
    if not settings.token:
        return
    with contextlib.suppress(jobs.SlurmError, trainer_workspace.WorkspaceError):
        if not any(job.is_active for job in jobs.jobs(user=settings.user, name=run)):
            _ask(settings, "drop_token", run=run)


def sync(settings: Settings) -> None:
    """Give the newest token to the jobs that wait or run, and remove the files of those that are gone.

    Without a token all of this unit's files go. Raises WorkspaceError.
    """
    active: list[str] | None = None  # not known: nothing is removed
    if settings.token and jobs.is_installed():
        with contextlib.suppress(jobs.SlurmError):
            active = [job.name for job in jobs.jobs(user=settings.user) if job.is_active]
    told = _ask(settings, "sync_tokens", token=settings.token, active=active)
    if told["removed"] or told["replaced"]:
        logger.info("files with the token: %d removed, %d replaced", told["removed"], told["replaced"])


def withdraw(settings: Settings) -> None:
    """Remove all of this unit's files; the unit goes, and nobody would look after them."""
    try:
        _ask(settings, "sync_tokens", timeout_s=10, token="", active=None)
    except trainer_workspace.WorkspaceError as e:
        logger.warning("files with the token may be left in %s: %s", settings.workspace / FOLDER, e)


def _ask(settings: Settings, operation: str, *, timeout_s: float = 30, **arguments: object) -> trainer_workspace.Json:
    secrets = str(settings.workspace / FOLDER)
    return trainer_workspace.ask(
        settings, operation, timeout_s=timeout_s, as_root=False, secrets=secrets, owner=_owner(settings), **arguments
    )


def _owner(settings: Settings) -> str:
    return settings.unit.replace("/", "-")
