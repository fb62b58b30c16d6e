"""run-log: the output of a run's job."""

import pathlib
import time

from ddp.options import models
from ddp.problem import Command, Problem
from ddp.results import tables
from ddp.results.progress import Log
from ddp.results.result import Result
from ddp.run import catalog, folder, reading
from ddp.settings import Settings
from ddp.slurm import jobs, patience
from ddp.submit import control
from ddp.workspace import folders


def run_log(settings: Settings, params: models.RunLog, log: Log) -> Result:
    """Return the last lines of a job's log; with `follow` report new lines until the job ends or the limit passes."""
    workspace = settings.workspace
    name, job_id = catalog.find(workspace, params.run)
    path = workspace.runs / name
    if params.follow:
        _follow(settings, path, job_id, params, log)
    results = {"job-id": str(job_id), "run": name}
    known = jobs.look(lambda: catalog.job_of(workspace, name, job_id))
    if isinstance(known, jobs.Silence):
        results["slurm"] = str(known)
    elif known is not None:
        results["state"] = known.state
    try:
        place, found = workspace.do(
            folder.read_log,
            path=path,
            job_id=job_id,
            lines=params.lines,
            rank=params.rank,
        )
    except folders.MissingError as e:
        if params.follow and _may_go_on(known):  # it waits in the queue: the limit has passed
            values = {
                "run": name,
                "job_id": job_id,
                "state": results.get("state"),
                "slurm": results.get("slurm"),
            }
            return Result(results | {"lines": "0"}, values, text="")
        text = _no_output(job_id, params, known)
        raise Problem(text, remedy=Command("show", arguments=(name,)), results=results) from e
    lines = list(map(reading.printable, found))
    results |= {"log": place, "lines": str(len(lines)), "text": "\n".join(lines)}
    values: dict[str, object] = {"run": name, "job_id": job_id, "state": results.get("state")}
    values |= {"log": place, "lines": lines, "slurm": results.get("slurm")}
    return Result(results, values, text="" if params.follow else results["text"])


def _no_output(job_id: int, params: models.RunLog, known: jobs.Job | jobs.Silence | None) -> str:
    text = f"job {job_id} has no output" + (
        "" if params.rank is None else f" of rank {params.rank}"
    )
    if isinstance(known, jobs.Silence):
        return f"{text}; {known}"
    return text if known is None else f"{text}; it is {known.state}"


def _may_go_on(known: jobs.Job | jobs.Silence | None) -> bool:
    """Return whether a job may still write to its log."""
    return isinstance(known, jobs.Silence) or (known is not None and known.is_active)


def _follow(
    settings: Settings, path: pathlib.Path, job_id: int, params: models.RunLog, log: Log
) -> None:
    settings.wait.begin(path.name, str(job_id))
    began = time.monotonic()
    offsets: dict[str, int] = {}
    is_pending = False
    slurm = patience.Patience(log)
    while True:
        known = slurm.ask(lambda: catalog.job_of(settings.workspace, path.name, job_id))
        lines, offsets = settings.workspace.do(  # the last ones of a job that has ended, too
            folder.follow_log, path=path, job_id=job_id, rank=params.rank, offsets=offsets
        )
        for line in lines:
            log(tables.Line(reading.printable(line)))
        if isinstance(known, jobs.Job):
            was_pending, is_pending = is_pending, known.state == "PENDING"
            if is_pending and not was_pending:
                log(f"job {known.job_id} PENDING ({known.reason})")
        is_over = settings.wait.is_over or time.monotonic() - began >= params.follow_timeout
        if is_over or not _may_go_on(known):
            return
        control.pause(1.0)
