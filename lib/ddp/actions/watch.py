"""watch: a live view of a run on a terminal; elsewhere a line, or an object of JSON, for each change."""

import collections
import collections.abc
import contextlib
import json
import sys
import time

import rich.console
import rich.live
import rich.panel
import rich.progress_bar
import rich.table
import rich.text

from ddp.actions import list as listing
from ddp.base import Log, Settings
from ddp.options import models
from ddp.run import catalog, control, folder, metrics, reading, state
from ddp.run.model import Run
from ddp.slurm import jobs
from ddp.view import charts, curve, screen
from ddp.workspace import folders

_CURVE_ROWS = 8
_LEAST_WIDTH, _MOST_WIDTH = 40, 160
_MAX_FAILURES = 3
_LOG_LINES = 12
Read = collections.abc.Callable[[], "Frame"]


class Frame:
    """A run at one moment, and what the moments before tell of it."""

    def __init__(
        self, run: Run, log: collections.abc.Sequence[str] = (), steps_per_second: float | None = None
    ) -> None:
        self.run, self.log = run, log
        rate = run.metrics.steps_per_second or steps_per_second
        total, limit = run.total_steps, None
        is_running = run.state.is_active and run.job is not None and run.job.state == "RUNNING"
        self.elapsed_s = jobs.parse_time(run.job.elapsed) if is_running and run.job is not None else None
        if is_running and run.job is not None and run.job.time_limit not in jobs.NO_LIMIT:
            limit = jobs.parse_time(run.job.time_limit)
        self.left_s = max(0, total - (run.step or 0)) / rate if total and rate and run.state.is_active else None
        self.limit_left_s = max(0.0, limit - self.elapsed_s) if limit and self.elapsed_s is not None else None

    @property
    def has_ended(self) -> bool:
        """Whether the run is over, as far as Slurm and its files know."""
        return not self.run.state.is_active and (self.run.job is not None or self.run.last_attempt is not None)

    def record(self) -> dict[str, object]:
        """Return the moment for programs."""
        found = listing.describe(self.run) | {"has_ended": self.has_ended, "elapsed_s": self.elapsed_s}
        found |= {"left_s": self.left_s, "limit_left_s": self.limit_left_s, "attempts": len(self.run.attempts)}
        return found | {"failures": [one.reason for one in self.run.failures]}


def watch(settings: Settings, params: models.WatchRun, _: Log) -> None:
    """Show a run's progress until it has ended or the user presses Ctrl-C; without a console as lines of JSON."""
    name = catalog.find(settings, params.run).run
    follow(reader(settings, name), None if params.is_json else screen.console(sys.stdout))


def reader(settings: Settings, name: str) -> Read:
    """Return a function that reads the run's next frame, of metrics.jsonl only what was appended."""
    kept = metrics.Reader(settings.runs / name / folder.METRICS)
    seen: collections.deque[tuple[float, int]] = collections.deque(maxlen=32)  # for scripts that write no times

    def read() -> Frame:
        run = catalog.read(settings, name, is_brief=True, reader=kept)
        with contextlib.suppress(jobs.SlurmError):  # the view shows the run's own files
            run = state.with_job(run, catalog.job_among(run, jobs.jobs(user=settings.user)))
        if not seen or seen[-1][1] != (run.step or 0):
            seen.append((time.monotonic(), run.step or 0))
        passed, steps = seen[-1][0] - seen[0][0], seen[-1][1] - seen[0][1]
        rate = steps / passed if passed > 0 and steps > 0 else None
        return Frame(run, [reading.printable(line, 500) for line in _log(settings, run)], rate)

    return read


def _log(settings: Settings, run: Run) -> list[str]:
    try:
        lines = folders.call(settings, folder.last_lines, run=run, lines=_LOG_LINES)
    except folders.WorkspaceError:
        return []
    return [line.rstrip("\r").rsplit("\r", 1)[-1] for line in lines if line.strip()]


def follow(read: Read, console: rich.console.Console | None, *, every_s: float = 2.0) -> None:
    """Show the frames of `read` until the run has ended or the user presses Ctrl-C."""
    try:
        if console is not None and console.is_terminal:
            with rich.live.Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
                for now in _frames(read, every_s):
                    live.update(render(now, console.width, console.height), refresh=True)
            return
        before = ""
        for now in _frames(read, every_s):
            if (text := line(now)) != before and console is None:
                print(json.dumps(now.record()), flush=True)
            elif text != before and console is not None:
                stamp = control.now().strftime("%H:%M:%S")
                console.print(f"{stamp} {text}", markup=False, highlight=False, soft_wrap=True)
            before = text
    except KeyboardInterrupt:
        return


