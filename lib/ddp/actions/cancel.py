"""cancel-run: cancel runs, sweeps and the preparation of datasets."""

import collections.abc
import dataclasses
import time

from ddp.options import models
from ddp.problem import ParameterError, Problem
from ddp.results.progress import REPORT_S, Log
from ddp.results.result import Result
from ddp.run import catalog, reading
from ddp.run.model import PREPARATION
from ddp.settings import Settings
from ddp.slurm import jobs, patience
from ddp.submit import control, tokens
from ddp.workspace.folders import Workspace


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
        return (
            f"{job.array_id}_{job.task}" in self.arguments
            or (job.array_id or job.job_id) in self.arguments
        )


def cancel_run(settings: Settings, params: models.CancelRun, log: Log) -> Result:
    """Cancel runs by name or job id, and wait until they have left their nodes. Raises Problem."""
    workspace = settings.workspace
    named = dict.fromkeys(params.run.replace(",", " ").split())
    with jobs.asking():
        queue = jobs.jobs(user=workspace.user)
        targets = [_target(workspace, queue, name) for name in named]
    arguments = list(dict.fromkeys(one for target in targets for one in target.arguments))
    text, left = ", ".join(map(str, targets)), [job for target in targets for job in target.known]
    try:
        jobs.cancel(*arguments)
    except jobs.SlurmError as e:
        raise Problem(f"{text} could not be cancelled: {e}", remedy=catalog.LIST) from e
    log(
        f"{text} {'was' if len(targets) == 1 else 'were'} {_states(left)}; cancelling, the ranks may save first"
    )
    names, ended = {job.name for job in left}, {job.job_id for job in queue if not job.is_active}
    began = reported = time.monotonic()
    slurm = patience.Patience(log)
    while any(job.is_active for job in left) and time.monotonic() - began < control.LEAVE_S:
        control.pause(0.5)
        known = slurm.ask(lambda: jobs.jobs(user=workspace.user))
        if isinstance(known, jobs.Silence):
            began = time.monotonic()  # nobody knows how long the jobs have been leaving
            continue
        queue = [job for job in known if job.job_id not in ended]
        left = [job for job in queue if any(target.holds(job) for target in targets)]
        if time.monotonic() - reported >= REPORT_S:
            reported = time.monotonic()
            log(f"{text}: {_states(left) or 'no longer queued'}, {reported - began:.0f} s")
    for name in names:
        tokens.drop(workspace, name)
    state, runs = (
        _states(left) or "CANCELLED",
        ", ".join(reading.printable(one.run) for one in targets),
    )
    results = {
        "job-id": ", ".join(str(one.known[0].job_id) for one in targets),
        "state": state,
        "run": runs,
    }
    if len(arguments) > 1:
        results["cancelled"] = " ".join(map(str, arguments))
    values = [
        {"run": one.run, "job_id": one.known[0].job_id, "ids": list(map(str, one.arguments))}
        for one in targets
    ]
    return Result(results, {"state": state, "cancelled": values})


def _target(
    workspace: Workspace, queue: collections.abc.Sequence[jobs.Job], name: str
) -> CancelTarget:
    """Find what a name stands for: a run, a sweep, a preparation, a job's id. Raises ParameterError."""
    if name.isdecimal() and not catalog.read_record(workspace, name):
        return _by_id(workspace, queue, int(name))
    return _by_run(queue, catalog.name_of(workspace, name)[0])


def _by_id(
    workspace: Workspace, queue: collections.abc.Sequence[jobs.Job], job_id: int
) -> CancelTarget:
    """Find what a job's id means: a job, a sweep's run, a whole sweep or preparation. Raises ParameterError."""
    known = jobs.job(job_id, user=workspace.user)
    if known is None:
        raise ParameterError(
            "run", f"Slurm knows no job {job_id} of {workspace.user}", remedy=catalog.LIST
        )
    if known.name.startswith(PREPARATION):
        return _by_run(queue, known.name)
    is_task = known.task.isdecimal()
    others = [
        job
        for job in queue
        if job.array_id == known.array_id and job.is_active and job.job_id != job_id
    ]
    if known.array_id == job_id and others:  # scancel ends them, too
        if known.is_active and is_task:
            how = f"name {known.run_name} for that run alone, {known.name} for all"
            raise ParameterError(
                "run", f"{job_id} is the sweep {known.name}, and its run {known.run_name}; {how}"
            )
        return _by_run(queue, known.name)
    if not known.is_active:
        raise ParameterError("run", f"job {job_id} has ended already: {known.state}")
    if is_task:
        return CancelTarget(known.run_name, (f"{known.array_id}_{known.task}",), [known])
    return CancelTarget(known.name, (job_id,), [known])


def _by_run(queue: collections.abc.Sequence[jobs.Job], run: str) -> CancelTarget:
    """Find the active jobs of a run, a sweep or a preparation. Raises ParameterError."""
    active = [job for job in queue if job.is_active]
    if named := [
        job for job in active if job.name == run
    ]:  # an array and the job that depends on it share a name
        return CancelTarget(
            run, tuple(dict.fromkeys(job.array_id or job.job_id for job in named)), named
        )
    sweep, _, number = run.rpartition("-")
    for job in (
        sorted(active, key=lambda job: not job.task.isdecimal()) if number.isdecimal() else ()
    ):
        if (
            job.array_id is not None
            and job.name == sweep
            and jobs.holds_task(job.task, int(number))
        ):
            one = dataclasses.replace(job, task=number)  # pending tasks share one record
            return CancelTarget(run, (f"{job.array_id}_{number}",), [one])
    raise ParameterError("run", f"no job of {run} is pending or running", remedy=catalog.LIST)


def _states(known: collections.abc.Iterable[jobs.Job]) -> str:
    return ", ".join(sorted({job.state for job in known}))
