"""A measured ratio."""

# pyright: basic, reportPrivateImportUsage=false
import dataclasses
import statistics
import time
import typing
from collections.abc import Callable, Sequence


class NotHere(Exception):
    """What a measure needs is not on this machine; the text says what."""


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


@dataclasses.dataclass(frozen=True)
class Laps:
    """The times of an action that was repeated."""

    wall_s: list[float]
    cpu_s: list[float]  # of all threads of the process

    def cpu_ratio(self, peer: "Laps") -> str:
        """Return how many times less processor time this took than a peer: hardly touched by busy neighbours."""
        return f"{median(peer.cpu_s) / median(self.cpu_s):.2f} by processor time"

    def least_ratio(self, peer: "Laps") -> str:
        """Return how many times quicker the quickest turn was than a peer's: what no neighbour disturbed."""
        return f"{min(peer.wall_s) / min(self.wall_s):.2f} by the quickest turns"


def alternate(
    actions: Sequence[Callable[[], object]], rounds: int, *, warm: int = 1, limit_s: float = 60.0
) -> list[Laps]:
    """Return the times of each action, taken in turns so that a busy neighbour slows all alike.

    On a machine too busy for that in `limit_s` there are fewer rounds, two at least.
    """
    for _ in range(warm):
        for action in actions:
            action()
    taken = [Laps([], []) for _ in actions]
    deadline = time.monotonic() + limit_s
    for done in range(rounds):
        if done >= 2 and time.monotonic() > deadline:
            break
        for laps, action in zip(taken, actions, strict=True):
            wall, cpu = time.perf_counter(), time.process_time()
            action()
            laps.wall_s.append(time.perf_counter() - wall)
            laps.cpu_s.append(time.process_time() - cpu)
    return taken


def median(values: Sequence[float]) -> float:
    """Return the median."""
    return statistics.median(values)
