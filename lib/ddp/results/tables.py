"""Results and lines of progress that are more than their text: a terminal shows them as tables and a status line.

Both are texts, as actions, pipes and JSON have them.
"""

import collections.abc

Rows = collections.abc.Sequence[collections.abc.Sequence[str]]


class Table(str):
    """Rows of printable cells, the first of them the head; as a text they are aligned by blanks."""

    __slots__ = ("rows",)
    rows: Rows

    def __new__(cls, rows: Rows, text: str | None = None) -> "Table":
        """Make a table of rows, which all have as many cells; `text` where it is not the aligned rows."""
        made = super().__new__(cls, _aligned(rows) if text is None else text)
        made.rows = rows
        return made


class Line(str):
    """A line of what a command was asked for, such as a log that it follows: it goes to standard output."""

    __slots__ = ()


class Step(str):
    """A line of progress of a task that goes on; the next line of the same task takes its place on a terminal."""

    __slots__ = ("task",)
    task: str

    def __new__(cls, text: str, task: str) -> "Step":
        """Make the line `text`."""
        made = super().__new__(cls, text)
        made.task = task
        return made


def value(cell: str, *, is_text: bool = False) -> object:
    """Convert a cell: a number is a number unless it is a text's, and an empty one or `-` is None."""
    for kind in () if is_text else (int, float):
        try:
            return kind(cell)
        except ValueError:
            continue
    return None if cell in ("", "-") else cell


def _aligned(rows: Rows) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows
    )
