"""What a command writes: results on standard output, progress on standard error.

On a terminal tables, bars and colours, as wide as it is; elsewhere plain text, the same for every reader; with --json
one object. NO_COLOR (https://no-color.org) leaves out colours; a terminal that is `dumb` is none.
"""

import collections.abc
import json
import os
import re
import sys
import typing

import click

from ddp.base import Results
from ddp.view import tables
from ddp.view.result import SCHEMA, Result, values_of

if typing.TYPE_CHECKING:  # imported where there is a terminal: what is piped starts without it
    import rich.console
    import rich.table
    import rich.text

    from ddp.view import bars

STATES = {"COMPLETED": "green", "RUNNING": "cyan", "PENDING": "yellow", "PREEMPTED": "yellow", "FAILED": "red"}
_COLOURS = {
    "cyan": "COMPLETING NOTE",
    "yellow": "REQUEUED CONFIGURING CANCELLED WARNING warning",
    "red": "TIMEOUT OUT_OF_MEMORY NODE_FAIL DEADLINE ERROR",
    "green": "ok",
}
_WORDS = STATES | {word: colour for colour, words in _COLOURS.items() for word in words.split()}
_LONG = 400  # a value of so many characters is written below its name
_LEAST_CELL = 24  # the width to which a column of long texts may be folded
_GAP, _TABLE_GAP = 2, 3  # cells between columns
_NUMBER = re.compile(r"[-+]?[\d,]*\.?\d+(e[-+]?\d+)?( \*)?|-|")


def is_terminal(stream: typing.TextIO) -> bool:
    """Tell whether the stream is a terminal that shows what is written."""
    return stream.isatty() and os.environ.get("TERM", "") not in ("dumb", "unknown")


def console(stream: typing.TextIO) -> "rich.console.Console":
    """Make a console for a stream; without a terminal it writes no colours, even with FORCE_COLOR set."""
    import rich.console  # noqa: PLC0415

    shown = is_terminal(stream)
    width = None
    if shown and not os.environ.get("COLUMNS", "").isdecimal():
        width = os.get_terminal_size(stream.fileno()).columns or None
    return rich.console.Console(
        file=stream, force_terminal=shown, width=width, highlight=False, markup=False, emoji=False
    )


class Screen:
    """Where a command's results and its progress go."""

    def __init__(self, *, is_json: bool) -> None:
        self._is_json = is_json
        self._bars: bars.Bars | None = None

    def log(self, text: str) -> None:
        """Write a line of progress; of a task that goes on, move its bar on a terminal; of a log, the line itself."""
        if isinstance(text, tables.Line) and not self._is_json:
            self.close()
            click.echo(text)
            return
        if isinstance(text, tables.Step) and is_terminal(sys.stderr):
            from ddp.view import bars  # noqa: PLC0415

            self._bars = self._bars or bars.Bars(console(sys.stderr))
            self._bars.move(text)
            return
        self.close()
        click.echo(text, err=True)

    def close(self) -> None:
        """Take the bar away; the terminal is then as it was."""
        if self._bars is not None:
            self._bars.close()
            self._bars = None

    def show(self, results: Results | Result) -> None:
        """Write the results; of one that is a text, such as a log, the text alone."""
        self.close()
        if isinstance(results, Result) and results.text is not None and not self._is_json:
            if results.text:
                click.echo(results.text)
            return
        if self._is_json:
            click.echo(json.dumps(results.record() if isinstance(results, Result) else results, indent=1))
            return
        results = results.texts() if isinstance(results, Result) else results
        if not results:
            return
        if is_terminal(sys.stdout):
            _draw(results, console(sys.stdout))
        else:
            _write(results)

    def show_text(self, results: Results, name: str) -> None:
        """Write one of the results as it is, for a file or another program; as JSON all of them."""
        self.close()
        click.echo(json.dumps(results, indent=1) if self._is_json else results[name].removesuffix("\n"))

    def fail(self, error: str, results: Results) -> None:
        """Write why it failed, on one line of standard error, behind what is known all the same."""
        self.close()
        if self._is_json:
            click.echo(json.dumps({"schema": SCHEMA, **values_of(results), "error": error}, indent=1))
        elif results:
            self.show(results)
        if is_terminal(sys.stderr):
            import rich.text  # noqa: PLC0415

            console(sys.stderr).print(rich.text.Text.assemble(("ddp:", "bold red"), f" {error}"), soft_wrap=True)
        else:
            click.echo(f"ddp: {error}", err=True)


