"""The files with a job's secrets: variables of --env-file, a URL, and the Hugging Face token."""

import contextlib
import functools
import json
import os

from ddp.node import exit_codes, slurm_calls, spool, storage
from ddp.node.started_job import StartedJob

_MAX_BYTES = 1 << 20


def read_variables(path: str, shared: storage.Storage) -> dict[str, str]:
    """Read the secret variables of a job; {} if `path` is empty. Raises FatalError."""
    if not path:
        return {}
    try:
        found: dict[str, str] = json.loads(shared.do(lambda: _text(path)))
    except OSError as e:
        hint = "submit the run again with env-file"
        reason = storage.reason(e)
        raise exit_codes.FatalError(f"{path}, the job's secret variables: {reason}; {hint}") from e
    return found


def read_notify(path: str, shared: storage.Storage) -> str:
    """Read the URL to post to when the job ends; "" if there is none, or not any more."""
    if not path:
        return ""
    try:
        return shared.do(lambda: _text(path)).strip()
    except OSError as e:
        why = f"{storage.reason(e)}; submit the run again with notify"
        spool.write(f"[ENV] no notification at the end: {path}: {why}")
        return ""


def check_token(path: str, shared: storage.Storage) -> None:
    """Log that a job has no Hugging Face token, if its file has been removed."""
    if not path or shared.do(lambda: os.access(path, os.R_OK)):
        return
    why = "does not exist, so this job has no Hugging Face token"
    spool.write(f"[ENV] {path} {why}; submit the run with the trainer to get one")


def remove(job: StartedJob) -> None:
    """Remove the secrets of a job that does not come back, after the last run of a sweep."""
    kept = (job.spec.token_path, job.spec.secrets_path, job.spec.notify_path)
    paths = [path for path in kept if path]
    if not paths:
        return
    if job.array and not slurm_calls.is_last_task(*job.array):
        return
    for path in paths:
        with contextlib.suppress(OSError):
            storage.within(functools.partial(os.unlink, path), storage.CALL_S)


def _text(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read(_MAX_BYTES)
