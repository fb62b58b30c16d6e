"""The state of a run, derived from Slurm's answer, the attempts' outcomes and the summary."""

import dataclasses

from ddp.problem import one_line
from ddp.run.model import Run, State
from ddp.slurm import jobs

_OUTCOMES = {
    "done": State.COMPLETED,
    "preempted": State.PREEMPTED,
    "failed": State.FAILED,
    "cancelled": State.CANCELLED,
}
# Ends that only Slurm knows; an attempt's outcome cannot contradict them
_OF_SLURM = frozenset(
    {
        State.CANCELLED,
        State.PREEMPTED,
        State.TIMEOUT,
        State.OUT_OF_MEMORY,
        State.NODE_FAIL,
        State.DEADLINE,
        State.BOOT_FAIL,
    }
)
_BACK = ("SPECIAL_EXIT", "EXPEDITING")  # as REQUEUED, REQUEUE_HOLD and REQUEUE_FED


def of_job(job: jobs.Job) -> State:
    """Return the state that Slurm's record of a job means."""
    waits_again = job.state == "PENDING" and job.restarts > 0
    if job.state.startswith("REQUEUE") or job.state in _BACK or waits_again:
        return State.REQUEUED
    try:
        return State(job.state)
    except ValueError:
        return State.RUNNING if job.is_active else State.UNKNOWN


def with_job(run: Run, job: jobs.Job | jobs.Silence | None) -> Run:
    """Return the run with its state, and the reason for it.

    `job` is Slurm's record of the run's job, None if Slurm knows none, or a Silence: then the run's
    files are all that is known.
    """
    if isinstance(job, jobs.Silence):
        state, why = _of_files(run) or (State.UNKNOWN, "Slurm does not answer")
        silence = str(job)
        job = None
    elif job is None:
        state, why = _of_files(run) or (State.UNKNOWN, _lost(run))
        silence = ""
    else:
        state, why = _of_job_and_files(run, job)
        silence = ""
    why = one_line(why, 200)
    return dataclasses.replace(run, job=job, state=state, why=why, silence=silence)


def _of_job_and_files(run: Run, job: jobs.Job) -> tuple[State, str]:
    reason = "" if job.reason in ("None", "NonZeroExitCode") else job.reason
    known = of_job(job)
    if job.state == "RUNNING":
        return known, run.beginning
    if job.is_active:
        return known, reason

    written = _of_last_attempt(run)
    if written is None:
        return known, reason
    state, why = written
    is_refuted = known != state and (known in _OF_SLURM or state == State.COMPLETED)
    if not is_refuted:
        return state, why
    return known, why if state == State.PREEMPTED else reason


def _of_files(run: Run) -> tuple[State, str] | None:
    """Return the end that the run's own files tell of, and the reason, or None."""
    was_started_by_hand = run.last_attempt is None and run.job_id is None and bool(run.summary)
    if not was_started_by_hand:
        return _of_last_attempt(run)
    state = _OUTCOMES.get(str(run.summary.get("state")), State.UNKNOWN)
    return state, str(run.summary.get("error") or "")


def _of_last_attempt(run: Run) -> tuple[State, str] | None:
    """Return the outcome that the last attempt left, and the reason; None if it left none."""
    attempt = run.last_attempt
    if attempt is None:
        return None
    state = _OUTCOMES.get(attempt.outcome)
    if state is None:
        return None
    if state == State.PREEMPTED:
        return state, f"saved at step {attempt.step}"
    return state, attempt.why if state == State.FAILED else ""


def _lost(run: Run) -> str:
    attempt = run.last_attempt
    left = f"attempt {attempt.name} left" if attempt is not None else "it wrote"
    return f"{left} no outcome, and Slurm no longer knows its job"
