"""The live view of a run on a terminal, and its lines elsewhere."""

import collections.abc
import time

import rich.console
import rich.live
import rich.panel
import rich.progress_bar
import rich.table
import rich.text

from ddp import screen
from ddp.report import charts
from ddp.watch import braille, frame

_CURVE_ROWS = 8
_LEAST_WIDTH, _MOST_WIDTH = 40, 160
_SHOWN_FAILURES = 3


def watch(
    read: collections.abc.Callable[[], frame.Frame], console: rich.console.Console, *, every_s: float = 2.0
) -> None:
    """Show the frames of `read` until the run has ended or the user presses Ctrl-C.

    If the console is not a terminal, print a line for each change instead.
    """
    try:
        if console.is_terminal:
            with rich.live.Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
                for now in _frames(read, every_s):
                    live.update(render(now, console.width, console.height), refresh=True)
            return

        def write(now: frame.Frame) -> None:
            console.print(f"{now.now:%H:%M:%S} {line(now)}", markup=False, highlight=False, soft_wrap=True)

        changes(read, write, every_s=every_s)
    except KeyboardInterrupt:
        return


def changes(
    read: collections.abc.Callable[[], frame.Frame],
    write: collections.abc.Callable[[frame.Frame], None],
    *,
    every_s: float = 2.0,
) -> None:
    """Call `write` with each frame that differs in its `line`, until the run has ended."""
    before = ""
    for now in _frames(read, every_s):
        if (text := line(now)) != before:
            write(now)
            before = text


def _frames(read: collections.abc.Callable[[], frame.Frame], every_s: float) -> collections.abc.Iterator[frame.Frame]:
    while True:
        now = read()
        yield now
        if now.has_ended:
            return
        time.sleep(every_s)


def line(now: frame.Frame) -> str:
    """Describe a frame in one line, without what changes by itself, such as the time left."""
    parts = [now.run, now.state + (f" ({now.why})" if now.why else "")]
    if now.step:
        parts.append(f"step {now.step}" + (f"/{now.steps}" if now.steps else ""))
    parts += [f"loss {now.loss:.4f}"] if now.loss is not None else []
    parts += [f"evaluation {now.val_loss:.4f}"] if now.val_loss is not None else []
    if now.tokens_per_second is not None:
        parts.append(f"{_short(now.tokens_per_second)} tokens/s")
    parts += [f"attempt {now.attempts}"] if now.attempts > 1 else []
    parts += [f"{len(now.failures)} failed: {_reason(now)}"] if now.failures else []
    return ", ".join(parts)


def render(now: frame.Frame, width: int, height: int = 40) -> rich.console.RenderableType:
    """Render a frame with this many columns; on a low terminal the log gets fewer lines."""
    width = max(_LEAST_WIDTH, min(_MOST_WIDTH, width))
    parts: list[rich.console.RenderableType] = [_head(now), _progress(now, width - 4), _numbers(now)]
    if now.losses:
        parts.append(_curve(now, width - 4))
    if now.failures:
        parts.append(_failures(now))
    room = height - (8 + (_CURVE_ROWS + 2 if now.losses else 0) + min(len(now.failures), _SHOWN_FAILURES + 1))
    if now.log and room > 1:
        log = rich.text.Text("\n".join(now.log[-min(len(now.log), room) :]), style="dim", overflow="ellipsis")
        log.no_wrap = True
        parts.append(log)
    title = rich.text.Text(f" {now.run} ", style="bold")
    return rich.panel.Panel(rich.console.Group(*parts), title=title, title_align="left", width=width)


def _head(now: frame.Frame) -> rich.text.Text:
    text = rich.text.Text(now.state, style=f"bold {screen.STATES.get(now.state, 'magenta')}", overflow="ellipsis")
    text.no_wrap = True
    parts = [now.why, f"job {now.job_id}" if now.job_id else "", now.nodes]
    parts.append(f"restarts {now.attempts - 1}" if now.attempts > 1 else "")
    for part in parts:
        text.append(f"  {part}" if part else "", style="default")
    return text


