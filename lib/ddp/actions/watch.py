"""watch: a live view of a run on a terminal; elsewhere an object of JSON for each change."""

import collections.abc
import contextlib
import dataclasses
import json
import sys

import rich.console
import rich.live

from ddp.actions import list as listing
from ddp.host import waits
from ddp.options import models
from ddp.results.progress import Log
from ddp.run import catalog, folder, logs, metrics, state, untrusted
from ddp.run.model import Run
from ddp.settings import Settings
from ddp.slurm import jobs, outages
from ddp.view import live, screen
from ddp.workspace import folders
from ddp.workspace.folders import Workspace

_LOG_LINES = 12
_EVERY_S = 2.0
Read = collections.abc.Callable[[], live.Frame]


def watch(settings: Settings, params: models.WatchRun, log: Log) -> None:
    """Show a run's progress until it has ended or the user presses Ctrl-C."""
    name = catalog.find(settings.workspace, params.run)[0]
    console = None if params.is_json else screen.console(sys.stdout)
    if console is not None and console.is_terminal:  # the view itself shows that Slurm is silent
        log = _ignore
    follow(reader(settings.workspace, name, log), console, settings.wait)


def _ignore(_: str) -> None:
    pass


def reader(workspace: Workspace, name: str, log: Log) -> Read:
    """Return a function that reads the run's next frame, and only the new part of metrics.jsonl.

    While Slurm does not answer, the job is as in Slurm's last answer.
    """
    kept = metrics.Reader(workspace.runs / name / folder.METRICS)
    slurm = outages.PatientClient(log)
    last: jobs.Job | None = None

    def read() -> live.Frame:
        nonlocal last
        run = catalog.read(workspace, name, is_brief=True, reader=kept)
        queue = slurm.ask(lambda: jobs.jobs(user=workspace.user))
        run = catalog.judge(workspace, [run], queue)[0]
        has_answer = not isinstance(queue, jobs.Silence)
        if not has_answer and last is not None:
            run = dataclasses.replace(state.with_job(run, last), silence=str(queue))
        last = run.job
        return live.Frame(run, _last_lines(workspace, run), has_answer=has_answer)

    return read


def _last_lines(workspace: Workspace, run: Run) -> list[str]:
    """Read the last lines of a run's log, as a terminal shows them."""
    lines: list[str] = []
    with contextlib.suppress(folders.WorkspaceError):
        lines = workspace.do(logs.last_lines, run=run, lines=_LOG_LINES)
    printed: list[str] = []
    for line in lines:
        text = line.rstrip("\r").rpartition("\r")[2]  # a progress bar overwrites its line
        printed.append(untrusted.printable(text, 500))
    return printed


def follow(read: Read, console: rich.console.Console | None, wait: waits.Wait) -> None:
    """Show the frames of `read` until the run has ended or the user presses Ctrl-C."""
    frames = _frames(read, wait)
    with contextlib.suppress(KeyboardInterrupt):
        if console is not None and console.is_terminal:
            _draw(frames, console)
        else:
            _print_changes(frames)


def _frames(read: Read, wait: waits.Wait) -> collections.abc.Iterator[live.Frame]:
    while True:
        now = read()
        yield now
        if now.has_ended:
            return
        wait.pause(_EVERY_S)


def _draw(frames: collections.abc.Iterator[live.Frame], console: rich.console.Console) -> None:
    with rich.live.Live(console=console, auto_refresh=False, vertical_overflow="crop") as view:
        for now in frames:
            view.update(live.render(now, console.width, console.height), refresh=True)


def _print_changes(frames: collections.abc.Iterator[live.Frame]) -> None:
    """Print an object of JSON for each change."""
    before: tuple[object, ...] = ()
    for now in frames:
        run = now.run
        counts = (len(run.attempts), len(run.failures))
        seen = (
            run.state,
            run.beginning,
            run.remark,
            run.mirror,
            run.step,
            *counts,
            bool(run.silence),
        )
        if seen != before:
            print(json.dumps(record(now)), flush=True)
        before = seen


def record(now: live.Frame) -> dict[str, object]:
    """Return a frame for programs."""
    run = now.run
    record = listing.describe(run)
    record["has_ended"] = now.has_ended
    record["elapsed_s"] = now.elapsed_s
    record["left_s"] = now.left_s
    record["limit_left_s"] = now.limit_left_s
    record["attempts"] = len(run.attempts)
    record["sync_share"] = run.metrics.last("sync_share")
    record["sync_bytes_per_step"] = run.metrics.last("sync_bytes_per_step")
    record["sites"] = run.metrics.site_of_hosts or None
    record["beginning"] = run.beginning or None
    record["mirror"] = run.mirror or None
    record["slurm"] = run.silence or None
    record["failures"] = [one.reason for one in run.failures]
    return record
