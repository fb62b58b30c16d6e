"""What the seats share: how a unit's status is told."""

import dataclasses


class Level:
    """What a status means to a reader: ACTIVE, WAITING for something else, or BLOCKED until a person acts."""

    ACTIVE, WAITING, BLOCKED = "active", "waiting", "blocked"


@dataclasses.dataclass(frozen=True)
class Verdict:
    """One line for the unit's status."""

    level: str
    text: str


def count(number: int, noun: str) -> str:
    """Return `1 node`, `2 nodes`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
