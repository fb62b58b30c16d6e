"""Secrets of jobs, in files that only the submit user can read.

They lie in the workspace, since every node must read them, below a folder of mode 0700 and one for
each unit, which maintains its own. A job gets only the paths (HF_TOKEN_PATH), so that no secret is
in a script; its ranks get the variables. A job that ends by itself removes the files; after a
signal it may be requeued, so then the trainer removes the token, and a later submission the
variables, once Slurm no longer lists the job as pending or running.
"""

import collections.abc
import contextlib
import json
import logging
import pathlib
import typing

from ddp.host import files
from ddp.options import fields, models
from ddp.problem import ParameterError
from ddp.slurm import jobs
from ddp.workspace import folders, operations
from ddp.workspace.folders import Workspace

# huggingface_hub reads the file at each request: constants.py HF_TOKEN_PATH, utils/_auth.py
# get_token.
VARIABLE = "HF_TOKEN_PATH"
_MOST_BYTES = 64 * 1024

logger = logging.getLogger(__name__)
T = typing.TypeVar("T")


def path(workspace: Workspace, run: str, suffix: str = operations.HF_SUFFIX) -> str:
    """Return the path of a run's file with the token, or with other secrets."""
    return str(workspace.folder / folders.SECRETS / _owner(workspace) / f"{run}{suffix}")


def read_variables(workspace: Workspace, params: models.Training) -> dict[str, str]:
    """Read the secret variables that a training gets.

    Raises ParameterError, which shows no value.
    """
    if params.env_file is None:
        return params.secrets
    try:
        path = pathlib.Path(params.env_file)
        data = workspace.do(files.read_named, path=path, limit_bytes=_MOST_BYTES, is_private=True)
        return {**fields.parse_variables(data.decode(errors="replace")), **params.secrets}
    except (folders.WorkspaceError, ValueError) as e:
        raise ParameterError("env-file", str(e)) from e


def read_notify(workspace: Workspace, params: models.Training) -> str:
    """Read the URL to post to when a run ends; "" if none is asked for.

    Raises ParameterError, which does not show it.
    """
    given = params.notify or ""
    if not given.startswith("/"):
        return given
    try:
        data = workspace.do(
            files.read_named, path=pathlib.Path(given), limit_bytes=_MOST_BYTES, is_private=True
        )
        return fields.check_url(data.decode(errors="replace").strip())
    except (folders.WorkspaceError, ValueError) as e:
        raise ParameterError("notify", f"{given}: {e}") from e


def wanted(token: str, params: models.Training) -> str:
    """Return the token if a training gets it, "" if `env` names a file of its own."""
    return "" if VARIABLE in params.variables else token


def deliver(workspace: Workspace, run: str, token: str) -> None:
    """Write the token's file for a run before it is submitted. Raises WorkspaceError."""
    if not token:
        return
    workspace.ensure_folders((folders.SECRETS,))
    name = f"{run}{operations.HF_SUFFIX}"
    _call(workspace, operations.keep_secret, name=name, text=f"{token}\n")


def deliver_variables(
    workspace: Workspace, run: str, variables: collections.abc.Mapping[str, str]
) -> None:
    """Write a run's secret variables before it is submitted; remove those of finished runs.

    Raises WorkspaceError.
    """
    if variables:
        _deliver(workspace, f"{run}{operations.ENV_SUFFIX}", json.dumps(dict(variables)))


def deliver_notify(workspace: Workspace, run: str, url: str) -> None:
    """Write the URL that a run notifies before it is submitted. Raises WorkspaceError."""
    if url:
        _deliver(workspace, f"{run}{operations.NOTIFY_SUFFIX}", f"{url}\n")


def _deliver(workspace: Workspace, name: str, text: str) -> None:
    """Write a file of this submission, and remove the files of finished runs."""
    workspace.ensure_folders((folders.SECRETS,))
    with contextlib.suppress(jobs.SlurmError):
        active = [job.name for job in jobs.jobs(user=workspace.user) if job.is_active]
        _call(workspace, operations.drop_variables, active=active)
    _call(workspace, operations.keep_secret, name=name, text=text)


def drop(workspace: Workspace, run: str) -> None:
    """Remove the files of a run unless its job is pending or running.

    If this fails, `sync` removes them later.
    """
    with contextlib.suppress(jobs.SlurmError, folders.WorkspaceError):
        suffixes = (operations.HF_SUFFIX, operations.ENV_SUFFIX, operations.NOTIFY_SUFFIX)
        kept = [pathlib.Path(path(workspace, run, suffix)) for suffix in suffixes]
        if not workspace.do(lambda: any(file.exists() for file in kept)):
            return
        if not any(job.is_active for job in jobs.jobs(user=workspace.user, name=run)):
            _call(workspace, operations.drop_secrets, run=run)


def sync(workspace: Workspace, token: str) -> None:
    """Write the newest token for the jobs that are pending or running, and remove the rest.

    Raises WorkspaceError.
    """
    active: list[str] | None = None  # not known: remove nothing
    if token and jobs.is_installed():
        with contextlib.suppress(jobs.SlurmError):
            active = [job.name for job in jobs.jobs(user=workspace.user) if job.is_active]
    counts = _call(workspace, operations.sync_tokens, token=token, active=active)
    if counts.removed or counts.replaced:
        logger.info(
            "files with the token: %d removed, %d replaced", counts.removed, counts.replaced
        )


def _call(
    workspace: Workspace, operation: collections.abc.Callable[..., T], **arguments: typing.Any
) -> T:
    secrets = str(workspace.folder / folders.SECRETS)
    return workspace.do(operation, secrets=secrets, owner=_owner(workspace), **arguments)


def _owner(workspace: Workspace) -> str:
    return workspace.unit.replace("/", "-") or "ddp"
