"""resume-run: start a requeued job at once."""

import time

from ddp.options import models
from ddp.problem import Command, Problem
from ddp.results.progress import REPORT_S, Log
from ddp.results.result import Result
from ddp.run import catalog
from ddp.settings import Settings
from ddp.slurm import jobs, outages
from ddp.submit import control
from ddp.workspace.folders import Workspace

# slurmd refuses a requeued job whose credential is not a second newer than the end of its last
# attempt ("already killed, do not launch batch job"), and the job then fails.
_APART_S = 2.0
# It still ends on its nodes; Slurm refuses to change an EXPEDITING job
_LEAVING = ("COMPLETING", "EXPEDITING")


def resume_run(settings: Settings, params: models.OneRun, log: Log) -> Result:
    """Make a requeued job that is held, or waits for its begin time, eligible now."""
    workspace = settings.workspace
    name, job_id = catalog.find(workspace, params.run)
    known = _once_it_has_left(settings, name, job_id, log)
    if known is None or not known.is_active:
        raise _has_ended(workspace, name, job_id, known)
    if known.state not in control.WAITING:
        text = f"job {known.job_id} is not waiting: it is {known.state}"
        raise Problem(text, remedy=Command("log", arguments=(name,)))

    if known.restarts:
        settings.wait.pause(_APART_S)
    _release(workspace, known)
    with jobs.asking():
        now_known = catalog.job_of(workspace, name, job_id) or known
    if now_known.state in control.WAITING and now_known.is_held:
        text = f"job {known.job_id} is still held ({now_known.reason}); {_how_to_release(known)}"
        raise Problem(text)

    was = f"job {known.job_id} was {known.state} ({known.reason})"
    log(f"{was}; it starts as soon as there is room")
    state, reason = now_known.state, now_known.reason
    shown = {"job-id": str(known.job_id), "run": name, "state": state, "reason": reason}
    return Result(shown, {"job_id": known.job_id, "run": name, "state": state, "reason": reason})


def _once_it_has_left(settings: Settings, name: str, job_id: int, log: Log) -> jobs.Job | None:
    """Wait until a requeued job has left its nodes; return Slurm's record of it, or None."""
    slurm = outages.PatientClient(log)
    began = time.monotonic()
    while True:
        known = slurm.ask(lambda: catalog.job_of(settings.workspace, name, job_id))
        if isinstance(known, jobs.Silence):
            settings.wait.pause(1.0)
            continue
        is_leaving = known is not None and known.state in _LEAVING and known.restarts > 0
        if known is None or not is_leaving or time.monotonic() - began >= control.LEAVE_S:
            return known
        log(f"job {known.job_id} is leaving its nodes")
        settings.wait.pause(REPORT_S)


def _has_ended(workspace: Workspace, name: str, job_id: int, known: jobs.Job | None) -> Problem:
    """Return the problem of a run that can only be submitted again."""
    state = known.state if known is not None else "unknown to Slurm"
    how = "to resume, submit it with the same options"
    record = catalog.read_record(workspace, name)
    program = (str(record.get("workload")),) if record.get("kind") == "script" else ()
    return Problem(
        f"job {job_id} is not waiting: it is {state}; {how}",
        remedy=Command("submit", {"run": name}, program),
    )


def _release(workspace: Workspace, known: jobs.Job) -> None:
    """Release a job if it is held, and let it start now. Raises Problem."""
    try:
        if known.is_held:
            jobs.release(known.job_id)
        jobs.start_now(known.job_id)
    except jobs.SlurmError as e:
        text = f"job {known.job_id} ({known.reason}) cannot be released: {e}"
        problem = control.held(workspace, known)
        if problem is None:
            raise Problem(f"{text}; {_how_to_release(known)}") from e
        raise Problem(f"{text}; {problem.what}", remedy=problem.remedy) from e


def _how_to_release(known: jobs.Job) -> str:
    return f"as an administrator: scontrol release {known.job_id}"
