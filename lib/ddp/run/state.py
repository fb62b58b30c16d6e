"""The state of a run: the one place that derives it, from Slurm's answer, the attempts' outcomes and the summary."""

import dataclasses

from ddp.problem import one_line
from ddp.run.model import Run, State
from ddp.slurm import jobs

_OUTCOMES = {"done": State.COMPLETED} | {
    name: State(name.upper()) for name in ("preempted", "failed", "cancelled")
}
# Ends that only Slurm knows; an attempt's outcome cannot contradict them
_OF_SLURM = frozenset(
    map(State, "CANCELLED PREEMPTED TIMEOUT OUT_OF_MEMORY NODE_FAIL DEADLINE BOOT_FAIL".split())
)
_BACK = ("SPECIAL_EXIT", "EXPEDITING")  # as REQUEUED, REQUEUE_HOLD and REQUEUE_FED


def of_job(job: jobs.Job) -> State:
    """Return the state of Slurm's record of a job."""
    if (
        job.state.startswith("REQUEUE")
        or job.state in _BACK
        or (job.state == "PENDING" and job.restarts)
    ):
        return State.REQUEUED
    try:
        return State(job.state)
    except ValueError:
        return State.RUNNING if job.is_active else State.UNKNOWN


def with_job(run: Run, job: jobs.Job | jobs.Silence | None) -> Run:
    """Return the run with its state, and why it is in it.

    `job` is Slurm's record of its job; None: Slurm knows none; a Silence: the run's files are all that is known.
    """
    if isinstance(job, jobs.Silence):
        state, why = _of_files(run) or (State.UNKNOWN, "Slurm does not answer")
        return dataclasses.replace(
            run, job=None, state=state, why=one_line(why, 200), silence=str(job)
        )
    state, why = _derive(run, job)
    return dataclasses.replace(run, job=job, state=state, why=one_line(why, 200), silence="")


def _derive(run: Run, job: jobs.Job | None) -> tuple[State, str]:
    if job is None:
        return _of_files(run) or (State.UNKNOWN, _lost(run))
    reason = job.reason if job.reason not in ("None", "NonZeroExitCode", "") else ""
    if job.is_active:
        return of_job(job), reason if job.state != "RUNNING" else run.beginning
    ended = of_job(job)
    written = _of_last_attempt(run)
    if written is None:
        return ended, reason
    state, why = written
    is_refuted = ended != state and (ended in _OF_SLURM or state == State.COMPLETED)
    if not is_refuted:
        return state, why
    return ended, why if state == State.PREEMPTED else reason


def _of_files(run: Run) -> tuple[State, str] | None:
    """Return the end that the run's own files tell, and why; None if they tell of none."""
    is_by_hand = run.last_attempt is None and run.job_id is None and bool(run.summary)
    if not is_by_hand:
        return _of_last_attempt(run)
    state = _OUTCOMES.get(str(run.summary.get("state")), State.UNKNOWN)
    return state, str(run.summary.get("error") or "")


def _of_last_attempt(run: Run) -> tuple[State, str] | None:
    """Return the outcome that the last attempt left, and why; None if it left none."""
    attempt = run.last_attempt
    state = _OUTCOMES.get(attempt.outcome) if attempt is not None else None
    if attempt is None or state is None:
        return None
    if state == State.PREEMPTED:
        return state, f"saved at step {attempt.step}"
    return state, attempt.why if state == State.FAILED else ""


def _lost(run: Run) -> str:
    attempt = run.last_attempt
    left = f"attempt {attempt.name} left" if attempt is not None else "it wrote"
    return f"{left} no outcome, and Slurm no longer knows its job"