def _is_long(value: str) -> bool:
    return "\n" in value or len(value) > _LONG


def _write(results: Results) -> None:
    """Write plain text: short results in two columns, long ones below their names."""
    width = max((len(name) for name, value in results.items() if "\n" not in value), default=0)
    for name, value in results.items():
        click.echo(f"{name}:\n{value.rstrip()}" if _is_long(value) else f"{name.ljust(width)}  {value}")


def _draw(results: Results, to: "rich.console.Console") -> None:
    """Draw results on a terminal."""
    import rich.text  # noqa: PLC0415

    width = max((len(name) for name, value in results.items() if not _is_long(value)), default=0)
    was_block = False
    for at, (name, value) in enumerate(results.items()):
        is_block = isinstance(value, tables.Table) or _is_long(value)
        if at and (is_block or was_block):
            to.print()
        was_block = is_block
        if is_block:
            to.print(rich.text.Text(name, style="bold cyan"))
        if isinstance(value, tables.Table):
            for number, table in enumerate(_tables(value.rows, to.width)):
                if number:
                    to.print()
                to.print(table)
        elif _is_long(value):
            for line in value.rstrip().split("\n"):
                to.print(_styled(line), soft_wrap=True)
        else:
            to.print(_pair(name, value, width, to.width), soft_wrap=True)


def _pair(name: str, value: str, width: int, columns: int) -> "rich.text.Text":
    """Return a line of a name and its value, whose further lines are indented; a word such as a path stays whole."""
    import rich.text  # noqa: PLC0415

    room = columns - width - _GAP
    lines = [""]
    for word in value.split(" "):
        if lines[-1] and len(lines[-1]) + 1 + len(word) > room:
            lines.append(word)
        else:
            lines[-1] += f" {word}" if lines[-1] else word
    text = rich.text.Text(name.ljust(width + _GAP), style="bold cyan")
    blanks = "\n" + " " * (width + _GAP)
    return rich.text.Text.assemble(text, _styled(blanks.join(lines)))


def _styled(text: str) -> "rich.text.Text":
    """Return a text whose first word, where it is a state or a verdict, has its colour."""
    import rich.text  # noqa: PLC0415

    found = rich.text.Text(text)
    word = re.match(r"\w+", text)
    if word and (style := _WORDS.get(word[0])):
        found.stylize(f"bold {style}", 0, word.end())
    return found


def _tables(rows: tables.Rows, columns: int) -> "collections.abc.Iterator[rich.table.Table]":
    """Yield rows as a table; one that is too wide is cut into several, each with the first column."""
    natural = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    least = [min(width, _LEAST_CELL) for width in natural]
    group: list[int] = []
    for at in range(len(natural)):
        if len(group) > 1 and sum(least[one] + _TABLE_GAP for one in (*group, at)) > columns + _TABLE_GAP:
            yield _table(rows, group)
            group = [0]
        group.append(at)
    yield _table(rows, group)


def _table(rows: tables.Rows, group: collections.abc.Sequence[int]) -> "rich.table.Table":
    import rich.box  # noqa: PLC0415
    import rich.table  # noqa: PLC0415
    import rich.text  # noqa: PLC0415

    head, *body = rows
    table = rich.table.Table(
        box=rich.box.SIMPLE_HEAD, header_style="bold", show_edge=False, pad_edge=False, padding=(0, 1)
    )
    for at in group:
        is_number = all(_NUMBER.fullmatch(row[at]) for row in body)
        longest = max(len(row[at]) for row in rows)
        table.add_column(
            rich.text.Text(head[at]),
            justify="right" if is_number else "left",
            overflow="fold",
            no_wrap=longest <= _LEAST_CELL,
            min_width=min(_LEAST_CELL, longest),
        )
    for row in body:
        table.add_row(*(_cell(row[at]) for at in group))
    return table


def _cell(value: str) -> "rich.text.Text":
    import rich.text  # noqa: PLC0415

    style = _WORDS.get(value, "bold green" if value.endswith(" *") else "")  # the best of its kind
    return rich.text.Text(value, style=style)
