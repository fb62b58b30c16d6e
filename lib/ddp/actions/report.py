"""report: one HTML page about runs."""

import datetime
import pathlib

from ddp.host import files
from ddp.options import models
from ddp.problem import ParameterError
from ddp.results.progress import Log
from ddp.results.result import Result
from ddp.run import catalog, logs
from ddp.run.model import UTC
from ddp.settings import Settings
from ddp.view import page

_MAX_RUNS = 16  # on one page


def report(settings: Settings, params: models.Report, _: Log) -> Result:
    """Write a page about the named runs, or the newest one, and return its path."""
    workspace = settings.workspace
    given = params.runs.replace(",", " ").split() if params.runs else [None]
    names = list(dict.fromkeys(catalog.name_of(workspace, name)[0] for name in given))
    if len(names) > _MAX_RUNS:
        text = f"{len(names)} runs are given; a page holds at most {_MAX_RUNS}"
        raise ParameterError("runs", text)

    runs, silence = catalog.load(workspace, names)
    tails = workspace.do(lambda: [logs.last_lines(run) for run in runs], timeout_s=60)
    text = page.page(runs, made=datetime.datetime.now(UTC), logs=tails)
    target = workspace.runs / names[0] / "report.html"
    if params.output:
        target = pathlib.Path(params.output)
    workspace.do(files.replace, timeout_s=60, path=target, content=text)

    shown = {"report": str(target), "runs": ", ".join(names)}
    values: dict[str, object] = {"report": str(target), "runs": names}
    if silence:
        shown["slurm"] = silence
        values["slurm"] = silence
    return Result(shown, values)
