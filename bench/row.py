"""A measured ratio."""

# pyright: basic, reportPrivateImportUsage=false
import dataclasses
import statistics
import time
import typing
from collections.abc import Callable, Sequence

T = typing.TypeVar("T")


class NotHere(Exception):
    """This machine lacks something that a measure needs; the text names it.

    Raised by a row that can measure nothing; one among the rows that it returns stands for a
    missing peer.
    """


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


@dataclasses.dataclass
class Laps:
    """The times of an action that was repeated."""

    wall_s: list[float] = dataclasses.field(default_factory=list[float])

    def measure(self, action: Callable[[], T]) -> T:
        """Run the action, add its time and return its result."""
        began = time.perf_counter()
        result = action()
        self.wall_s.append(time.perf_counter() - began)
        return result

    def beside(self, peer: "Laps") -> str:
        """Describe the spread of both sides' turns for a row's note."""
        return f"{spread(self.wall_s, 's')}, peer {spread(peer.wall_s, 's')}"


def alternate(actions: Sequence[Callable[[], object]], rounds: int) -> list[Laps]:
    """Time the actions in turns, so that a busy neighbour slows all. The first turn warms up."""
    taken = [Laps() for _ in actions]
    for _ in range(1 + rounds):
        for laps, action in zip(taken, actions, strict=True):
            laps.measure(action)
    for laps in taken:
        del laps.wall_s[0]
    return taken


def median(values: Sequence[float]) -> float:
    """Return the median."""
    return statistics.median(values)


def spread(values: Sequence[float], unit: str) -> str:
    """Return the least and the most of the turns' values, and their number."""
    return f"{min(values):.3g} to {max(values):.3g} {unit} in {len(values)} turns"
