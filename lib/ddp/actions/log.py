"""run-log: the output of a run's job."""

import pathlib
import time

from ddp.options import models
from ddp.problem import Command, Problem
from ddp.results import tables
from ddp.results.progress import Log
from ddp.results.result import Result
from ddp.run import catalog, logs, untrusted
from ddp.settings import Settings
from ddp.slurm import jobs, outages
from ddp.workspace import folders


def run_log(settings: Settings, params: models.RunLog, log: Log) -> Result:
    """Return the last lines of a job's log; with `follow` log new lines until the job ends."""
    workspace = settings.workspace
    name, job_id = catalog.find(workspace, params.run)
    path = workspace.runs / name
    if params.follow:
        _follow(settings, path, job_id, params, log)

    known = jobs.look(lambda: catalog.job_of(workspace, name, job_id))
    results = {"job-id": str(job_id), "run": name}
    if isinstance(known, jobs.Silence):
        results["slurm"] = str(known)
    elif known is not None:
        results["state"] = known.state
    values: dict[str, object] = {"run": name, "job_id": job_id, "state": results.get("state")}

    try:
        place, found = workspace.do(
            logs.read_log, path=path, job_id=job_id, lines=params.lines, rank=params.rank
        )
    except folders.MissingError as e:
        if params.follow and _may_go_on(known):  # it waits in the queue: the limit has passed
            values["slurm"] = results.get("slurm")
            return Result(results | {"lines": "0"}, values, text="")
        text = _no_output(job_id, params, known)
        raise Problem(text, remedy=Command("show", arguments=(name,)), results=results) from e

    lines = list(map(untrusted.printable, found))
    results |= {"log": place, "lines": str(len(lines)), "text": "\n".join(lines)}
    values |= {"log": place, "lines": lines, "slurm": results.get("slurm")}
    return Result(results, values, text="" if params.follow else results["text"])


def _no_output(job_id: int, params: models.RunLog, known: jobs.Job | jobs.Silence | None) -> str:
    text = f"job {job_id} has no output"
    if params.rank is not None:
        text += f" of rank {params.rank}"
    if isinstance(known, jobs.Silence):
        return f"{text}; {known}"
    if known is not None:
        return f"{text}; it is {known.state}"
    return text


def _may_go_on(known: jobs.Job | jobs.Silence | None) -> bool:
    """Return whether a job may still write to its log."""
    return isinstance(known, jobs.Silence) or (known is not None and known.is_active)


def _follow(
    settings: Settings, path: pathlib.Path, job_id: int, params: models.RunLog, log: Log
) -> None:
    """Log a job's new lines until it ends, the limit passes or someone ends the wait."""
    workspace = settings.workspace
    settings.wait.begin(path.name, str(job_id))
    began = time.monotonic()
    offsets: dict[str, int] = {}
    was_pending = False
    slurm = outages.PatientClient(log)
    while True:
        known = slurm.ask(lambda: catalog.job_of(workspace, path.name, job_id))
        lines, offsets = workspace.do(  # after the state: a job that has ended wrote its last ones
            logs.follow_log, path=path, job_id=job_id, rank=params.rank, offsets=offsets
        )
        for line in lines:
            log(tables.Line(untrusted.printable(line)))

        if isinstance(known, jobs.Job):
            is_pending = known.state == "PENDING"
            if is_pending and not was_pending:
                log(f"job {known.job_id} PENDING ({known.reason})")
            was_pending = is_pending
        is_over = settings.wait.is_over or time.monotonic() - began >= params.follow_timeout
        if is_over or not _may_go_on(known):
            return
        settings.wait.pause(1.0)
