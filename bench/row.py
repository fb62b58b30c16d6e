"""A measured ratio."""

# pyright: basic, reportPrivateImportUsage=false
import dataclasses
import statistics
import time
import typing
from collections.abc import Callable, Sequence


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table. `ratio` is how many times better ours is."""

    measure: str
    ours: float
    peer: float
    unit: str  # of both
    peer_name: str
    more_is_better: bool = True
    goal: float | None = None  # the least ratio that the project promises
    note: str = ""

    @property
    def ratio(self) -> float:
        """Return how many times better ours is than the peer."""
        above, below = (self.ours, self.peer) if self.more_is_better else (self.peer, self.ours)
        return above / below if below else float("inf")

    def as_record(self) -> dict[str, typing.Any]:
        """Return the JSON object."""
        return {
            **dataclasses.asdict(self),
            "ratio": self.ratio,
            "met": None if self.goal is None else self.ratio >= self.goal,
        }


def alternate(actions: Sequence[Callable[[], object]], rounds: int, *, warm: int = 1) -> list[list[float]]:
    """Return the seconds of each call, per action, taken in turns so that a busy neighbour slows all alike."""
    for _ in range(warm):
        for action in actions:
            action()
    taken: list[list[float]] = [[] for _ in actions]
    for _ in range(rounds):
        for times, action in zip(taken, actions, strict=True):
            began = time.perf_counter()
            action()
            times.append(time.perf_counter() - began)
    return taken


def median(values: Sequence[float]) -> float:
    """Return the median."""
    return statistics.median(values)