def _frames(read: Read, every_s: float) -> collections.abc.Iterator[Frame]:
    while True:
        now = read()
        yield now
        if now.has_ended:
            return
        time.sleep(every_s)


def line(now: Frame) -> str:
    """Describe a frame in one line, without what changes by itself, such as the time left."""
    run, rate = now.run, now.run.rate
    parts = [run.name, str(run.state) + (f" ({run.why})" if run.why else "")]
    if run.step:
        parts.append(f"step {run.step}" + (f"/{run.total_steps}" if run.total_steps else ""))
    for name, value in (("loss", run.loss), ("evaluation", run.metrics.last("val_loss"))):
        parts += [f"{name} {value:.4f}"] if value is not None else []
    parts += [f"{charts.number_text(rate[0])} {rate[1]}/s"] if rate else []
    parts += [f"attempt {len(run.attempts)}"] if len(run.attempts) > 1 else []
    parts += [f"{len(run.failures)} failed: {run.failures[-1].reason}"] if run.failures else []
    return reading.printable(", ".join(parts))


def render(now: Frame, width: int, height: int = 40) -> rich.console.RenderableType:
    """Render a frame with this many columns; on a low terminal the log gets fewer lines."""
    run, width = now.run, max(_LEAST_WIDTH, min(_MOST_WIDTH, width))
    parts: list[rich.console.RenderableType] = [_head(run), _progress(run, width - 4), _numbers(now)]
    losses = run.metrics.series["loss"].points(600) if "loss" in run.metrics.series else []
    if losses:
        parts.append(_text(curve.draw(losses, columns=width - 4, rows=_CURVE_ROWS), "cyan"))
    failed = [f"{one.attempt} failed: {one.reason}" for one in run.failures[-_MAX_FAILURES:]]
    if failed:
        parts.append(_text("\n".join(reading.printable(one, 300) for one in failed), "red"))
    room = height - (8 + (_CURVE_ROWS + 2 if losses else 0) + len(failed))
    if now.log and room > 1:
        parts.append(_text("\n".join(now.log[-min(len(now.log), room) :]), "dim"))
    title = rich.text.Text(f" {reading.printable(run.name, 120)} ", style="bold")
    return rich.panel.Panel(rich.console.Group(*parts), title=title, title_align="left", width=width)


def _text(text: str, style: str) -> rich.text.Text:
    made = rich.text.Text(text, style=style, overflow="ellipsis")
    made.no_wrap = True
    return made


def _head(run: Run) -> rich.text.Text:
    text = _text(str(run.state), f"bold {screen.STATES.get(str(run.state), 'magenta')}")
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
    bar = rich.progress_bar.ProgressBar(total=total or 1, completed=min(step, total or 0), width=room)
    table.add_row(rich.text.Text(words), bar)
    return table


def _numbers(now: Frame) -> rich.table.Table:
    run, lost = now.run, now.run.metrics.lost_step
    last = run.metrics.last
    gpu, memory = last("gpu_percent"), last("memory_mib")
    is_late = now.left_s is not None and now.limit_left_s is not None and now.left_s > now.limit_left_s
    cells = [
        ("loss", _fixed(run.loss) if lost is None else f"not finite from step {lost:g}", lost is not None),
        ("evaluation", _fixed(last("val_loss")), False),
        (f"{run.rate[1] if run.rate else 'tokens'}/s", _short(run.rate[0] if run.rate else None), False),
        ("memory", "-" if memory is None else f"{memory / 1024:.1f} GiB", False),
        ("GPU use", "-" if gpu is None else f"{gpu:.0f} %", False),
        ("elapsed", duration(now.elapsed_s), False),
        ("left", duration(now.left_s), is_late),
        ("to the time limit", duration(now.limit_left_s), False),
        ("learning rate", _short(last("lr")), False),
    ]
    table = rich.table.Table.grid(padding=(0, 3))
    texts = [
        rich.text.Text.assemble((f"{name} ", "dim"), (value, "bold red" if is_bad else "bold"))
        for name, value, is_bad in cells
    ]
    for begin in range(0, len(texts), 3):
        table.add_row(*texts[begin : begin + 3])
    return table


def _short(value: float | None) -> str:
    return "-" if value is None else charts.number_text(value)


def _fixed(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}" if abs(value) < 1e6 else f"{value:.4g}"


def duration(seconds: float | None) -> str:
    """Format a time: 45 s, 12 m 30 s, 3 h 05 m, 2 d 4 h; a dash if it is unknown."""
    if seconds is None or not 0 <= seconds < 1e9:
        return "-"
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days} d {hour} h"
    return f"{hour} h {minute:02d} m" if hour else f"{minute} m {second:02d} s" if minute else f"{second} s"
