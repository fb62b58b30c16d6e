"""A run's metrics.jsonl, read as it grows and kept within bounds.

A run of a million steps must fill neither memory nor a page, and a spike of one step must stay
visible. So a long curve is thinned: of each few neighbours the lowest and the highest value stay.
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
import typing

from ddp.node import small_files
from ddp.run import untrusted

MAX_POINTS = 1 << 16  # of one curve in memory; at least a quarter as many stay after thinning
MAX_SERIES = 24  # a run's own script may write any names
_GROUP = 8  # neighbours, two of them stay
_CHUNK_BYTES = 1 << 20
_LARGEST = 1e300  # the difference of two such values is still finite
_LEAST = 1e-200  # smaller magnitudes count as 0
_LARGEST_STEP = 2.0**53  # from there on a float does not hold every whole number
_NOT_CURVES = {"step", "epoch", "time", "tokens", "samples", "perplexity", "total_steps"}
TOO_SLOW = 1.5  # times the median, as in ddptrain/world/stragglers.py
_LONGEST_SITES = 20_000  # characters: hundreds of nodes
_RECENT = 64  # records that give the rate of steps

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
        """Append a point. A step that exists replaces all from it on: the run was resumed there."""
        if step <= self._latest:
            self._cut(step)
        self._latest = step
        if not -_LARGEST < value < _LARGEST:  # NaN too
            if self.lost is None:
                self.lost = step
            return

        self.lost = None
        self._steps.append(step)
        self._values.append(value if abs(value) >= _LEAST else 0.0)
        if len(self._steps) > self._max:
            self._thin()

    def _cut(self, step: float) -> None:
        """Remove all points from a step on."""
        keep = bisect.bisect_left(self._steps, step)
        del self._steps[keep:]
        del self._values[keep:]
        if self.lost is not None and self.lost >= step:
            self.lost = None

    def _thin(self) -> None:
        """Keep of each few neighbours the lowest and the highest value."""
        kept = self._extremes(range(0, len(self._steps), _GROUP))
        self._steps = array.array("d", [self._steps[index] for index in kept])
        self._values = array.array("d", [self._values[index] for index in kept])

    def points(self, limit: int = MAX_POINTS) -> list[Point]:
        """Return about `limit` points: first, last, and the extremes of equal ranges of steps."""
        count = len(self._steps)
        if count <= limit or count < 3:
            return list(zip(self._steps, self._values, strict=True))
        first = self._steps[0]
        last = self._steps[-1]
        num_ranges = max(1, limit // 2 - 1)
        begins: list[int] = []
        for at in range(num_ranges):
            step = first + (last - first) * at / num_ranges
            begins.append(bisect.bisect_left(self._steps, step))
        return [(self._steps[index], self._values[index]) for index in self._extremes(begins)]

    def _extremes(self, begins: collections.abc.Sequence[int]) -> list[int]:
        """Return the indices of the first and the last value, and of the extremes of each range."""
        count = len(self._steps)
        kept = {0, count - 1}
        for begin, end in zip(begins, [*begins[1:], count], strict=True):
            values = self._values[begin:end]
            if values:
                kept.add(begin + values.index(min(values)))
                kept.add(begin + values.index(max(values)))
        return sorted(kept)


@dataclasses.dataclass
class Metrics:
    """The records read so far; after a brief look only the last ones."""

    series: dict[str, Series] = dataclasses.field(default_factory=dict[str, Series])
    # The last attempt's first record, and the last record of a checkpoint
    start: untrusted.Json = dataclasses.field(default_factory=untrusted.Json)
    checkpoint: untrusted.Json = dataclasses.field(default_factory=untrusted.Json)
    # The lowest losses that a script noted in its last line
    noted: untrusted.Json = dataclasses.field(default_factory=untrusted.Json)
    # The slowest rank: rank, host, times the ranks' median
    slowest: untrusted.Json = dataclasses.field(default_factory=untrusted.Json)
    # The hosts of each site of a training over slow links, such as a,b c
    sites: str = ""
    step: int | None = None
    total_steps: int | None = None
    time: float | None = None  # of the last step
    is_counted: bool = False  # the steps are counted lines of the output
    num_records: int = 0
    bad_lines: int = 0
    # Time and step of the last records
    recent: collections.deque[Point] = dataclasses.field(
        default_factory=lambda: collections.deque[Point](maxlen=_RECENT)
    )

    def last(self, name: str) -> float | None:
        """Return the last finite value of a quantity."""
        return self.series[name].last if name in self.series else None

    def points(self, name: str, limit: int) -> list[Point]:
        """Return about `limit` points of a quantity; [] if it was not measured."""
        return self.series[name].points(limit) if name in self.series else []

    @property
    def lost_step(self) -> float | None:
        """The first step of a loss that is no longer finite, or None."""
        return self.series["loss"].lost if "loss" in self.series else None

    @property
    def straggler(self) -> str:
        """The rank that holds the others up, in words; "" if none does."""
        times = untrusted.real(self.slowest.get("times")) or 0.0
        if times <= TOO_SLOW:
            return ""
        rank = untrusted.whole(self.slowest.get("rank"))
        host = untrusted.printable(str(self.slowest.get("host")), 64)
        rate = f"{times:.3g} times the ranks' median"
        return f"rank {rank} on {host} takes {rate} for its data and forward pass"

    @property
    def site_of_hosts(self) -> dict[str, int]:
        """The site of each host; {} unless the run trains over slow links."""
        found: dict[str, int] = {}
        for number, hosts in enumerate(self.sites.split()):
            found |= dict.fromkeys(hosts.split(","), number)
        return found

    @property
    def sites_text(self) -> str:
        """The hosts of each site in words, or ""."""
        words: list[str] = []
        for number, hosts in enumerate(self.sites.split()):
            words.append(f"site {number}: {hosts.replace(',', ', ')}")
        return "; ".join(words)

    @property
    def best(self) -> Point | None:
        """Step and value of the lowest validation loss."""
        return self.lowest("val_loss")

    def lowest(self, name: str) -> Point | None:
        """Return step and value of a loss's lowest point.

        The file's last line notes it, in case only the file's end was read.
        """
        points = self.points(name, MAX_POINTS)
        noted = self._noted_point(name)
        if noted is not None:
            points.append(noted)
        return min(points, key=lambda point: point[1], default=None)

    def _noted_point(self, name: str) -> Point | None:
        noted = untrusted.as_list(self.noted.get(name))
        if len(noted) < 2:
            return None
        step = untrusted.real(noted[0])
        value = untrusted.real(noted[1])
        if step is None or value is None:
            return None
        is_finite = abs(step) < _LARGEST_STEP and -_LARGEST < value < _LARGEST
        return (step, value) if is_finite else None

    @property
    def steps_per_second(self) -> float | None:
        """The rate of the attempt's last steps, evaluations and checkpoints included."""
        if not self.recent:
            return None
        began, first = self.recent[0]
        ended, last = self.recent[-1]
        if ended <= began or last <= first:
            return None
        return (last - first) / (ended - began)

    def add(self, record: untrusted.Json) -> None:
        """Add a line of the file."""
        step = untrusted.real(record.get("step"))
        kind = record.get("kind")
        if step is None or not abs(step) < _LARGEST_STEP:
            self.bad_lines += 1
        elif kind == "checkpoint":
            self.checkpoint = record
        elif kind == "start":
            self.slowest = {}
            self.sites = _sites(record)
            self.recent.clear()  # the pause before an attempt belongs to no step
            self.start = record
            self.total_steps = untrusted.whole(record.get("total_steps")) or self.total_steps
        else:
            self.noted = untrusted.as_object(record.get("best")) or self.noted
            self._add_values(step, record)
            if kind != "eval":
                self._add_step(step, record)

    def _add_values(self, step: float, record: untrusted.Json) -> None:
        is_curve = False
        for name, found in record.items():
            value = untrusted.real(found)
            if value is None or name in _NOT_CURVES:
                continue
            if name not in self.series and len(self.series) < MAX_SERIES:
                self.series[name] = Series()
            if name in self.series:
                self.series[name].add(step, value)
                is_curve = True
        self.num_records += is_curve

    def _add_step(self, step: float, record: untrusted.Json) -> None:
        self.slowest = untrusted.as_object(record.get("slowest")) or self.slowest
        self.sites = _sites(record) or self.sites
        self.step = untrusted.whole(step)
        self.is_counted = record.get("counted") is True
        self.time = untrusted.real(record.get("time"))
        self.total_steps = untrusted.whole(record.get("total_steps")) or self.total_steps
        if self.time is None or not 0 < self.time < _LARGEST:
            return
        is_behind = bool(self.recent) and self.recent[-1][1] > step
        if is_behind or record.get("begins") is True:
            self.recent.clear()
        if not self.recent or self.recent[-1][1] < step:  # a step may have several lines
            self.recent.append((self.time, step))


