"""The result of a command: texts for people and actions, and the same as values for programs."""

import dataclasses

SCHEMA = 1


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
