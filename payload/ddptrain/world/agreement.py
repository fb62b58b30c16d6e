"""Agreement between ranks: small values, by torch's collectives on a gloo group.

Rank 0 gathers every rank's share and broadcasts what follows from them. gloo's own sum passes each
share around a ring of the ranks: 32 ranks on two cores took 53 ms by it, and 7 ms by a gather and a
broadcast (torch 2.13).
"""

# pyright: basic, reportPrivateImportUsage=false
import collections.abc
import dataclasses
import datetime
import os
import pathlib
import typing

import torch
import torch.distributed as dist

from ddptrain.ground import attempt

if typing.TYPE_CHECKING:
    from ddptrain.world import distributed

TARGET_S = 1.0  # how long a request to stop may go unnoticed
_AT_MOST = 50  # steps between two agreements: later steps may be slower


class Peers:
    """All ranks of a gloo group. Every rank calls the same method in the same order."""

    def __init__(self, rank: int, size: int, control: typing.Any, timeout_s: float) -> None:
        self.rank = rank
        self.size = size
        self.control: typing.Any = control
        self.timeout_s = timeout_s

    def barrier(self) -> None:
        """Wait for all ranks. Raises RuntimeError on rank 0 naming the ranks that are late."""
        if self.size > 1:
            timeout = datetime.timedelta(seconds=self.timeout_s)
            dist.monitored_barrier(self.control, timeout, wait_all_ranks=True)

    def gather(self, values: collections.abc.Sequence[float]) -> list[list[float]]:
        """Return every rank's numbers, in rank order, on rank 0; an empty list elsewhere."""
        if self.size == 1:
            return [list(values)]
        own = torch.tensor(values, dtype=torch.float64)
        parts: list[torch.Tensor] = []
        if self.rank == 0:
            parts = [torch.empty_like(own) for _ in range(self.size)]
        dist.gather(own, parts or None, group=self.control)
        return [part.tolist() for part in parts]

    def share(self, values: collections.abc.Sequence[float]) -> list[float]:
        """Return rank 0's numbers on every rank. The others pass any numbers, as many."""
        if self.size == 1:
            return list(values)
        shared = torch.tensor(values, dtype=torch.float64)
        dist.broadcast(shared, src=0, group=self.control)
        return shared.tolist()

    def sum(self, values: collections.abc.Sequence[float]) -> list[float]:
        """Return the sums over the ranks, in 64 bits and in rank order, the same on every rank."""
        return self.share(sums(self.gather(values)) or values)

    def collect(self, value: object) -> list[typing.Any]:
        """Return every rank's object, in rank order, on rank 0; an empty list elsewhere."""
        if self.size == 1:
            return [value]
        found: list[typing.Any] | None = None
        if self.rank == 0:
            found = [None] * self.size
        dist.gather_object(value, found, group=self.control)
        return found or []

    def broadcast(self, value: object) -> typing.Any:
        """Return rank 0's object on every rank."""
        if self.size == 1:
            return value
        held = [value]
        dist.broadcast_object_list(held, src=0, group=self.control)
        return held[0]


def sums(shares: collections.abc.Sequence[collections.abc.Sequence[float]]) -> list[float]:
    """Return the sum of each column, added in the order of the rows; empty without rows."""
    totals: list[float] = []
    for column in zip(*shares, strict=True):
        total = 0.0
        for value in column:  # not sum(), whose last bits depend on Python's release
            total += value
        totals.append(total)
    return totals


@dataclasses.dataclass(frozen=True)
class Agreed:
    """The ranks' decision after a step."""

    stop: bool
    sums: list[float]  # over the ranks
    own: list[float]  # the value of each rank; on rank 0 alone


class Agreement:
    """A stop that all ranks decide at the same step, by any rank's signal or rank 0's stop file.

    The ranks agree about each `target_s`, at a step that all of them know; every other step costs
    one comparison.
    """

    def __init__(
        self, world: "distributed.World", *, at_most: int = _AT_MOST, target_s: float = TARGET_S
    ) -> None:
        self._world = world
        self._target_s = target_s
        self._at_most = at_most
        path = os.environ.get(attempt.STOP_FILE)
        self._stop_file = pathlib.Path(path) if path else None
        self._steps = 0
        self._interval = 1

    def is_due(self) -> bool:
        """Count a step, and return whether the ranks agree after it."""
        self._steps += 1
        return self._steps >= self._interval

    def reach(
        self,
        elapsed_s: float,
        values: collections.abc.Sequence[float] = (),
        own: float = 0.0,
    ) -> Agreed:
        """Decide with the other ranks, which all call it; exchange `values` and `own` as well.

        `elapsed_s` is the time of the steps since the last agreement.
        """
        shares = self._world.gather([float(self._is_asked()), *values, own])
        totals = sums(shares) or [0.0] * (len(values) + 2)
        stop, *shared, interval = self._world.share([*totals[:-1], self._next(elapsed_s)])

        self._steps = 0
        self._interval = int(interval)
        return Agreed(stop > 0, shared, [one[-1] for one in shares])

    def _next(self, elapsed_s: float) -> float:
        """Return after how many steps to agree again."""
        wanted = round(self._target_s * self._steps / max(elapsed_s, 1e-6))
        return float(min(self._at_most, max(1, wanted)))

    def stop_by(self) -> float | None:
        """Return until when the ranks have time to stop, if the stop file has the time.

        Only rank 0 calls it.
        """
        if self._stop_file is None:
            return None
        try:
            return float(self._stop_file.read_text())
        except (OSError, ValueError):
            return None

    def _is_asked(self) -> bool:
        if self._world.stop_requested.is_set():
            return True
        return self._world.is_main and self._stop_file is not None and self._stop_file.exists()
