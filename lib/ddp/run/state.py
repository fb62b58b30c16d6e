"""The state of a run: the one place that derives it, from Slurm's answer, the attempts' outcomes and the summary."""

import dataclasses

from ddp.problem import one_line
from ddp.run.model import Run, State
from ddp.slurm import jobs

_OUTCOMES = {"done": State.COMPLETED} | {name: State(name.upper()) for name in ("preempted", "failed", "cancelled")}
# Ends that only Slurm knows; an attempt's outcome cannot contradict them
_OF_SLURM = frozenset(map(State, "CANCELLED PREEMPTED TIMEOUT OUT_OF_MEMORY NODE_FAIL DEADLINE BOOT_FAIL".split()))
_BACK = ("SPECIAL_EXIT", "EXPEDITING")  # as REQUEUED, REQUEUE_HOLD and REQUEUE_FED


def of_job(job: jobs.Job) -> State:
    """Return the state of Slurm's record of a job."""
    if job.state.startswith("REQUEUE") or job.state in _BACK or (job.state == "PENDING" and job.restarts):
        return State.REQUEUED
    try:
        return State(job.state)
    except ValueError:
        return State.RUNNING if job.is_active else State.UNKNOWN


def with_job(run: Run, job: jobs.Job | None) -> Run:
    """Return the run with its state, and why it is in it; `job` is Slurm's record of its job, if Slurm knows it."""
    state, why = _derive(run, job)
    return dataclasses.replace(run, job=job, state=state, why=one_line(why, 200))


def _derive(run: Run, job: jobs.Job | None) -> tuple[State, str]:
    reason = job.reason if job is not None and job.reason not in ("None", "NonZeroExitCode", "") else ""
    if job is not None and job.is_active:
        return of_job(job), reason if job.state != "RUNNING" else run.beginning
    ended = of_job(job) if job is not None else None
    attempt = run.last_attempt
    written = _OUTCOMES.get(attempt.outcome) if attempt is not None else None
    if attempt is None and run.job_id is None and run.summary and ended is None:  # started by hand
        state = _OUTCOMES.get(str(run.summary.get("state")), State.UNKNOWN)
        return state, str(run.summary.get("error") or "")
    if attempt is None or written is None:
        if ended is not None:
            return ended, reason
        if attempt is not None:
            return State.UNKNOWN, f"attempt {attempt.name} left no outcome, and Slurm no longer knows its job"
        return State.UNKNOWN, "it wrote no outcome, and Slurm no longer knows its job"
    if ended is not None and ended != written and (ended in _OF_SLURM or written == State.COMPLETED):
        return ended, f"saved at step {attempt.step}" if written == State.PREEMPTED else reason
    if written == State.PREEMPTED:
        return written, f"saved at step {attempt.step}"
    return written, attempt.why if written == State.FAILED else ""
