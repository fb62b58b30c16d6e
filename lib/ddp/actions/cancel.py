"""cancel-run: cancel runs, sweeps and the preparation of datasets."""

import collections.abc
import dataclasses
import time

from ddp.base import REPORT_S, Log, ParameterError, Settings, TrainerError
from ddp.options import models
from ddp.problem import Command
from ddp.run import catalog, control
from ddp.run.model import PREPARATION
from ddp.slurm import jobs
from ddp.view.result import Result
from ddp.workspace import tokens


@dataclasses.dataclass(frozen=True)
class CancelTarget:
    """The jobs to cancel."""

    ids: tuple[int | str, ...]  # arguments of scancel
    known: collections.abc.Sequence[jobs.Job]  # those of them in the queue, at least one
    run: str
    text: str  # in a message
    job_id: int
    ended: frozenset[int] = frozenset()  # jobs of the same array or name that ended before

    def holds(self, job: jobs.Job) -> bool:
        """Whether a job is one of these."""
        is_named = f"{job.array_id}_{job.task}" in self.ids or (job.array_id or job.job_id) in self.ids
        return is_named and job.job_id not in self.ended


def cancel_run(settings: Settings, params: models.CancelRun, log: Log) -> Result:
    """Cancel runs by name or job id, and wait until they have left their nodes. Raises TrainerError."""
    named = dict.fromkeys((params.run or "").replace(",", " ").split())
    if not named:
        raise ParameterError("run", "name the run to cancel", remedy=catalog.LIST)
    queue = _queue(settings)
    targets = [_target(settings, queue, name) for name in named]
    text, known = ", ".join(one.text for one in targets), [job for one in targets for job in one.known]
    try:
        jobs.cancel(*dict.fromkeys(one for target in targets for one in target.ids))
    except jobs.SlurmError as e:
        raise TrainerError(f"{text} could not be cancelled: {e}", remedy=catalog.LIST) from e
    log(f"{text} {'was' if len(targets) == 1 else 'were'} {_states(known)}; cancelling, the ranks may save first")
    began = reported = time.monotonic()
    left = known
    while any(job.is_active for job in left) and time.monotonic() - began < control.LEAVE_S:
        control.pause(0.5)
        left = [job for job in _queue(settings) if any(target.holds(job) for target in targets)]
        if time.monotonic() - reported >= REPORT_S:
            reported = time.monotonic()
            log(f"{text}: {_states(left) or 'no longer queued'}, {reported - began:.0f} s")
    for name in {job.name for job in known}:
        tokens.drop(settings, name)
    state, runs = _states(left) or "CANCELLED", ", ".join(control.printable(one.run) for one in targets)
    results = {"job-id": ", ".join(str(one.job_id) for one in targets), "state": state, "run": runs}
    ids = [str(one) for target in targets for one in target.ids]
    values = [{"run": one.run, "job_id": one.job_id, "ids": list(map(str, one.ids))} for one in targets]
    return Result(
        results | ({"cancelled": " ".join(ids)} if len(ids) > 1 else {}), {"state": state, "cancelled": values}
    )


def _target(settings: Settings, queue: tuple[jobs.Job, ...], name: str) -> CancelTarget:
    """Find what a name stands for: a run, a sweep, a preparation, a job's id, an element. Raises ParameterError."""
    array, _, element = name.partition("_")
    if array.isdecimal() and not catalog.read_record(settings, name):
        if not element:
            return _by_id(settings, queue, int(array))
        if element.isdecimal():
            run, job_id = catalog.name_of(settings, name)
            if job_id is not None:
                text = f"{name} is a part of {run}; a dataset's preparation is cancelled as a whole"
                raise ParameterError("run", text, remedy=Command("cancel", arguments=(run,)))
            name = run
    return _by_run(queue, name)


def _by_id(settings: Settings, queue: tuple[jobs.Job, ...], job_id: int) -> CancelTarget:
    """Find what a job's id means: a job, an array's task, a whole sweep or preparation. Raises ParameterError."""
    try:
        known = jobs.job(job_id, user=settings.user)
    except jobs.SlurmError as e:
        raise TrainerError(f"Slurm: {e}") from e
    if known is None:
        raise ParameterError("run", f"Slurm knows no job {job_id} of {settings.user}", remedy=catalog.LIST)
    if known.name.startswith(PREPARATION):
        return _by_run(queue, known.name)
    is_task = known.task.isdecimal()
    array = [job for job in queue if job.array_id == known.array_id]
    tasks = [job for job in array if job.is_active]
    if known.array_id == job_id and any(task.job_id != job_id for task in tasks):  # scancel ends its tasks, too
        if known.is_active and is_task:
            how = f"name {known.run_name} for that run alone, {known.name} for all"
            raise ParameterError("run", f"{job_id} is the sweep {known.name}, and its run {known.run_name}; {how}")
        ended = frozenset(job.job_id for job in array if not job.is_active)
        return CancelTarget((job_id,), tasks, known.name, f"sweep {known.name}", job_id, ended)
    if not known.is_active:
        raise ParameterError("run", f"job {job_id} has ended already: {known.state}")
    argument = f"{known.array_id}_{known.task}" if is_task else job_id
    run = known.run_name if is_task else known.name
    return CancelTarget((argument,), [known], run, f"job {job_id}", job_id)


def _by_run(queue: tuple[jobs.Job, ...], run: str) -> CancelTarget:
    """Find the active jobs of a run, a sweep or a preparation. Raises ParameterError."""
    active = [job for job in queue if job.is_active]
    if named := [job for job in active if job.name == run]:  # an array and the job that depends on it share a name
        ids = tuple(dict.fromkeys(job.array_id or job.job_id for job in named))  # the last submitted first
        text = f"run {run}" if len(ids) > 1 or named[0].array_id else f"job {named[0].job_id}"
        ended = frozenset(job.job_id for job in queue if not job.is_active)
        return CancelTarget(ids, named, run, text, named[0].job_id, ended)
    sweep, _, number = run.rpartition("-")
    tasks = [job for job in active if job.array_id is not None and job.name == sweep] if number.isdecimal() else []
    pending = [job for job in tasks if not job.task.isdecimal() and jobs.holds_task(job.task, int(number))]
    own = [job for job in tasks if job.task == number]
    if found := own or [dataclasses.replace(job, task=number) for job in pending]:  # pending tasks share one record
        return CancelTarget((f"{found[0].array_id}_{number}",), found[:1], run, f"run {run}", found[0].job_id)
    raise ParameterError("run", f"no job of {run} is pending or running", remedy=catalog.LIST)


def _queue(settings: Settings) -> tuple[jobs.Job, ...]:
    try:
        return jobs.jobs(user=settings.user)
    except jobs.SlurmError as e:
        raise TrainerError(f"Slurm: {e}") from e


def _states(known: collections.abc.Iterable[jobs.Job]) -> str:
    return ", ".join(sorted({job.state for job in known}))
