"""A measured ratio."""

# pyright: basic, reportPrivateImportUsage=false
import dataclasses
import resource
import statistics
import time
import typing
from collections.abc import Callable, Sequence

T = typing.TypeVar("T")


class NotHere(Exception):
    """What a measure needs is not on this machine; the text says what.

    Raised by a row that can measure nothing; one among the rows that it returns stands for a peer that is missing.
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
    cpu_s: list[float] = dataclasses.field(default_factory=list[float])  # of all threads, and of children that ended

    def measure(self, action: Callable[[], T]) -> T:
        """Run the action, add its times and return its result."""
        wall, cpu = time.perf_counter(), _cpu_s()
        result = action()
        self.wall_s.append(time.perf_counter() - wall)
        self.cpu_s.append(_cpu_s() - cpu)
        return result

    def beside(self, peer: "Laps") -> str:
        """Return a row's note on both: the ratio by processor time, and the spread of the turns."""
        return f"{self.cpu_ratio(peer)}; {self.spread}, peer {peer.spread}"

    def cpu_ratio(self, peer: "Laps") -> str:
        """Return how many times less processor time this took than a peer: hardly touched by busy neighbours."""
        return f"{median(peer.cpu_s) / median(self.cpu_s):.2f} by processor time"

    @property
    def spread(self) -> str:
        """Return the least and the most wall time, and the number of turns."""
        return spread(self.wall_s, "s")


def alternate(
    actions: Sequence[Callable[[], object]], rounds: int, *, warm: int = 1, limit_s: float = 60.0
) -> list[Laps]:
    """Return the times of each action, taken in turns so that a busy neighbour slows all alike.

    On a machine too busy for that in `limit_s` there are fewer rounds, two at least.
    """
    for _ in range(warm):
        for action in actions:
            action()
    taken = [Laps() for _ in actions]
    deadline = time.monotonic() + limit_s
    for done in range(rounds):
        if done >= 2 and time.monotonic() > deadline:
            break
        for laps, action in zip(taken, actions, strict=True):
            laps.measure(action)
    return taken


def median(values: Sequence[float]) -> float:
    """Return the median."""
    return statistics.median(values)


def spread(values: Sequence[float], unit: str) -> str:
    """Return the least and the most of the turns' values and their number, as a row's note says it."""
    return f"{min(values):.3g} to {max(values):.3g} {unit} in {len(values)} turns"


def _cpu_s() -> float:
    """Processor seconds of this process and of its children that ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime
