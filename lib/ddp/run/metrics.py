"""A run's metrics.jsonl, read as it grows and kept within bounds.

A run of a million steps must fill neither memory nor a page, and a spike of one step must stay visible. So a long
curve is thinned: of each few neighbours the lowest and the highest value stay.
"""

import array
import bisect
import collections
import collections.abc
import contextlib
import dataclasses
import json
import math
import os
import pathlib

from ddp.node import small_files
from ddp.run import reading

MAX_POINTS = 1 << 16  # of one curve in memory; at least a quarter as many stay after thinning
MAX_SERIES = 24  # a run's own script may write any names
_GROUP = 8  # neighbours of which two stay
_CHUNK_BYTES = 1 << 20
_LARGEST = 1e300  # the difference of two such values is still finite
_LEAST = 1e-200  # smaller magnitudes count as 0
_LARGEST_STEP = 2.0**53  # from there on a float does not hold every whole number
_NOT_CURVES = {"step", "epoch", "time", "tokens", "samples", "perplexity", "total_steps"}
TOO_SLOW = 1.5  # times the median, as in ddptrain/pace.py
_RECENT = 64  # records from which the rate of steps is taken

Point = tuple[float, float]


class Series:
    """The values of one quantity by step, in the order of the steps."""

    def __init__(self, max_points: int = MAX_POINTS) -> None:
        self._max = max_points
        self._steps = array.array("d")
        self._values = array.array("d")
        self.lost: float | None = None  # the first of the last steps whose value is not finite
        self._latest = -math.inf

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def last(self) -> float | None:
        """The last finite value."""
        return self._values[-1] if self._values else None

    def add(self, step: float, value: float) -> None:
        """Append a point. A step that exists already replaces all from it on: the run was resumed there."""
        if step <= self._latest:
            keep = bisect.bisect_left(self._steps, step)
            del self._steps[keep:], self._values[keep:]
            self.lost = None if self.lost is not None and self.lost >= step else self.lost
        self._latest = step
        if not -_LARGEST < value < _LARGEST:  # NaN too
            self.lost = step if self.lost is None else self.lost
            return
        self.lost = None
        self._steps.append(step)
        self._values.append(value if abs(value) >= _LEAST else 0.0)
        if len(self._steps) > self._max:
            kept = self._extremes(range(0, len(self._steps), _GROUP))
            self._steps = array.array("d", [self._steps[index] for index in kept])
            self._values = array.array("d", [self._values[index] for index in kept])

    def points(self, limit: int = MAX_POINTS) -> list[Point]:
        """Return at most about `limit` points: first, last, and the extremes of equal ranges of steps."""
        count = len(self._steps)
        if count <= limit or count < 3:
            return list(zip(self._steps, self._values, strict=True))
        first, last, buckets = self._steps[0], self._steps[-1], max(1, limit // 2 - 1)
        bounds = [
            bisect.bisect_left(self._steps, first + (last - first) * at / buckets)
            for at in range(buckets)
        ]
        return [(self._steps[index], self._values[index]) for index in self._extremes(bounds)]

    def _extremes(self, begins: collections.abc.Sequence[int]) -> list[int]:
        """Return the indices of the first and the last value, and of the extremes of each range."""
        count = len(self._steps)
        kept = {0, count - 1}
        for begin, end in zip(begins, [*begins[1:], count], strict=True):
            if values := self._values[begin:end]:
                kept |= {begin + values.index(min(values)), begin + values.index(max(values))}
        return sorted(kept)


@dataclasses.dataclass
class Metrics:
    """The content of a metrics.jsonl up to where it was read; of a brief look, that of its end."""

    series: dict[str, Series] = dataclasses.field(default_factory=dict[str, Series])
    start: reading.Json = dataclasses.field(
        default_factory=reading.Json
    )  # the last attempt's first record
    checkpoint: reading.Json = dataclasses.field(default_factory=reading.Json)  # the last one
    noted: reading.Json = dataclasses.field(
        default_factory=reading.Json
    )  # a script's lowest loss up to the last line
    slowest: reading.Json = dataclasses.field(
        default_factory=reading.Json
    )  # rank, host, times the ranks' median
    step: int | None = None
    total_steps: int | None = None
    time: float | None = None  # of the last step
    num_records: int = 0
    bad_lines: int = 0
    recent: collections.deque[Point] = dataclasses.field(
        default_factory=lambda: collections.deque[Point](maxlen=_RECENT)
    )  # time and step of the last records

    def last(self, name: str) -> float | None:
        """Return the last finite value of a quantity."""
        return self.series[name].last if name in self.series else None

    def points(self, name: str, limit: int) -> list[Point]:
        """Return at most about `limit` points of a quantity; none if it was not measured."""
        return self.series[name].points(limit) if name in self.series else []

    @property
    def lost_step(self) -> float | None:
        """The step from which on the loss is not finite; None if it is."""
        return self.series["loss"].lost if "loss" in self.series else None

    @property
    def straggler(self) -> str:
        """The rank that holds the others up, in words; "" if none does."""
        times = reading.real(self.slowest.get("times")) or 0.0
        if times <= TOO_SLOW:
            return ""
        rank, host = (
            reading.whole(self.slowest.get("rank")),
            reading.printable(str(self.slowest.get("host")), 64),
        )
        return f"rank {rank} on {host} takes {times:.3g} times the ranks' median for its data and forward pass"

    @property
    def best(self) -> Point | None:
        """Step and value of the lowest validation loss."""
        return self.lowest("val_loss")

    def lowest(self, name: str) -> Point | None:
        """Return step and value of a loss's lowest point, as noted in the last line if only the file's end was read."""
        points, noted = self.points(name, MAX_POINTS), reading.as_list(self.noted.get(name))
        step, value = (reading.real(one) for one in (*noted, None, None)[:2])
        if (
            step is not None
            and value is not None
            and abs(step) < _LARGEST_STEP
            and -_LARGEST < value < _LARGEST
        ):
            points.append((step, value))
        return min(points, key=lambda point: point[1], default=None)

    @property
    def steps_per_second(self) -> float | None:
        """The rate of the last steps, with evaluations and checkpoints."""
        (began, first), (ended, last) = (
            (self.recent[0], self.recent[-1]) if self.recent else ((0, 0), (0, 0))
        )
        return (last - first) / (ended - began) if ended > began and last > first else None

    def add(self, record: reading.Json) -> None:
        """Add a line of the file."""
        step = reading.real(record.get("step"))
        if step is None or not abs(step) < _LARGEST_STEP:
            self.bad_lines += 1
        elif (kind := record.get("kind")) == "checkpoint":
            self.checkpoint = record
        elif kind == "start":
            self.slowest, self.start = {}, record
            self.total_steps = reading.whole(record.get("total_steps")) or self.total_steps
        else:
            self.noted = reading.as_object(record.get("best")) or self.noted
            self._add_values(step, record)
            if kind != "eval":
                self._add_step(step, record)

    def _add_values(self, step: float, record: reading.Json) -> None:
        is_curve = False
        for name, found in record.items():
            value = reading.real(found)
            if value is None or name in _NOT_CURVES:
                continue
            if name not in self.series and len(self.series) < MAX_SERIES:
                self.series[name] = Series()
            if name in self.series:
                self.series[name].add(step, value)
                is_curve = True
        self.num_records += is_curve

    def _add_step(self, step: float, record: reading.Json) -> None:
        self.slowest = reading.as_object(record.get("slowest")) or self.slowest
        self.step, self.time = reading.whole(step), reading.real(record.get("time"))
        self.total_steps = reading.whole(record.get("total_steps")) or self.total_steps
        if self.time is not None and 0 < self.time < _LARGEST:
            if self.recent and self.recent[-1][1] > step:
                self.recent.clear()
            if not self.recent or self.recent[-1][1] < step:  # a step may have several lines
                self.recent.append((self.time, step))


class Reader:
    """Reads a metrics.jsonl; each `read` takes only what was appended since the last one."""

    def __init__(self, path: pathlib.Path, *, tail_bytes: int | None = None) -> None:
        self.path = path
        self._tail_bytes = tail_bytes  # begin that much before the end
        self._file: tuple[int, int] | None = None  # device and inode
        self._offset = 0
        self._metrics = Metrics()
        self._is_skipping = False  # within a line that is too long to be a record

    def read(self) -> Metrics:
        """Read what was appended. A file that was replaced is read again.

        A last line without a newline counts once it is a whole object; until then it is read again.
        """
        with contextlib.suppress(OSError), small_files.opened(self.path) as file:
            about = os.fstat(file.fileno())
            if self._file != (about.st_dev, about.st_ino) or about.st_size < self._offset:
                self._file, self._offset = (about.st_dev, about.st_ino), 0
                self._metrics, self._is_skipping = Metrics(), False
                if self._tail_bytes is not None and about.st_size > self._tail_bytes:
                    self._offset, self._is_skipping = about.st_size - self._tail_bytes, True
                    self._metrics.bad_lines = -1  # the line that is cut is not bad
            file.seek(self._offset)
            rest = b""
            while chunk := file.read(_CHUNK_BYTES):
                whole, newline, rest = (rest + chunk).rpartition(b"\n")
                if newline:
                    self._take(whole)
                    self._offset += len(whole) + 1
                elif len(rest) > 4 * _CHUNK_BYTES:
                    self._offset += len(rest)
                    self._is_skipping, rest = True, b""
            if (
                not self._is_skipping
                and rest.rstrip().endswith(b"}")
                and _parse(rest.decode(errors="replace"))
            ):
                self._take(rest)
                self._offset += len(rest)
        return self._metrics

    def _take(self, data: bytes) -> None:
        if self._is_skipping:
            data = data.partition(b"\n")[2]
            self._metrics.bad_lines += 1
            self._is_skipping = False
        for line in data.decode(errors="replace").split("\n"):
            if line and not line.isspace():
                self._metrics.add(_parse(line))


def _parse(line: str) -> reading.Json:
    """Return the object in a line; empty if there is none."""
    try:
        return reading.as_object(json.loads(line))
    except (ValueError, RecursionError):
        return {}
