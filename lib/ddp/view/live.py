"""The live view of a run: a frame, and how a terminal shows it."""

import collections.abc
import re

import rich.console
import rich.panel
import rich.progress_bar
import rich.table
import rich.text

from ddp.run import curve, metrics, untrusted
from ddp.run.model import Run, State
from ddp.view import charts, screen
from slurm_ddp.slurm import times

_CURVE_ROWS = 11
_LEAST_WIDTH, _MOST_WIDTH = 40, 160
_CURVE_POINTS = 600
_MAX_FAILURES = 3
_COLUMNS = 3  # of numbers
_PREFIX = re.compile(r"^(?:\d+: )?(?:\[\w+\]: ?)?[A-Z]+:ddptrain:")  # of the payload's lines


class Frame:
    """A run at one moment, with the last lines of its log."""

    def __init__(
        self, run: Run, log: collections.abc.Sequence[str] = (), *, has_answer: bool = True
    ) -> None:
        self.run = run
        self.log = log
        self.has_answer = has_answer  # the controller's, about the run's job
        self.elapsed_s: int | None = None
        self.limit_left_s: float | None = None
        if run.job is not None and run.state == State.RUNNING:
            self.elapsed_s = times.parse_time(run.job.elapsed)
            self.limit_left_s = self._limit_left_s(run.job.time_limit)

    def _limit_left_s(self, time_limit: str) -> float | None:
        limit_s = None if time_limit in times.NO_LIMIT else times.parse_time(time_limit)
        if not limit_s or self.elapsed_s is None:
            return None
        return max(0.0, limit_s - self.elapsed_s)

    @property
    def left_s(self) -> float | None:
        """The time that the remaining steps take at the last rate."""
        rate = self.run.metrics.steps_per_second
        total = self.run.total_steps
        if not rate or not total or not self.run.state.is_active:
            return None
        return max(0, total - (self.run.step or 0)) / rate

    @property
    def has_ended(self) -> bool:
        """Whether Slurm has answered, and neither job nor files say that the run goes on."""
        run = self.run
        has_started = run.job is not None or run.job_id is not None or run.last_attempt is not None
        return has_started and self.has_answer and not run.state.is_active


def render(now: Frame, width: int, height: int = 40) -> rich.console.RenderableType:
    """Render a frame with this many columns; on a low terminal the log gets fewer lines."""
    run = now.run
    width = max(_LEAST_WIDTH, min(_MOST_WIDTH, width))
    numbers = _numbers(now)
    parts: list[rich.console.RenderableType] = [_head(run), _progress(run, width - 4), numbers]
    used = 5 + numbers.row_count

    if run.silence:
        silence = untrusted.printable(run.silence, 200)
        parts.append(_text(f"{silence}; waiting for it", "yellow"))
        used += 1
    losses = run.metrics.points("loss", _CURVE_POINTS)
    if losses:
        parts.append(_text(curve.draw(losses, columns=width - 4, rows=_CURVE_ROWS), "cyan"))
        used += _CURVE_ROWS
    notes = _notes(run)
    parts += notes
    used += len(notes)

    room = height - used
    if now.log and room > 1:
        lines = [_PREFIX.sub("", line) for line in now.log[-room:]]
        parts.append(_text("\n".join(lines), "dim"))

    title = rich.text.Text(f" {untrusted.printable(run.name, 120)} ", style="bold")
    content = rich.console.Group(*parts)
    return rich.panel.Panel(content, title=title, title_align="left", width=width)


def _notes(run: Run) -> list[rich.text.Text]:
    """Return a line each for the sites, a straggler, a remark, the mirror and the last failures."""
    notes: list[rich.text.Text] = []
    if run.metrics.sites:
        notes.append(_text(run.metrics.sites_text, "dim"))
    if run.state.is_active and run.metrics.straggler:
        notes.append(_text(run.metrics.straggler, "yellow"))
    if run.remark:
        notes.append(_text(untrusted.printable(run.remark, 300), "yellow"))
    if run.mirror:
        notes.append(_text(f"mirror: {run.mirror}", "dim"))
    for one in run.failures[-_MAX_FAILURES:]:
        line = f"{one.attempt} failed: {one.reason}"
        notes.append(_text(untrusted.printable(line, 300), "red"))
    return notes


def _text(text: str, style: str) -> rich.text.Text:
    made = rich.text.Text(text, style=style, overflow="ellipsis")
    made.no_wrap = True
    return made


def _head(run: Run) -> rich.text.Text:
    parts = [run.why]
    if run.job_id:
        parts.append(f"job {run.job_id}")
    if run.job is not None:
        parts.append(run.job.nodes)
    if len(run.attempts) > 1:
        parts.append(f"restarts {len(run.attempts) - 1}")

    colour = screen.COLOURS.get(str(run.state), "magenta")
    text = _text(str(run.state), f"bold {colour}")
    for part in filter(None, parts):
        text.append(f"  {untrusted.printable(part, 200)}", style="default")
    return text


def _progress(run: Run, width: int) -> rich.table.Table:
    step = run.step or 0
    total = run.total_steps
    words = f"{step} lines" if run.metrics.is_counted else f"step {step}"
    if total:
        part = min(1.0, step / total)
        words += f" of {total} ({part:.0%})"

    room = max(10, width - len(words) - 2)
    bar = rich.progress_bar.ProgressBar(
        total=total or 1, completed=min(step, total or 0), width=room
    )
    table = rich.table.Table.grid(padding=(0, 1))
    table.add_row(rich.text.Text(words), bar)
    return table


def _numbers(now: Frame) -> rich.table.Table:
    """Make the table of the last value of each quantity, and of the times."""
    cells: list[rich.text.Text] = []
    for name, series in now.run.metrics.series.items():
        cells.append(
            _cell(untrusted.printable(name, 24), _last(series), is_bad=series.lost is not None)
        )

    left_s, limit_left_s = now.left_s, now.limit_left_s
    is_late = left_s is not None and limit_left_s is not None and left_s > limit_left_s
    cells.append(_cell("elapsed", _time(now.elapsed_s)))
    cells.append(_cell("left", _time(left_s), is_bad=is_late))
    cells.append(_cell("to the time limit", _time(limit_left_s)))

    table = rich.table.Table.grid(padding=(0, 3))
    for begin in range(0, len(cells), _COLUMNS):
        table.add_row(*cells[begin : begin + _COLUMNS])
    return table


def _cell(name: str, value: str, *, is_bad: bool = False) -> rich.text.Text:
    style = "bold red" if is_bad else "bold"
    return rich.text.Text.assemble((f"{name} ", "dim"), (value, style))


def _last(series: metrics.Series) -> str:
    if series.lost is not None:
        return f"not finite from step {series.lost:g}"
    return charts.number_text(series.last or 0.0)


def _time(seconds: float | None) -> str:
    return "-" if seconds is None else times.format_time(int(seconds))
