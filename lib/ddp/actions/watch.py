"""watch: a live view of a run on a terminal; elsewhere an object of JSON for each change."""

import collections.abc
import contextlib
import dataclasses
import json
import re
import sys

import rich.console
import rich.live
import rich.panel
import rich.progress_bar
import rich.table
import rich.text

from ddp.actions import list as listing
from ddp.options import models
from ddp.results.progress import Log
from ddp.run import catalog, curve, folder, metrics, reading, state
from ddp.run.model import Run, State
from ddp.settings import Settings
from ddp.slurm import jobs, patience
from ddp.submit import control
from ddp.view import charts, screen
from ddp.workspace import folders
from ddp.workspace.folders import Workspace
from slurm_ddp.slurm import times

_CURVE_ROWS = 11
_LEAST_WIDTH, _MOST_WIDTH = 40, 160
_MAX_FAILURES = 3
_LOG_LINES = 12
_PREFIX = re.compile(r"^(?:\d+: )?(?:\[\w+\]: ?)?[A-Z]+:ddptrain:")  # of the payload's lines
Read = collections.abc.Callable[[], "Frame"]


class Frame:
    """A run at one moment; `has_answer`: the controller has answered what it knows of its job."""

    def __init__(
        self, run: Run, log: collections.abc.Sequence[str] = (), *, has_answer: bool = True
    ) -> None:
        self.run, self.log, self.has_answer = run, log, has_answer
        rate, total = run.metrics.steps_per_second, run.total_steps
        job = run.job if run.state == State.RUNNING else None
        limit = (
            times.parse_time(job.time_limit)
            if job and job.time_limit not in times.NO_LIMIT
            else None
        )
        self.elapsed_s = times.parse_time(job.elapsed) if job else None
        self.left_s = (
            max(0, total - (run.step or 0)) / rate
            if total and rate and run.state.is_active
            else None
        )
        self.limit_left_s = (
            max(0.0, limit - self.elapsed_s) if limit and self.elapsed_s is not None else None
        )

    @property
    def has_ended(self) -> bool:
        """Whether the run is over: the controller has answered, and neither job nor files say that it goes on."""
        run = self.run
        has_started = run.job is not None or run.job_id is not None or run.last_attempt is not None
        return has_started and self.has_answer and not run.state.is_active

    def record(self) -> dict[str, object]:
        """Return the moment for programs."""
        found = listing.describe(self.run) | {
            "has_ended": self.has_ended,
            "elapsed_s": self.elapsed_s,
        }
        found |= {
            "left_s": self.left_s,
            "limit_left_s": self.limit_left_s,
            "attempts": len(self.run.attempts),
        }
        found |= {"beginning": self.run.beginning or None, "slurm": self.run.silence or None}
        return found | {"failures": [one.reason for one in self.run.failures]}


def watch(settings: Settings, params: models.WatchRun, log: Log) -> None:
    """Show a run's progress until it has ended or the user presses Ctrl-C."""
    name = catalog.find(settings.workspace, params.run)[0]
    console = None if params.is_json else screen.console(sys.stdout)
    is_live = (
        console is not None and console.is_terminal
    )  # then the view itself says that Slurm is silent
    follow(reader(settings.workspace, name, (lambda _: None) if is_live else log), console)


def reader(workspace: Workspace, name: str, log: Log) -> Read:
    """Return a function that reads the run's next frame, of metrics.jsonl only what was appended.

    While Slurm does not answer, the job is as in Slurm's last answer.
    """
    kept = metrics.Reader(workspace.runs / name / folder.METRICS)
    slurm = patience.Patience(log)
    last: jobs.Job | None = None

    def read() -> Frame:
        nonlocal last
        run = catalog.read(workspace, name, is_brief=True, reader=kept)
        queue = slurm.ask(lambda: jobs.jobs(user=workspace.user))
        run = catalog.judge(workspace, [run], queue)[0]
        has_answer = not isinstance(queue, jobs.Silence)
        if not has_answer and last is not None:
            run = dataclasses.replace(state.with_job(run, last), silence=str(queue))
        last = run.job
        lines: list[str] = []
        with contextlib.suppress(folders.WorkspaceError):
            lines = workspace.do(folder.last_lines, run=run, lines=_LOG_LINES)
        printed = [reading.printable(line.rstrip("\r").rsplit("\r", 1)[-1], 500) for line in lines]
        return Frame(run, printed, has_answer=has_answer)

    return read


