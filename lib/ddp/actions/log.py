"""run-log: the output of a run's job."""

import pathlib
import time

from ddp.base import Log, Settings, TrainerError
from ddp.options import models
from ddp.problem import Command
from ddp.run import catalog, control, folder, reading
from ddp.view import tables
from ddp.view.result import Result
from ddp.workspace import folders


def run_log(settings: Settings, params: models.RunLog, log: Log) -> Result:
    """Return the last lines of a job's log; with `follow` report new lines until the job ends or the limit passes."""
    name, job_id = catalog.find(settings, params.run)
    path = settings.runs / name
    if params.follow:
        _follow(settings, path, job_id, params, log)
    results = {"job-id": str(job_id), "run": name}
    known = catalog.job_of(settings, name, job_id)
    if known is not None:
        results["state"] = known.state
    try:
        place, found = folders.call(
            settings, folder.read_log, path=path, job_id=job_id, lines=params.lines, rank=params.rank
        )
    except folders.MissingError as e:
        if params.follow and known is not None and known.is_active:  # it waits in the queue: the limit has passed
            return Result(results | {"lines": "0"}, {"run": name, "job_id": job_id, "state": known.state}, text="")
        text = f"job {job_id} has no output" + ("" if params.rank is None else f" of rank {params.rank}")
        text += f"; it is {known.state}" if known is not None else ""
        raise TrainerError(text, remedy=Command("show", arguments=(name,)), results=results) from e
    lines = list(map(reading.printable, found))
    results |= {"log": place, "lines": str(len(lines)), "text": "\n".join(lines)}
    values: dict[str, object] = {"run": name, "job_id": job_id, "state": results.get("state")}
    values |= {"log": place, "lines": lines}
    return Result(results, values, text="" if params.follow else results["text"])


def _follow(settings: Settings, path: pathlib.Path, job_id: int, params: models.RunLog, log: Log) -> None:
    settings.wait.begin(path.name, str(job_id))
    began = time.monotonic()
    offsets: dict[str, int] = {}
    is_pending = False
    while True:
        known = catalog.job_of(settings, path.name, job_id)
        has_ended = known is None or not known.is_active  # its last lines are still to be read
        lines, offsets = folders.call(
            settings, folder.follow_log, path=path, job_id=job_id, rank=params.rank, offsets=offsets
        )
        for line in lines:
            log(tables.Line(reading.printable(line)))
        was_pending, is_pending = is_pending, known is not None and known.state == "PENDING"
        if known is not None and is_pending and not was_pending:
            log(f"job {known.job_id} PENDING ({known.reason})")
        is_over = settings.wait.is_over or time.monotonic() - began >= params.follow_timeout
        if has_ended or is_over:
            return
        control.pause(1.0)
