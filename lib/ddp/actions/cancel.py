"""cancel-run: cancel runs, sweeps and the preparation of datasets."""

import collections.abc
import dataclasses
import time

from ddp.options import models
from ddp.problem import ParameterError, Problem
from ddp.results.progress import REPORT_S, Log
from ddp.results.result import Result
from ddp.run import catalog, untrusted
from ddp.run.model import PREPARATION
from ddp.settings import Settings
from ddp.slurm import jobs, outages
from ddp.submit import control, tokens
from ddp.workspace.folders import Workspace

Queue = collections.abc.Sequence[jobs.Job]


@dataclasses.dataclass(frozen=True)
class CancelTarget:
    """The jobs to cancel."""

    run: str
    arguments: tuple[int | str, ...]  # of scancel
    known: collections.abc.Sequence[jobs.Job]  # in the queue, at least one

    def __str__(self) -> str:
        is_one_job = len(self.arguments) == 1 and self.known[0].array_id is None
        return f"job {self.known[0].job_id}" if is_one_job else f"run {self.run}"

    def holds(self, job: jobs.Job) -> bool:
        """Whether a job is one of these."""
        is_whole = (job.array_id or job.job_id) in self.arguments
        return is_whole or f"{job.array_id}_{job.task}" in self.arguments


def cancel_run(settings: Settings, params: models.CancelRun, log: Log) -> Result:
    """Cancel runs by name or job id, and wait until they have left their nodes. Raises Problem."""
    workspace = settings.workspace
    names = dict.fromkeys(params.run.replace(",", " ").split())
    with jobs.asking():
        queue = jobs.jobs(user=workspace.user)
        targets = [_target(workspace, queue, name) for name in names]

    _cancel(targets, log)
    left = _wait(settings, queue, targets, log)
    for name in {job.name for job in _known(targets)}:
        tokens.drop(workspace, name)
    return _result(targets, left)


def _cancel(targets: list[CancelTarget], log: Log) -> None:
    """Send the cancellation. Raises Problem."""
    text = _words(targets)
    try:
        jobs.cancel(*_arguments(targets))
    except jobs.SlurmError as e:
        raise Problem(f"{text} could not be cancelled: {e}", remedy=catalog.LIST) from e
    were = "was" if len(targets) == 1 else "were"
    states = _states(_known(targets))
    log(f"{text} {were} {states}; cancelling, the ranks may save first")


def _wait(
    settings: Settings, queue: Queue, targets: list[CancelTarget], log: Log
) -> list[jobs.Job]:
    """Wait until the jobs have left their nodes, at most LEAVE_S; return Slurm's view of them."""
    ended = {job.job_id for job in queue if not job.is_active}
    left = _known(targets)
    slurm = outages.PatientClient(log)
    began = time.monotonic()
    reported = began
    while any(job.is_active for job in left) and time.monotonic() - began < control.LEAVE_S:
        settings.wait.pause(0.5)
        known = slurm.ask(lambda: jobs.jobs(user=settings.workspace.user))
        if isinstance(known, jobs.Silence):
            began = time.monotonic()  # it is unknown how long the jobs have been leaving
            continue
        cancelled = [job for job in known if job.job_id not in ended]
        left = [job for job in cancelled if any(target.holds(job) for target in targets)]
        now = time.monotonic()
        if now - reported >= REPORT_S:
            reported = now
            log(f"{_words(targets)}: {_states(left) or 'no longer queued'}, {now - began:.0f} s")
    return left


def _result(targets: list[CancelTarget], left: list[jobs.Job]) -> Result:
    state = _states(left) or "CANCELLED"
    arguments = _arguments(targets)
    shown = {
        "job-id": ", ".join(str(one.known[0].job_id) for one in targets),
        "state": state,
        "run": ", ".join(untrusted.printable(one.run) for one in targets),
    }
    if len(arguments) > 1:
        shown["cancelled"] = " ".join(map(str, arguments))

    cancelled: list[dict[str, object]] = []
    for one in targets:
        ids = [str(argument) for argument in one.arguments]
        cancelled.append({"run": one.run, "job_id": one.known[0].job_id, "ids": ids})
    return Result(shown, {"state": state, "cancelled": cancelled})


def _arguments(targets: list[CancelTarget]) -> list[int | str]:
    arguments: dict[int | str, None] = {}
    for target in targets:
        arguments |= dict.fromkeys(target.arguments)
    return list(arguments)


def _known(targets: list[CancelTarget]) -> list[jobs.Job]:
    known: list[jobs.Job] = []
    for target in targets:
        known += target.known
    return known


def _words(targets: list[CancelTarget]) -> str:
    return ", ".join(map(str, targets))


def _states(known: collections.abc.Iterable[jobs.Job]) -> str:
    return ", ".join(sorted({job.state for job in known}))


# -- names of jobs ---------------------------------------------------------------------------------


def _target(workspace: Workspace, queue: Queue, name: str) -> CancelTarget:
    """Find the jobs of a run, a sweep, a preparation or a job's id. Raises ParameterError."""
    if name.isdecimal() and not catalog.read_record(workspace, name):
        return _by_id(workspace, queue, int(name))
    return _by_run(queue, catalog.name_of(workspace, name)[0])


def _by_id(workspace: Workspace, queue: Queue, job_id: int) -> CancelTarget:
    """Find a job, a sweep's run, or a whole sweep or preparation by id. Raises ParameterError."""
    known = jobs.job(job_id, user=workspace.user)
    if known is None:
        text = f"Slurm knows no job {job_id} of {workspace.user}"
        raise ParameterError("run", text, remedy=catalog.LIST)
    if known.name.startswith(PREPARATION):
        return _by_run(queue, known.name)

    is_task = known.task.isdecimal()
    if known.array_id == job_id and _has_others(queue, known):  # scancel would end them, too
        if not known.is_active or not is_task:
            return _by_run(queue, known.name)
        how = f"name {known.run_name} for that run alone, {known.name} for all"
        text = f"{job_id} is the sweep {known.name}, and its run {known.run_name}; {how}"
        raise ParameterError("run", text)
    if not known.is_active:
        raise ParameterError("run", f"job {job_id} has ended already: {known.state}")
    if is_task:
        return CancelTarget(known.run_name, (f"{known.array_id}_{known.task}",), [known])
    return CancelTarget(known.name, (job_id,), [known])


def _has_others(queue: Queue, known: jobs.Job) -> bool:
    """Return whether other jobs of the same array are active."""
    others = [job for job in queue if job.job_id != known.job_id and job.is_active]
    return any(job.array_id == known.array_id for job in others)


def _by_run(queue: Queue, run: str) -> CancelTarget:
    """Find the active jobs of a run, a sweep or a preparation. Raises ParameterError."""
    active = [job for job in queue if job.is_active]
    named = [job for job in active if job.name == run]
    if named:  # an array and the job that depends on it share a name
        arguments = dict.fromkeys(job.array_id or job.job_id for job in named)
        return CancelTarget(run, tuple(arguments), named)

    sweep, _, number = run.rpartition("-")
    of_sweep = [job for job in active if job.array_id is not None and job.name == sweep]
    of_sweep.sort(key=lambda job: not job.task.isdecimal())  # a task's own record comes first
    for job in of_sweep:
        if number.isdecimal() and jobs.holds_task(job.task, int(number)):
            task = dataclasses.replace(job, task=number)  # pending tasks share one record
            return CancelTarget(run, (f"{job.array_id}_{number}",), [task])
    raise ParameterError("run", f"no job of {run} is pending or running", remedy=catalog.LIST)
