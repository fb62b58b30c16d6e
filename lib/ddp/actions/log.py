"""run-log: the output of a run's job."""

import time

from ddp.base import Log, Settings, TrainerError
from ddp.options import models
from ddp.problem import Command
from ddp.run import catalog, control, folder
from ddp.view import tables
from ddp.view.result import Result
from ddp.workspace import folders


def run_log(settings: Settings, params: models.RunLog, log: Log) -> Result:
    """Return the last lines of a job's log; with `follow` report new lines until the job ends or the limit passes."""
    target = catalog.find(settings, params.run)
    if params.follow:
        _follow(settings, target, params.rank, log, timeout_s=params.follow_timeout)
    results = {"job-id": str(target.job_id), "run": target.run}
    known = catalog.job_of(settings, target)
    if known is not None:
        results["state"] = known.state

    def read() -> folder.Lines:
        path = settings.runs / target.run
        return folder.read_log(path, target.log, target.job_id, lines=params.lines, rank=params.rank)

    try:
        found = folders.call(settings, read)
    except folders.MissingError as e:
        state, yet = f"job {target.job_id}", ""
        if known is not None:
            state += f" is {known.state}" + (f" ({known.reason})" if known.state == "PENDING" else "")
            yet = " yet" if known.is_active else ""
        of_rank = "" if params.rank is None else f" of rank {params.rank}"
        show = Command("show", arguments=(target.run,))
        raise TrainerError(f"{state}; it has no output{of_rank}{yet}", remedy=show, results=results) from e
    lines = list(map(control.printable, found.lines))
    results |= {"log": found.path, "lines": str(len(lines)), "text": "\n".join(lines)}
    values: dict[str, object] = {"run": target.run, "job_id": target.job_id, "state": results.get("state")}
    values |= {"log": found.path, "lines": lines}
    return Result(results, values, text="" if params.follow else results["text"])


def _follow(settings: Settings, target: catalog.Target, rank: int | None, log: Log, *, timeout_s: float) -> None:
    began = time.monotonic()
    offsets: dict[str, int] = {}
    is_pending = False
    path = settings.runs / target.run
    while True:
        known = catalog.job_of(settings, target)
        has_ended = known is None or not known.is_active  # its last lines are still to be read
        found = folders.call(
            settings, folder.follow_log, path=path, log=target.log, job_id=target.job_id, rank=rank, offsets=offsets
        )
        offsets = found.offsets
        for line in found.lines:
            log(tables.Line(control.printable(line)))
        was_pending, is_pending = is_pending, known is not None and known.state == "PENDING"
        if known is not None and is_pending and not was_pending:
            log(f"job {known.job_id} PENDING ({known.reason})")
        if has_ended or time.monotonic() - began >= timeout_s:
            return
        control.pause(1.0)
