"""Cancel a job, a run, a sweep or a dataset's preparation."""

import collections.abc
import dataclasses
import time
import typing

from ddp.base import REPORT_S, Log, ParameterError, Results, Settings, TrainerError
from ddp.options import fields
from ddp.runs import control
from ddp.slurm import jobs
from ddp.workspace import tokens


@dataclasses.dataclass(frozen=True)
class CancelTarget:
    """The jobs to cancel."""

    ids: tuple[int | str, ...]  # arguments of scancel
    known: collections.abc.Sequence[jobs.Job]  # those of them in the queue, at least one
    run: str
    text: str  # in a message
    ended: frozenset[int] = frozenset()  # jobs of the same array or name that ended before

    def holds(self, job: jobs.Job) -> bool:
        """Whether a job is one of these."""
        is_named = f"{job.array_id}_{job.task}" in self.ids or (job.array_id or job.job_id) in self.ids
        return is_named and job.job_id not in self.ended


def cancel_job(settings: Settings, named: typing.Any, log: Log) -> Results:
    """Cancel jobs of the user and wait until they have left their nodes. Raises TrainerError."""
    job_id, run = named.job_id, named.run
    if (job_id is None) == (run is None):
        raise ParameterError("job-id", "give either job-id or run")
    queue = _queue(settings)
    if named.element is not None:
        run, is_whole = control.run_of_element(settings, job_id, named.element)
        if is_whole:
            how = f"a dataset's preparation is cancelled as a whole: {settings.typed('cancel-job', run=run)}"
            raise ParameterError("element", f"{job_id}_{named.element} is a part of {run}; {how}")
        target = _by_run(settings, queue, run, parameter="element")
    elif run is not None:
        target = _by_run(settings, queue, run)
    else:
        target = _by_id(settings, queue, job_id or 0)
    try:
        jobs.cancel(*target.ids)
    except jobs.SlurmError as e:
        hint = settings.typed("list-jobs")
        raise TrainerError(f"{target.text} could not be cancelled: {e}; see: {hint}") from e
    log(f"{target.text} was {_states(target.known)}; cancelling, its ranks may save first")
    began = reported = time.monotonic()
    left = target.known
    while any(job.is_active for job in left) and time.monotonic() - began < control.LEAVE_S:
        control.pause(0.5)
        left = [job for job in _queue(settings) if target.holds(job)]
        if time.monotonic() - reported >= REPORT_S:
            reported = time.monotonic()
            log(f"{target.text} is {_states(left) or 'no longer queued'}, {reported - began:.0f} s")
    tokens.drop(settings, target.known[0].name)
    shown_id = job_id if job_id is not None and named.element is None else target.known[0].job_id
    results = {"job-id": str(shown_id), "state": _states(left) or "CANCELLED", "run": control.printable(target.run)}
    return results | ({"cancelled": " ".join(map(str, target.ids))} if len(target.ids) > 1 else {})


def _by_id(settings: Settings, queue: tuple[jobs.Job, ...], job_id: int) -> CancelTarget:
    """Find what a job id names: a job, an array's task, a whole sweep or preparation. Raises ParameterError."""
    known = control.job(settings, job_id)
    active = [job for job in queue if job.is_active]
    hint = control.as_element(
        job_id, lambda array, part: any(job.array_id == array and jobs.holds_task(job.task, part) for job in active)
    )
    if known is None:
        text = f"Slurm knows no job {job_id} of {settings.user}; see: {settings.typed('list-jobs')}"
        raise ParameterError("job-id", text + (f"; or do you mean {hint}?" if hint else ""))
    if hint and known.is_active:
        text = f"{job_id} is {known.run_name}, but Juju also passes it for {hint}"
        raise ParameterError("job-id", f"{text}; give run={known.run_name}, or {hint}")
    if known.name.startswith(control.PREPARATION):
        return _by_run(settings, queue, known.name, parameter="job-id")
    is_task = known.task.isdecimal()
    array = [job for job in queue if job.array_id == known.array_id]
    tasks = [job for job in array if job.is_active]
    if known.array_id == job_id and any(task.job_id != job_id for task in tasks):  # scancel ends its tasks, too
        if known.is_active and is_task:
            how = f"run={known.run_name} for that run alone, run={known.name} for all"
            raise ParameterError("job-id", f"{job_id} is the sweep {known.name}, and its run {known.run_name}; {how}")
        ended = frozenset(job.job_id for job in array if not job.is_active)
        return CancelTarget((job_id,), tasks, known.name, f"sweep {known.name}", ended)
    if not known.is_active:
        raise ParameterError("job-id", f"{job_id} has ended already: {known.state}")
    argument = f"{known.array_id}_{known.task}" if is_task else job_id
    return CancelTarget((argument,), [known], known.run_name if is_task else known.name, f"job {job_id}")


def _by_run(settings: Settings, queue: tuple[jobs.Job, ...], run: str, *, parameter: str = "run") -> CancelTarget:
    """Find the active jobs of a run, a sweep or a preparation. Raises ParameterError."""
    active = [job for job in queue if job.is_active]
    if named := [job for job in active if job.name == run]:  # an array and the job that depends on it share a name
        ids = tuple(dict.fromkeys(job.array_id or job.job_id for job in named))  # the last submitted first
        text = f"run {run}" if len(ids) > 1 or named[0].array_id else f"job {named[0].job_id}"
        return CancelTarget(ids, named, run, text, frozenset(job.job_id for job in queue if not job.is_active))
    sweep, _, number = run.rpartition("-")
    tasks = [job for job in active if job.array_id is not None and job.name == sweep] if number.isdecimal() else []
    pending = [job for job in tasks if not job.task.isdecimal() and jobs.holds_task(job.task, int(number))]
    own = [job for job in tasks if job.task == number]
    if found := own or [dataclasses.replace(job, task=number) for job in pending]:  # pending tasks share one record
        return CancelTarget((f"{found[0].array_id}_{number}",), found[:1], run, f"run {run}")
    raise ParameterError(parameter, f"no job of {run} is pending or running; see: {settings.typed('list-jobs')}")


def _queue(settings: Settings) -> tuple[jobs.Job, ...]:
    try:
        return jobs.jobs(user=settings.user)
    except jobs.SlurmError as e:
        raise TrainerError(f"Slurm: {e}") from e


def _states(known: collections.abc.Iterable[jobs.Job]) -> str:
    return ", ".join(sorted({job.state for job in known}))