def follow(read: Read, console: rich.console.Console | None, *, every_s: float = 2.0) -> None:
    """Show the frames of `read` until the run has ended or the user presses Ctrl-C."""
    try:
        if console is not None and console.is_terminal:
            with rich.live.Live(
                console=console, auto_refresh=False, vertical_overflow="crop"
            ) as live:
                for now in _frames(read, every_s):
                    live.update(render(now, console.width, console.height), refresh=True)
            return
        before: tuple[object, ...] = ()
        for now in _frames(read, every_s):
            run = now.run
            counts = (len(run.attempts), len(run.failures))
            seen = (run.state, run.beginning, run.remark, run.step, *counts, bool(run.silence))
            if seen != before:
                print(json.dumps(now.record()), flush=True)
            before = seen
    except KeyboardInterrupt:
        return


def _frames(read: Read, every_s: float) -> collections.abc.Iterator[Frame]:
    while True:
        now = read()
        yield now
        if now.has_ended:
            return
        control.pause(every_s)


def render(now: Frame, width: int, height: int = 40) -> rich.console.RenderableType:
    """Render a frame with this many columns; on a low terminal the log gets fewer lines."""
    run, width = now.run, max(_LEAST_WIDTH, min(_MOST_WIDTH, width))
    numbers = _numbers(now)
    parts: list[rich.console.RenderableType] = [_head(run), _progress(run, width - 4), numbers]
    if run.silence:
        parts.append(_text(f"{reading.printable(run.silence, 200)}; waiting for it", "yellow"))
    losses = run.metrics.points("loss", 600)
    if losses:
        parts.append(_text(curve.draw(losses, columns=width - 4, rows=_CURVE_ROWS), "cyan"))
    failed = [f"{one.attempt} failed: {one.reason}" for one in run.failures[-_MAX_FAILURES:]]
    if run.state.is_active and run.metrics.straggler:
        parts.append(_text(run.metrics.straggler, "yellow"))
    if run.remark:
        parts.append(_text(reading.printable(run.remark, 300), "yellow"))
    if failed:
        parts.append(_text("\n".join(reading.printable(one, 300) for one in failed), "red"))
    notes = len(failed) + bool(run.remark) + bool(run.silence)
    room = height - (5 + numbers.row_count + (_CURVE_ROWS if losses else 0) + notes)
    if now.log and room > 1:
        parts.append(
            _text(
                "\n".join(_PREFIX.sub("", line) for line in now.log[-min(len(now.log), room) :]),
                "dim",
            )
        )
    title = rich.text.Text(f" {reading.printable(run.name, 120)} ", style="bold")
    return rich.panel.Panel(
        rich.console.Group(*parts), title=title, title_align="left", width=width
    )


def _text(text: str, style: str) -> rich.text.Text:
    made = rich.text.Text(text, style=style, overflow="ellipsis")
    made.no_wrap = True
    return made


def _head(run: Run) -> rich.text.Text:
    text = _text(str(run.state), f"bold {screen.COLOURS.get(str(run.state), 'magenta')}")
    nodes = run.job.nodes if run.job is not None else ""
    restarts = f"restarts {len(run.attempts) - 1}" if len(run.attempts) > 1 else ""
    for part in (run.why, f"job {run.job_id}" if run.job_id else "", nodes, restarts):
        text.append(f"  {reading.printable(part, 200)}" if part else "", style="default")
    return text


def _progress(run: Run, width: int) -> rich.table.Table:
    table = rich.table.Table.grid(padding=(0, 1))
    step, total = run.step or 0, run.total_steps
    words = f"step {step}" + (f" of {total} ({min(1.0, step / total):.0%})" if total else "")
    room = max(10, width - len(words) - 2)
    bar = rich.progress_bar.ProgressBar(
        total=total or 1, completed=min(step, total or 0), width=room
    )
    table.add_row(rich.text.Text(words), bar)
    return table


def _numbers(now: Frame) -> rich.table.Table:
    is_late = (
        now.left_s is not None and now.limit_left_s is not None and now.left_s > now.limit_left_s
    )
    cells = [
        (reading.printable(name, 24), _last(series), series.lost is not None)
        for name, series in now.run.metrics.series.items()
    ]
    cells += [("elapsed", _time(now.elapsed_s), False), ("left", _time(now.left_s), is_late)]
    cells.append(("to the time limit", _time(now.limit_left_s), False))
    table = rich.table.Table.grid(padding=(0, 3))
    texts = [
        rich.text.Text.assemble((f"{name} ", "dim"), (value, "bold red" if is_bad else "bold"))
        for name, value, is_bad in cells
    ]
    for begin in range(0, len(texts), 3):
        table.add_row(*texts[begin : begin + 3])
    return table


def _last(series: metrics.Series) -> str:
    if series.lost is not None:
        return f"not finite from step {series.lost:g}"
    return charts.number_text(series.last or 0.0)


def _time(seconds: float | None) -> str:
    return "-" if seconds is None else times.format_time(int(seconds))
