"""Commands that are no actions: watch a run, report on runs as a page, render a run as files to submit elsewhere."""

import collections.abc
import contextlib
import dataclasses
import datetime
import json
import pathlib

import rich.console

from ddp import watch
from ddp.base import ParameterError, Results, Settings
from ddp.options import fields
from ddp.report import facts, page
from ddp.runs import control
from ddp.slurm import jobs
from ddp.workspace import files, folders

_READ_S = 60.0
_MAX_RUNS = 16  # on one page


def show_live(settings: Settings, named: fields.OneJob, console: rich.console.Console | None) -> None:
    """Show a run's progress until it has ended or the user presses Ctrl-C. Raises TrainerError.

    Without a console, write each change as a line of JSON on standard output.
    """
    submitted = control.find(settings, named)
    memory = watch.Memory()

    def read() -> watch.Frame:
        try:
            known = jobs.job(submitted.job_id, user=settings.user)
        except jobs.SlurmError:
            known = None  # this view shows only the run's own files
        view = _view(known) if known is not None and control.is_of(known, submitted.run) else None
        folder = pathlib.Path(submitted.run_dir)
        found = folders.call(
            settings, lambda: {"frame": watch.gather(folder, view, control.now(), memory)}, timeout_s=_READ_S
        )
        return found["frame"]

    if console is not None:
        watch.watch(read, console)
        return
    with contextlib.suppress(KeyboardInterrupt):
        watch.changes(read, lambda now: print(json.dumps(_facts(now)), flush=True))


def _facts(now: watch.Frame) -> dict[str, object]:
    """Return a frame for programs; without the curve and the log, which have files and verbs of their own."""
    found = {name: value for name, value in dataclasses.asdict(now).items() if name not in ("losses", "log")}
    found |= {"now": now.now.isoformat(), "failures": [str(failure.reason) for failure in now.failures]}
    return {name.replace("_", "-"): value for name, value in found.items()}


def _view(known: jobs.Job) -> watch.JobView:
    limit = jobs.parse_time(known.time_limit) if known.time_limit not in jobs.NO_LIMIT else None
    elapsed = jobs.parse_time(known.elapsed) if known.state == "RUNNING" else None
    start = None if elapsed is None else control.now() - datetime.timedelta(seconds=elapsed)
    return watch.JobView(known.state, known.reason, start, limit, known.nodes)


def write_report(settings: Settings, runs: collections.abc.Sequence[str], output: pathlib.Path | None) -> Results:
    """Write a page about these runs, or the newest, and return its path. Raises TrainerError."""
    names = list(dict.fromkeys(runs)) or [control.newest(settings)]
    if len(names) > _MAX_RUNS:
        raise ParameterError("runs", f"{len(names)} runs are given; a page holds at most {_MAX_RUNS}")
    for name in names:
        if not (settings.runs / name / "job.json").is_file():
            raise ParameterError("runs", f"there is no run {name!r} in {settings.runs}; see: ddp runs")
    target = output or settings.runs / names[0] / "report.html"

    def write() -> folders.Json:
        files.replace(target, page.page([facts.read_run(settings.runs / name) for name in names], made=control.now()))
        return {}

    folders.call(settings, write, timeout_s=_READ_S * len(names))
    return {"report": str(target), "runs": ", ".join(names)}
