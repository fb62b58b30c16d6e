"""Which rank holds the others up.

In DDP a step takes as long on every rank, since all wait for the slowest one in the sum of the gradients. What a rank
does before that, waiting for its data and computing the forward pass, it does on its own: that time is compared.
"""

# pyright: basic, reportPrivateImportUsage=false
import collections.abc
import contextlib
import statistics
import time

import torch

from ddptrain.ground import log
from ddptrain.world import distributed

TOO_SLOW = 1.5  # times the ranks' median
WINDOW_S = 10.0  # over which the times are added up: a single step says little


class Pace:
    """This rank's own time, and on rank 0 the comparison of all."""

    def __init__(self, world: distributed.World) -> None:
        self._world = world
        self._own_s = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._window_s = 0.0
        self._seconds = [0.0] * world.size
        self._warned_of: int | None = None  # the rank, as long as it stays too slow
        self.slowest: dict[
            str, object
        ] = {}  # rank, host, and how many times the median it takes, of the last window

    @contextlib.contextmanager
    def own(self) -> collections.abc.Iterator[None]:
        """Count the block's time; on a GPU the GPU's, idle while it waits for data included."""
        if self._world.device.type == "cuda":
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            yield
            end.record()
            self._events.append((begin, end))
        else:
            began = time.perf_counter()
            yield
            self._own_s += time.perf_counter() - began

    def share(self) -> list[float]:
        """Return the seconds since the last call at this rank's place among zeros: the ranks' sum has all of them.

        On a GPU the steps' work is done when it is called.
        """
        own_s = self._own_s + sum(begin.elapsed_time(end) for begin, end in self._events) / 1e3
        self._own_s, self._events = 0.0, []
        return [own_s if rank == self._world.rank else 0.0 for rank in range(self._world.size)]

    def add(self, seconds: collections.abc.Sequence[float], elapsed_s: float) -> None:
        """Take the ranks' seconds of steps that took `elapsed_s`; at the end of a window name the slowest rank."""
        self._seconds = [a + b for a, b in zip(self._seconds, seconds, strict=True)]
        self._window_s += elapsed_s
        if self._window_s < WINDOW_S:
            return
        most, median = max(self._seconds), statistics.median_low(self._seconds)
        if self._world.is_main and self._world.size > 1 and median > 0:
            rank, times = self._seconds.index(most), most / median
            host = self._world.members[rank]["host"]
            self.slowest = {"rank": rank, "host": host, "times": round(times, 2)}
            slow = rank if times > TOO_SLOW else None
            if slow not in (None, self._warned_of):
                text = f"rank {rank} on {host} is slow: its data and forward pass take {times:.1f} times the median"
                log.warn("TRAIN", text)
            self._warned_of = slow
        self._window_s, self._seconds = 0.0, [0.0] * self._world.size
