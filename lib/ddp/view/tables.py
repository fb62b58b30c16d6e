"""Results and lines of progress that say more than their text: a terminal shows them as tables and bars.

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

    def objects(self) -> list[dict[str, object]]:
        """The rows as objects, named after the head; numbers are numbers, and an empty cell or `-` is None."""
        head, *body = self.rows
        names = [name.lower() for name in head]
        return [dict(zip(names, map(value, row), strict=True)) for row in body]


class Line(str):
    """A line of what a command was asked for, such as a log that it follows: it goes to standard output."""

    __slots__ = ()


class Step(str):
    """A line of progress of a task that goes on."""

    __slots__ = ("detail", "done", "task", "total")
    task: str  # what is done; the next line with the same one is of the same bar
    detail: str
    done: float
    total: float | None  # None: not known

    def __new__(cls, text: str, task: str, detail: str = "", *, done: float = 0, total: float | None = None) -> "Step":
        """Make the line `text`."""
        made = super().__new__(cls, text)
        made.task, made.detail, made.done, made.total = task, detail, done, total
        return made

    def adding(self, words: str) -> "Step":
        """Return the same line with more words behind it."""
        detail = ", ".join(part for part in (self.detail, words) if part)
        return Step(f"{self}, {words}", self.task, detail, done=self.done, total=self.total)


def value(cell: str) -> object:
    """Convert a cell: a number is a number, and an empty one or `-` is None."""
    for kind in (int, float):
        try:
            return kind(cell)
        except ValueError:
            continue
    return None if cell in ("", "-") else cell


def _aligned(rows: Rows) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows)
