"""The result of a command: texts for people and actions, and the same as values for programs."""

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
    """Convert results for programs: amounts to numbers, a table to a list of objects; the rest stays text."""

    def value(name: str, text: str) -> object:
        if isinstance(text, tables.Table):
            head, *body = text.rows
            rows = (zip(map(str.lower, head), row, strict=True) for row in body)
            return [
                {name: tables.value(cell, is_text=name in _TEXTS) for name, cell in row}
                for row in rows
            ]
        return tables.value(text) if name in _NUMBERS else text

    return {name: value(name, text) for name, text in shown.items()}


@dataclasses.dataclass(frozen=True)
class Result:
    """What a command returns."""

    shown: dict[str, str]  # an action's results, and what a terminal shows
    values: dict[str, object]  # what --json prints: numbers as numbers, times as ISO
    text: str | None = None  # all that standard output gets, such as a log; None: `shown`

    def texts(self) -> dict[str, str]:
        """Return the results of an action."""
        return dict(self.shown)

    def record(self) -> dict[str, object]:
        """Return the object that --json prints."""
        return {"schema": SCHEMA, **self.values}


Answer = Result | Results


def texts_of(answer: Answer) -> Results:
    """Give the results as an action returns them."""
    return answer.texts() if isinstance(answer, Result) else answer
