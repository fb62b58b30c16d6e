"""The curves in a run's metrics.jsonl, read as the file grows and kept within bounds.

A run of a million steps must fill neither memory nor the page, and a spike of one step must stay visible. So a long
curve is thinned: of each few neighbours the lowest and the highest value stay.
"""

import array
import bisect
import collections
import collections.abc
import contextlib
import json
import math
import os
import pathlib

from ddp.report import files

NAME = "metrics.jsonl"
MAX_POINTS = 1 << 16  # of one curve in memory; at least a quarter as many stay after thinning
MAX_SERIES = 24  # a run's own script may write any names
_GROUP = 8  # neighbours of which two stay
_CHUNK_BYTES = 1 << 20
_LARGEST = 1e300  # the difference of two such values is still finite
_LEAST = 1e-200  # smaller magnitudes count as 0
_LARGEST_STEP = 2.0**53  # from there on a float does not hold every whole number
_NOT_CURVES = {"step", "epoch", "time", "tokens", "samples", "perplexity"}
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
            self._rewind(step)
        self._latest = step
        if not -_LARGEST < value < _LARGEST:  # NaN too
            self.lost = step if self.lost is None else self.lost
            return
        self.lost = None
        self._steps.append(step)
        self._values.append(value if value >= _LEAST or value <= -_LEAST else 0.0)
        if len(self._steps) > self._max:
            self._thin()

    def points(self, limit: int) -> list[Point]:
        """Return at most about `limit` points: first, last, and the extremes of equal ranges of steps."""
        count = len(self._steps)
        if count <= limit or count < 3:
            return list(zip(self._steps, self._values, strict=True))
        first, last = self._steps[0], self._steps[-1]
        buckets = max(1, limit // 2 - 1)
        kept = {0, count - 1}
        begin = 0
        for number in range(1, buckets + 1):
            bound = first + (last - first) * number / buckets
            end = count if number == buckets else bisect.bisect_left(self._steps, bound, begin)
            if end > begin:
                kept |= self._extremes(begin, end)
            begin = end
        return [(self._steps[index], self._values[index]) for index in sorted(kept)]

    def _rewind(self, step: float) -> None:
        while self._steps and self._steps[-1] >= step:
            self._steps.pop()
            self._values.pop()
        if self.lost is not None and self.lost >= step:
            self.lost = None

    def _thin(self) -> None:
        kept: set[int] = {0, len(self._steps) - 1}
        for begin in range(0, len(self._steps), _GROUP):
            kept |= self._extremes(begin, min(begin + _GROUP, len(self._steps)))
        order = sorted(kept)
        self._steps = array.array("d", [self._steps[index] for index in order])
        self._values = array.array("d", [self._values[index] for index in order])

    def _extremes(self, begin: int, end: int) -> set[int]:
        """Return the indices of the lowest and the highest value in a range."""
        values = self._values[begin:end]
        return {begin + values.index(min(values)), begin + values.index(max(values))}


class Metrics:
    """A run's metrics.jsonl; each `read` takes only what was appended since the last one."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        self._file: tuple[int, int] | None = None  # device and inode of what was read
        self._offset = 0
        self._clear()

    def _clear(self) -> None:
        self.series: dict[str, Series] = {}
        self._adders: dict[str, collections.abc.Callable[[float, float], None] | None] = dict.fromkeys(_NOT_CURVES)
        self.last: files.Json = {}  # the last record of a step
        self.bad_lines = 0
        self.recent: collections.deque[tuple[float, float]] = collections.deque(maxlen=_RECENT)  # time, step
        self._is_skipping = False  # within a line that is too long to be a record

    @property
    def steps_per_second(self) -> float | None:
        """The rate of the last steps, including evaluations and checkpoints; None if it is unknown."""
        if len(self.recent) < 2:
            return None
        (began, first), (ended, last) = self.recent[0], self.recent[-1]
        return (last - first) / (ended - began) if ended > began and last > first else None

    def read(self) -> bool:
        """Read what was appended and return whether there was anything. A file that was replaced is read anew.

        A last line without a newline counts once it is a whole object; until then it is read again.
        """
        with contextlib.suppress(OSError), files.opened(self.path) as file:
            about = os.fstat(file.fileno())
            if self._file != (about.st_dev, about.st_ino) or about.st_size < self._offset:
                self._file, self._offset = (about.st_dev, about.st_ino), 0
                self._clear()
            before = self._offset
            file.seek(self._offset)
            rest = b""
            while data := file.read(_CHUNK_BYTES):
                data = rest + data
                cut = data.rfind(b"\n") + 1
                self._take(data[:cut])
                self._offset += cut
                rest = data[cut:]
                if len(rest) > _CHUNK_BYTES:
                    self._offset += len(rest)
                    rest, self._is_skipping = b"", True
            if rest.rstrip().endswith(b"}") and not self._is_skipping and _parse(rest.decode(errors="replace")):
                self._take(rest)
                self._offset += len(rest)
            return self._offset != before
        return False

    def _take(self, data: bytes) -> None:
        if self._is_skipping and data:
            data = data.partition(b"\n")[2]
            self.bad_lines += 1
            self._is_skipping = False
        for line in data.decode(errors="replace").split("\n"):
            if not line or line.isspace():
                continue
            record = _parse(line)
            step = _real(record.get("step")) if record else None
            if record is None or step is None or not abs(step) < _LARGEST_STEP:
                self.bad_lines += 1
                continue
            self._add(step, record)

    def _add(self, step: float, record: files.Json) -> None:
        for name, found in record.items():
            if isinstance(found, float | int) and found is not True and found is not False:
                try:
                    add = self._adders[name]
                except KeyError:
                    add = self._new(name)
                if add is not None:
                    add(step, found if isinstance(found, float) else _real(found) or 0.0)
        if record.get("kind") == "eval":
            return
        self.last = record
        time = _real(record.get("time"))
        if time is not None and 0 < time < _LARGEST:
            if self.recent and self.recent[-1][1] >= step:
                self.recent.clear()
            self.recent.append((time, step))

    def _new(self, name: str) -> collections.abc.Callable[[float, float], None] | None:
        if len(self.series) >= MAX_SERIES:
            return None
        self.series[name] = series = Series()
        self._adders[name] = series.add
        return series.add


def smoothed(points: collections.abc.Sequence[Point], window: int) -> list[Point]:
    """Replace each value by the mean of the `window` values around it."""
    half = max(1, window) // 2
    out: list[Point] = []
    for index, (step, _) in enumerate(points):
        near = points[max(0, index - half) : index + half + 1]
        out.append((step, math.fsum(value / len(near) for _, value in near)))
    return out


def _parse(line: str) -> files.Json | None:
    try:
        record: object = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return files.as_object(record) or None


def _real(value: object) -> float | None:
    """Return a number as a float, infinite if it is too large; None for other values."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf
