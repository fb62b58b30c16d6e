"""A small program that runs as a job on one node, whose answer comes back through the workspace.

With srun the answer would need no file, but slurmctld resolves the name of the host on which srun runs when the step
ends: where it cannot, it answers nobody for ten seconds, and the node takes no job for another minute (seen with
24.11.5). A login host's name need not resolve; a batch job needs none.
"""

import contextlib
import time
import uuid

from ddp import remedies
from ddp.base import Settings
from ddp.slurm import jobs
from ddp.workspace import folders, operations

_START_S = 60.0  # for a node to become free
_RUN_S = 90.0  # for the program, and what Slurm does before and after it
_APPEAR_S = 10.0  # for what a node wrote to appear on this host
_AGAIN_S = 0.5


def ask(settings: Settings, name: str, program: str, *, directives: list[str]) -> str:
    """Run a Python program as a job of this name, and return what it printed.

    Raises:
        jobs.SlurmError: the job was refused, found no free node in time, failed, or left no output.
        folders.WorkspaceError: the workspace cannot be read.
    """
    # prune() removes a file of such a name that was left behind
    answer = settings.environments / f".environment-{uuid.uuid4().hex}.tmp"
    lines = [f"--job-name={name}", "--chdir=/", "--no-requeue", f"--output={answer}", *directives]
    head = "".join(f"#SBATCH {line}\n" for line in lines)
    number = jobs.submit_text(f"#!/bin/bash\n{head}exec {folders.PYTHON} -I - <<'PROGRAM'\n{program}\nPROGRAM\n")
    try:
        state = _end(settings, number)
    except BaseException:
        with contextlib.suppress(jobs.SlurmError):  # the job's own limit ends it; what is raised says why
            jobs.cancel(number)
        raise
    try:
        found = [line for line in _take(settings, str(answer)) if line.strip()]
    except folders.MissingError as e:
        found = []  # its node could not write into the workspace
        if state == "COMPLETED":
            why = f"job {number} completed, and its output did not appear in {settings.environments} within"
            raise jobs.SlurmError(f"{why} {_APPEAR_S:.0f} s") from e
    if state != "COMPLETED":
        raise jobs.SlurmError(f"job {number} ended as {state}: {found[-1] if found else 'it printed nothing'}")
    return "\n".join(found)


def _end(settings: Settings, number: int) -> str:
    """Wait for the end of a job, and return its state. Raises SlurmError where it does not start or end in time."""
    began = time.monotonic()
    while True:
        known = jobs.job(number, user=settings.user)
        if known is None:
            raise jobs.SlurmError(f"Slurm knows nothing of job {number}, which it accepted")
        if not known.is_active:
            return known.state
        if known.is_held and known.reason.startswith(remedies.HELD):
            raise jobs.SlurmError(f"{remedies.NO_CREDENTIAL}: job {number} is held ({known.reason})")
        is_waiting = known.state in ("PENDING", "CONFIGURING")
        limit_s = _START_S if is_waiting else _START_S + _RUN_S
        if time.monotonic() - began > limit_s:
            raise jobs.SlurmError(f"job {number} is {known.state} ({known.reason}) after {limit_s:.0f} s")
        time.sleep(_AGAIN_S)


def _take(settings: Settings, path: str) -> list[str]:
    """Return the lines of an answer, and remove it. Raises WorkspaceError."""
    deadline = time.monotonic() + _APPEAR_S
    while True:
        try:
            return folders.call(settings, operations.take_lines, path=path, limit=1 << 16)["lines"]
        except folders.MissingError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_AGAIN_S)
