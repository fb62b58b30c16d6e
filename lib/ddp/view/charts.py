"""Charts of runs: the axes and curves in pixels, for SVG."""

import collections.abc
import dataclasses
import math

from ddp.run.metrics import Point
from ddp.run.model import Run

WIDTH, HEIGHT = 640, 300
LEFT, RIGHT, TOP, BOTTOM = 62, 26, 12, 34
_PAGE_POINTS = 60_000  # a point takes some 20 bytes
_MIN_POINTS, _MAX_POINTS = 100, 1000  # of a curve
_LEAST_RANGE = 1e-290  # parts of a smaller range are equal as floats
# These charts come first, in this order
_FIRST = ("loss", "val_loss", "tokens_per_second", "samples_per_second", "lr")
# Least magnitude of a unit, the unit, its letter
_UNITS = ((1e12, 1e12, "T"), (1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k"))


@dataclasses.dataclass(frozen=True)
class Axis:
    """The mapping of values to pixels."""

    low: float
    high: float
    begin: float  # pixels
    end: float
    least_tick: float = 0.0  # between two lines of the grid

    def at(self, value: float) -> float:
        """Map a value to its pixel."""
        part = (value - self.low) / (self.high - self.low)
        return round(self.begin + part * (self.end - self.begin), 1)

    @property
    def ticks(self) -> list[tuple[float, str]]:
        """The pixels and texts of the grid's lines."""
        width = self._tick_width()
        first = math.ceil(self.low / width - 1e-9)
        count = int((self.high - first * width) / width + 1e-9) + 1
        values: list[float] = []
        for number in range(min(12, count)):
            value = (first + number) * width
            is_zero = abs(value) <= width * 1e-9
            values.append(0.0 if is_zero else value)

        texts = [number_text(value) for value in values]
        if len(set(texts)) < len(texts):  # they differ in later digits only
            texts = [f"{value:.10g}" for value in values]
        return [(self.at(value), text) for value, text in zip(values, texts, strict=True)]

    def _tick_width(self) -> float:
        """Return the distance of two lines: a round number that is about a fifth of the range."""
        fifth = (self.high - self.low) / 5
        scale = 10.0 ** math.floor(math.log10(fifth))
        round_widths = [scale * part for part in (1, 2, 2.5, 5, 10)]
        width = next(width for width in round_widths if width >= fifth * 0.999)
        return max(self.least_tick, width)


@dataclasses.dataclass(frozen=True)
class Curve:
    """One quantity of one run."""

    run: int
    name: str
    points: list[Point]
    lost_step: float | None  # the first whose value is no longer finite


@dataclasses.dataclass(frozen=True)
class Chart:
    """A picture with a curve of each run."""

    title: str
    x: Axis
    y: Axis
    curves: list[Curve]

    def path(self, points: collections.abc.Sequence[Point]) -> str:
        """Return the `d` of an SVG path; a single point becomes a line without length."""
        pairs = [f"{self.x.at(step):.1f} {self.y.at(value):.1f}" for step, value in points]
        if not pairs:
            return ""
        if len(pairs) == 1:
            pairs *= 2
        return "M" + "L".join(pairs)


def make(runs: collections.abc.Sequence[Run]) -> list[Chart]:
    """Make a chart of each quantity that any of the runs measured; both losses share one."""
    names: list[str] = [*_FIRST]
    num_curves = 0
    for run in runs:
        names.extend(run.metrics.series)
        num_curves += len(run.metrics.series)
    limit = max(_MIN_POINTS, min(_MAX_POINTS, _PAGE_POINTS // max(1, num_curves)))

    found: dict[str, list[Curve]] = {}
    for name in dict.fromkeys(names):
        title = "loss" if name == "val_loss" else name
        curves = _curves(runs, name, limit)
        if curves:
            found.setdefault(title, []).extend(curves)
    return [_chart(title, curves) for title, curves in found.items()]


def _curves(runs: collections.abc.Sequence[Run], name: str, limit: int) -> list[Curve]:
    """Make the curves of a quantity, one of each run that measured it."""
    curves: list[Curve] = []
    for at, run in enumerate(runs):
        series = run.metrics.series.get(name)
        if series is not None and (len(series) or series.lost is not None):
            curves.append(Curve(at, name, series.points(limit), series.lost))
    return curves


def number_text(value: float) -> str:
    """Format a number for an axis: 12k, 3.5M, 0.002, 1e-09."""
    if abs(value) < 1e15:
        for least, unit, name in _UNITS:
            if abs(value) >= least:
                return f"{value / unit:.4g}{name}"
    return f"{value:.4g}"


def _chart(title: str, curves: list[Curve]) -> Chart:
    steps: list[float] = []
    values: list[float] = []
    for curve in curves:
        steps += [step for step, _ in curve.points]
        values += [value for _, value in curve.points]
        if curve.lost_step is not None:
            steps.append(curve.lost_step)

    low = min(values, default=0.0)
    high = max(values, default=0.0)
    bottom, top = _span(low, high, abs(low) * 0.05 or 1.0)
    margin = (top - bottom) * 0.04
    if bottom != 0:
        bottom -= margin
    y = Axis(bottom, top + margin, HEIGHT - BOTTOM, TOP)
    x = Axis(*_span(min(steps), max(steps), 0.5), LEFT, WIDTH - RIGHT, least_tick=1.0)
    return Chart(title, x, y, curves)


def _span(low: float, high: float, least: float) -> tuple[float, float]:
    """Widen an empty range; around huge numbers `least` would be lost in rounding."""
    if high - low > _LEAST_RANGE:
        return low, high
    half = max(least, abs(low) * 1e-3)
    return low - half, high + half
