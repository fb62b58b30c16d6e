"""Charts of runs: the coordinates of their curves in SVG."""

import collections.abc
import dataclasses
import math

from ddp.run.metrics import Point
from ddp.run.model import Run

WIDTH, HEIGHT = 640, 300
LEFT, RIGHT, TOP, BOTTOM = 62, 26, 12, 34
_ALL_POINTS, _MIN_POINTS, _MAX_POINTS = (
    60_000,
    100,
    1000,
)  # of a page, of a curve; a point takes some 20 bytes
_LEAST_RANGE = 1e-290  # parts of a smaller range are equal as floats
_FIRST = (
    "loss",
    "val_loss",
    "tokens_per_second",
    "samples_per_second",
    "lr",
)  # the order of the charts


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
        return round(
            self.begin + (value - self.low) / (self.high - self.low) * (self.end - self.begin), 1
        )

    @property
    def ticks(self) -> list[tuple[float, str]]:
        """The pixels and texts of the grid's lines."""
        width = (self.high - self.low) / 5
        scale = 10.0 ** math.floor(math.log10(width))
        width = next(scale * part for part in (1, 2, 2.5, 5, 10) if scale * part >= width * 0.999)
        width = max(self.least_tick, width)
        first = math.ceil(self.low / width - 1e-9)
        count = min(12, int((self.high - first * width) / width + 1e-9) + 1)
        values = [
            value if abs(value) > width * 1e-9 else 0.0
            for value in ((first + i) * width for i in range(count))
        ]
        texts = [number_text(value) for value in values]
        if len(set(texts)) < len(texts):  # they differ in later digits only
            texts = [f"{value:.10g}" for value in values]
        return [(self.at(value), text) for value, text in zip(values, texts, strict=True)]


@dataclasses.dataclass(frozen=True)
class Curve:
    """One quantity of one run."""

    run: int
    name: str
    points: list[Point]
    lost_step: float | None  # from which on the value is not finite


@dataclasses.dataclass(frozen=True)
class Chart:
    """A picture with a curve of each run."""

    title: str
    x: Axis
    y: Axis
    curves: list[Curve]

    def path(self, points: collections.abc.Sequence[Point]) -> str:
        """Return the `d` of an SVG path; that of a single point is a line without length."""
        pairs = [f"{self.x.at(step):.1f} {self.y.at(value):.1f}" for step, value in points]
        return f"M{'L'.join(pairs if len(pairs) > 1 else pairs * 2)}" if pairs else ""


def make(runs: collections.abc.Sequence[Run]) -> list[Chart]:
    """Make a chart of each quantity that any of the runs measured; both losses share one."""
    count = max(1, sum(len(run.metrics.series) for run in runs))
    limit = max(_MIN_POINTS, min(_MAX_POINTS, _ALL_POINTS // count))
    found: dict[str, list[Curve]] = {}
    for name in dict.fromkeys((*_FIRST, *(name for run in runs for name in run.metrics.series))):
        for at, run in enumerate(runs):
            series = run.metrics.series.get(name)
            if series is not None and (len(series) or series.lost is not None):
                title = "loss" if name == "val_loss" else name
                found.setdefault(title, []).append(
                    Curve(at, name, series.points(limit), series.lost)
                )
    return [_chart(title, curves) for title, curves in found.items()]


def number_text(value: float) -> str:
    """Format a number for an axis: 12k, 3.5M, 0.002, 1e-09."""
    for unit, name in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if (1e4 if name == "k" else unit) <= abs(value) < 1e15:
            return f"{value / unit:.4g}{name}"
    return f"{value:.4g}"


def _chart(title: str, curves: list[Curve]) -> Chart:
    steps = [step for curve in curves for step, _ in curve.points]
    steps += [curve.lost_step for curve in curves if curve.lost_step is not None]
    values = [value for curve in curves for _, value in curve.points] or [0.0]
    low, high = min(values), max(values)
    bottom, top = _span(low, high, abs(low) * 0.05 or 1.0)
    margin = (top - bottom) * 0.04
    y = Axis(bottom if bottom == 0 else bottom - margin, top + margin, HEIGHT - BOTTOM, TOP)
    x = Axis(*_span(min(steps), max(steps), 0.5), LEFT, WIDTH - RIGHT, least_tick=1.0)
    return Chart(title, x, y, curves)


def _span(low: float, high: float, least: float) -> tuple[float, float]:
    """Widen an empty range; around huge numbers `least` would be lost in rounding."""
    if high - low > _LEAST_RANGE:
        return low, high
    half = max(least, abs(low) * 1e-3)
    return low - half, high + half
