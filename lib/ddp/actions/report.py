"""report: one HTML page about runs."""

import datetime
import pathlib

from ddp.host import files
from ddp.options import models
from ddp.problem import ParameterError
from ddp.results.progress import Log
from ddp.results.result import Result
from ddp.run import catalog, folder
from ddp.run.model import UTC
from ddp.settings import Settings
from ddp.view import page

_MAX_RUNS = 16  # on one page


def report(settings: Settings, params: models.Report, _: Log) -> Result:
    """Write a page about these runs, or the newest, and return its path."""
    workspace = settings.workspace
    given = params.runs.replace(",", " ").split() if params.runs else [None]
    names = list(dict.fromkeys(catalog.name_of(workspace, name)[0] for name in given))
    if len(names) > _MAX_RUNS:
        raise ParameterError(
            "runs", f"{len(names)} runs are given; a page holds at most {_MAX_RUNS}"
        )
    runs, silence = catalog.load(workspace, names)
    target = (
        pathlib.Path(params.output) if params.output else workspace.runs / names[0] / "report.html"
    )
    logs = workspace.do(lambda: [folder.last_lines(run) for run in runs], timeout_s=60)
    text = page.page(runs, made=datetime.datetime.now(UTC), logs=logs)
    workspace.do(files.replace, timeout_s=60, path=target, text=text)
    notes = {"slurm": silence} if silence else {}
    shown = {"report": str(target), "runs": ", ".join(names), **notes}
    return Result(shown, {"report": str(target), "runs": names, **notes})
