"""The result of a command: texts for people and actions, the same as values for programs."""

import collections.abc
import dataclasses

from ddp.problem import Results
from ddp.results import tables

SCHEMA = 1
_NUMBERS = frozenset(
    "job-id array-job-id exit-code count elements nodes ranks steps shards vocabulary size-mb unpacked-mb loss "
    "first-loss best-loss tokens-per-second samples-per-second".split()
)
_TEXTS = frozenset("name run hash python torch environment options".split())


def values_of(shown: collections.abc.Mapping[str, str]) -> dict[str, object]:
    """Convert results for programs: amounts become numbers, a table becomes a list of objects."""
    found: dict[str, object] = {}
    for name, text in shown.items():
        if isinstance(text, tables.Table):
            found[name] = _objects(text)
        elif name in _NUMBERS:
            found[name] = tables.value(text)
        else:
            found[name] = text
    return found


def _objects(table: tables.Table) -> list[dict[str, object]]:
    """Make an object of each row, with the head's names in lower case."""
    head, *body = table.rows
    names = [name.lower() for name in head]
    objects: list[dict[str, object]] = []
    for row in body:
        cells = zip(names, row, strict=True)
        objects.append({name: tables.value(cell, is_text=name in _TEXTS) for name, cell in cells})
    return objects


@dataclasses.dataclass(frozen=True)
class Result:
    """The result of a command, in the forms that front ends need."""

    shown: dict[str, str]  # for an action and a terminal
    values: dict[str, object]  # for --json: numbers as numbers, times as ISO
    text: str | None = None  # standard output as a whole, such as a log; None: `shown`

    def texts(self) -> dict[str, str]:
        """Return the results of an action."""
        return dict(self.shown)

    def record(self) -> dict[str, object]:
        """Return the object that --json prints."""
        return {"schema": SCHEMA, **self.values}


Answer = Result | Results


def texts_of(answer: Answer) -> Results:
    """Return the results as an action does."""
    return answer.texts() if isinstance(answer, Result) else answer