class Reader:
    """Reads a metrics.jsonl; each `read` takes only the lines that are new."""

    def __init__(self, path: pathlib.Path, *, tail_bytes: int | None = None) -> None:
        self.path = path
        self._tail_bytes = tail_bytes  # begin that much before the end
        self._file: tuple[int, int] | None = None  # device and inode
        self._offset = 0
        self._metrics = Metrics()
        self._is_skipping = False  # within a line that is too long to be a record

    def read(self) -> Metrics:
        """Read the new lines. A file that was replaced is read again.

        A last line without a newline counts once it is a whole object; until then it is read again.
        """
        with contextlib.suppress(OSError), small_files.opened(self.path) as file:
            about = os.fstat(file.fileno())
            is_same_file = self._file == (about.st_dev, about.st_ino)
            if not is_same_file or about.st_size < self._offset:
                self._begin(about)
            file.seek(self._offset)
            rest = self._read_lines(file)
            self._read_last_line(rest)
        return self._metrics

    def _begin(self, about: os.stat_result) -> None:
        """Begin with a new file, at its beginning or that much before its end."""
        self._file = (about.st_dev, about.st_ino)
        self._offset = 0
        self._metrics = Metrics()
        self._is_skipping = False
        if self._tail_bytes is not None and about.st_size > self._tail_bytes:
            self._offset = about.st_size - self._tail_bytes
            self._is_skipping = True
            self._metrics.bad_lines = -1  # the line that is cut is not bad

    def _read_lines(self, file: typing.BinaryIO) -> bytes:
        """Read the whole lines up to the file's end, and return the rest behind them."""
        rest = b""
        while chunk := file.read(_CHUNK_BYTES):
            whole, newline, rest = (rest + chunk).rpartition(b"\n")
            if newline:
                self._take(whole)
                self._offset += len(whole) + 1
            elif len(rest) > 4 * _CHUNK_BYTES:
                self._offset += len(rest)
                self._is_skipping = True
                rest = b""
        return rest

    def _read_last_line(self, rest: bytes) -> None:
        if self._is_skipping or not rest.rstrip().endswith(b"}"):
            return
        if _parse(rest.decode(errors="replace")):
            self._take(rest)
            self._offset += len(rest)

    def _take(self, data: bytes) -> None:
        if self._is_skipping:
            data = data.partition(b"\n")[2]
            self._metrics.bad_lines += 1
            self._is_skipping = False
        for line in data.decode(errors="replace").split("\n"):
            if line and not line.isspace():
                self._metrics.add(_parse(line))


def _sites(record: untrusted.Json) -> str:
    found = record.get("sites")
    return untrusted.printable(found, _LONGEST_SITES) if isinstance(found, str) else ""


def _parse(line: str) -> untrusted.Json:
    """Return the object in a line, or {}."""
    try:
        return untrusted.as_object(json.loads(line))
    except (ValueError, RecursionError):
        return {}