def _progress(now: frame.Frame, width: int) -> rich.table.Table:
    table = rich.table.Table.grid(padding=(0, 1))
    words = f"step {now.step}" + (f" of {now.steps} ({min(1.0, now.step / now.steps):.0%})" if now.steps else "")
    room = max(10, width - len(words) - 2)
    bar = rich.progress_bar.ProgressBar(total=now.steps or 1, completed=min(now.step, now.steps or 0), width=room)
    table.add_row(rich.text.Text(words), bar)
    return table


def _numbers(now: frame.Frame) -> rich.table.Table:
    table = rich.table.Table.grid(padding=(0, 3))
    cells = [
        ("loss", _fixed(now.loss) if now.lost_step is None else f"not finite from step {now.lost_step:g}"),
        ("evaluation", _fixed(now.val_loss)),
        ("tokens/s", _short(now.tokens_per_second)),
        ("memory", _memory(now.memory_mib)),
        ("GPU use", "-" if now.gpu_percent is None else f"{now.gpu_percent:.0f} %"),
        ("elapsed", duration(now.elapsed_s)),
        ("left", duration(now.left_s)),
        ("to the time limit", duration(now.limit_left_s)),
        ("learning rate", _short(now.lr)),
    ]
    columns = 3
    for begin in range(0, len(cells), columns):
        row: list[rich.text.Text] = []
        for name, value in cells[begin : begin + columns]:
            is_short = name == "left" and None not in (now.left_s, now.limit_left_s) and _is_late(now)
            text = rich.text.Text(f"{name} ", style="dim")
            text.append(value, style="bold red" if is_short or value.startswith("not finite") else "bold")
            row.append(text)
        table.add_row(*row)
    return table


def _curve(now: frame.Frame, width: int) -> rich.table.Table:
    low, high = min(value for _, value in now.losses), max(value for _, value in now.losses)
    left = 9
    columns = max(10, width - left - 2)
    drawn = braille.draw(now.losses, columns, _CURVE_ROWS)
    axis = [""] * _CURVE_ROWS
    axis[0], axis[-1] = _short(high), _short(low)
    text = rich.text.Text()
    for label, cells in zip(axis, drawn, strict=True):
        text.append(f"{label:>{left}} \N{BOX DRAWINGS LIGHT VERTICAL}", style="dim").append(cells + "\n", style="cyan")
    first, last = f"{now.losses[0][0]:g}", f"{now.losses[-1][0]:g}"
    text.append(" " * (left + 2) + first + last.rjust(max(1, columns - len(first))), style="dim")
    table = rich.table.Table.grid()
    table.add_row(text)
    return table


def _failures(now: frame.Frame) -> rich.text.Text:
    text = rich.text.Text(style="red", overflow="ellipsis")
    text.no_wrap = True
    kept = now.failures[-_SHOWN_FAILURES:]
    lines = [f"{one.attempt} failed: {one.reason}" for one in kept]
    if len(now.failures) > len(kept):
        lines.insert(0, f"{len(now.failures)} attempts failed, the last of them:")
    return text.append("\n".join(frame.files.printable(line) for line in lines))


def _reason(now: frame.Frame) -> str:
    return frame.files.printable(now.failures[-1].reason)


def _is_late(now: frame.Frame) -> bool:
    return now.left_s is not None and now.limit_left_s is not None and now.left_s > now.limit_left_s


def _short(value: float | None) -> str:
    return "-" if value is None else charts.number_text(value)


def _fixed(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}" if abs(value) < 1e6 else f"{value:.4g}"


def _memory(mib: float | None) -> str:
    return "-" if mib is None else f"{mib / 1024:.1f} GiB" if abs(mib) >= 1024 else f"{mib:.0f} MiB"


def duration(seconds: float | None) -> str:
    """Format a time: 45 s, 12 m 30 s, 3 h 05 m, 2 d 4 h; a dash if it is unknown."""
    if seconds is None or not 0 <= seconds < 1e9:
        return "-"
    whole = int(seconds)
    days, hours, minutes = whole // 86400, whole // 3600 % 24, whole // 60 % 60
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes:02d} m"
    return f"{minutes} m {whole % 60:02d} s" if minutes else f"{whole} s"
