"""Texts that a terminal shows as more: tables, lines of a log, a status line.

Actions, pipes and JSON take them as the texts that they are.
"""

import collections.abc

from slurm_ddp import text_table

Rows = collections.abc.Sequence[collections.abc.Sequence[str]]


class Table(str):
    """Rows of printable cells, the head first; as a text, columns aligned by blanks."""

    __slots__ = ("rows",)
    rows: Rows

    def __new__(cls, rows: Rows, text: str | None = None) -> "Table":
        """Make a table of rows of equal length; `text` replaces the aligned columns."""
        made = super().__new__(cls, text_table.aligned(rows) if text is None else text)
        made.rows = rows
        return made


class Line(str):
    """A line of output, such as one of a log that is followed: it goes to standard output."""

    __slots__ = ()


class Step(str):
    """A line of progress; on a terminal the next line of the same task takes its place."""

    __slots__ = ("task",)
    task: str

    def __new__(cls, text: str, task: str) -> "Step":
        """Make the line `text`."""
        made = super().__new__(cls, text)
        made.task = task
        return made


def value(cell: str, *, is_text: bool = False) -> object:
    """Convert a cell to a number if it is one, unless `is_text`; an empty one or `-` is None."""
    if cell in ("", "-"):
        return None
    if is_text:
        return cell
    for kind in (int, float):
        try:
            return kind(cell)
        except ValueError:
            continue
    return cell
