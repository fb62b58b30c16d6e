"""The rank that holds the others up.

In DDP a step takes as long on every rank, since all wait for the slowest one in the sum of the
gradients. Until then each rank works alone: it waits for its data and computes the forward pass.
That time is compared.
"""

# pyright: basic, reportPrivateImportUsage=false
import collections.abc
import contextlib
import statistics
import time
import typing

import torch

from ddptrain.ground import log

if typing.TYPE_CHECKING:
    from ddptrain.world import distributed

TOO_SLOW = 1.5  # times the ranks' median
WINDOW_S = 10.0  # times are added up over it: a single step says little


class Pace:
    """This rank's own time, and on rank 0 the comparison of all."""

    def __init__(self, world: "distributed.World") -> None:
        self._world = world
        self._own_s = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._window_s = 0.0
        self._seconds = [0.0] * world.size
        self._warned_of: int | None = None  # the rank, as long as it stays too slow
        # Rank, host, and how many times the median it takes, of the last window
        self.slowest: dict[str, object] = {}

    @contextlib.contextmanager
    def own(self) -> collections.abc.Iterator[None]:
        """Count the block's time; on a GPU the GPU's, idle while it waits for data included."""
        if self._world.device.type != "cuda":
            began = time.perf_counter()
            yield
            self._own_s += time.perf_counter() - began
            return
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        begin.record()
        yield
        end.record()
        self._events.append((begin, end))

    def take(self) -> float:
        """Return this rank's own seconds since the last call.

        On a GPU the steps' work must be done by then.
        """
        own_s = self._own_s
        for begin, end in self._events:
            own_s += begin.elapsed_time(end) / 1e3
        self._own_s = 0.0
        self._events = []
        return own_s

    def add(self, seconds: collections.abc.Sequence[float], elapsed_s: float) -> None:
        """Add all ranks' seconds of some steps; at the end of a window name the slowest rank.

        Only rank 0 calls it.
        """
        self._seconds = [a + b for a, b in zip(self._seconds, seconds, strict=True)]
        self._window_s += elapsed_s
        if self._window_s < WINDOW_S:
            return
        self._compare()
        self._window_s = 0.0
        self._seconds = [0.0] * self._world.size

    def _compare(self) -> None:
        most = max(self._seconds)
        median = statistics.median_low(self._seconds)
        if self._world.size == 1 or median <= 0:
            return
        rank = self._seconds.index(most)
        times = most / median
        host = self._world.members[rank]["host"]
        self.slowest = {"rank": rank, "host": host, "times": round(times, 2)}

        slow = rank if times > TOO_SLOW else None
        if slow not in (None, self._warned_of):
            what = f"its data and forward pass take {times:.1f} times the median"
            log.warn("TRAIN", f"rank {rank} on {host} is slow: {what}")
        self._warned_of = slow
