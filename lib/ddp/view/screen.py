"""A command's output: results on standard output, progress on standard error.

A terminal gets tables in its width, a status line and colours; anything else plain text; --json one
object. NO_COLOR (https://no-color.org) leaves out colours; a `dumb` terminal counts as plain text.
"""

import collections.abc
import json
import os
import re
import sys
import typing

import click

from ddp.problem import Results
from ddp.results import tables
from ddp.results.result import SCHEMA, values_of

if typing.TYPE_CHECKING:  # imported for a terminal: output to a pipe starts without it
    import rich.console
    import rich.status
    import rich.table
    import rich.text

_BY_COLOUR = {
    "green": "COMPLETED ok",
    "cyan": "RUNNING COMPLETING NOTE",
    "yellow": "PENDING PREEMPTED REQUEUED CONFIGURING CANCELLED WARNING warning",
    "red": "FAILED TIMEOUT OUT_OF_MEMORY NODE_FAIL DEADLINE ERROR",
}
COLOURS = {word: colour for colour, words in _BY_COLOUR.items() for word in words.split()}
_LEAST_CELL = 24  # the least width of a column with long texts
_GAP, _TABLE_GAP = 2, 3  # cells between columns


def is_terminal(stream: typing.TextIO) -> bool:
    """Return whether the stream is a terminal that understands escape sequences."""
    return stream.isatty() and os.environ.get("TERM", "") not in ("dumb", "unknown")


def console(stream: typing.TextIO) -> "rich.console.Console":
    """Make a console for a stream; only a terminal gets colours, even with FORCE_COLOR set."""
    import rich.console  # noqa: PLC0415

    return rich.console.Console(
        file=stream, force_terminal=is_terminal(stream), highlight=False, markup=False, emoji=False
    )


class Screen:
    """Writes a command's results and its progress."""

    def __init__(self, *, is_json: bool) -> None:
        self._is_json = is_json
        self._status: rich.status.Status | None = None
        self._step: tables.Step | None = None

    def log(self, text: str) -> None:
        """Write a line of progress. On a terminal a task's lines replace each other."""
        if isinstance(text, tables.Line) and not self._is_json:  # output, not progress
            self.close()
            click.echo(text)
        elif isinstance(text, tables.Step) and is_terminal(sys.stderr):
            self._replace(text)
        else:
            self.close()
            click.echo(text, err=True)

    def _replace(self, step: tables.Step) -> None:
        """Show a line in place of the last one of the same task."""
        import rich.text  # noqa: PLC0415

        if self._step is not None and self._step.task != step.task:
            self.close()
        self._status = self._status or console(sys.stderr).status("")
        self._status.start()
        self._status.update(rich.text.Text(step))
        self._step = step

    def close(self) -> None:
        """End the line that changes; its last text stays."""
        if self._status is None:
            return
        self._status.stop()
        click.echo(self._step, err=True)
        self._status = None
        self._step = None

    def show(self, results: Results) -> None:
        """Write the results."""
        self.close()
        if is_terminal(sys.stdout):
            _draw(results, console(sys.stdout))
        else:
            _write(results)

    def fail(self, error: str, results: Results) -> None:
        """Write the results that are known, then the error on one line of standard error."""
        self.close()
        if self._is_json:
            record = {"schema": SCHEMA, **values_of(results), "error": error}
            click.echo(json.dumps(record, indent=1))
        elif results:
            self.show(results)

        if not is_terminal(sys.stderr):
            click.echo(f"ddp: {error}", err=True)
            return
        import rich.text  # noqa: PLC0415

        line = rich.text.Text.assemble(("ddp:", "bold red"), f" {error}")
        console(sys.stderr).print(line, soft_wrap=True)


def _width(results: Results) -> int:
    """Return the width of the names' column."""
    names = [name for name, value in results.items() if "\n" not in value]
    return max(map(len, names), default=0) + _GAP


def _write(results: Results) -> None:
    """Write plain text: results of one line in two columns, longer ones below their names."""
    width = _width(results)
    for name, value in results.items():
        if "\n" in value:
            click.echo(f"{name}:\n{value.rstrip()}")
        else:
            click.echo(name.ljust(width) + value)


def _draw(results: Results, to: "rich.console.Console") -> None:
    import rich.text  # noqa: PLC0415

    width = _width(results)
    for name, value in results.items():
        if isinstance(value, tables.Table) or "\n" in value:
            to.print(rich.text.Text(f"\n{name}", style="bold cyan"))
        else:
            to.print(rich.text.Text(name.ljust(width), style="bold cyan"), end="")
        if isinstance(value, tables.Table):
            to.print(*_tables(value.rows, to.width), sep="\n\n")
            continue
        for line in value.rstrip().split("\n"):
            to.print(_coloured(line), soft_wrap=True)


def _coloured(text: str) -> "rich.text.Text":
    """Colour a state or verdict that a text begins with; the best of a column (`*`) is green."""
    import rich.text  # noqa: PLC0415

    is_best = text.endswith(" *")
    found = rich.text.Text(text, style="bold green" if is_best else "")
    word = re.match(r"\w+", text)
    if word is not None and word[0] in COLOURS:
        found.stylize(f"bold {COLOURS[word[0]]}", 0, word.end())
    return found


def _tables(rows: tables.Rows, columns: int) -> "collections.abc.Iterator[rich.table.Table]":
    """Yield the table; cut one that is too wide into several, each with the first column."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    least = [min(width, _LEAST_CELL) + _TABLE_GAP for width in widths]
    room = columns + _TABLE_GAP
    group: list[int] = []
    for at in range(len(widths)):
        needed = sum(least[one] for one in (*group, at))
        if len(group) > 1 and needed > room:
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
        box=rich.box.SIMPLE_HEAD,
        header_style="bold",
        show_edge=False,
        pad_edge=False,
        padding=(0, 1),
    )
    for at in group:
        longest = max(len(row[at]) for row in rows)
        table.add_column(
            rich.text.Text(head[at]),
            overflow="fold",
            no_wrap=longest <= _LEAST_CELL,
            min_width=min(_LEAST_CELL, longest),
        )
    for row in body:
        table.add_row(*(_coloured(row[at]) for at in group))
    return table
