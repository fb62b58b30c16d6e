"""Charts of runs: the coordinates of their curves in SVG, on a linear and on a logarithmic axis."""

import collections.abc
import dataclasses
import math

from ddp.run.metrics import Point, Series, smoothed
from ddp.run.model import Run

WIDTH, HEIGHT = 640, 300
LEFT, RIGHT, TOP, BOTTOM = 62, 26, 12, 34
_ALL_POINTS = 60_000  # of a page; a point takes some 40 bytes
_MIN_POINTS, _MAX_POINTS = 100, 1000  # of a curve
_MAX_DOTS = 60  # more would hide the line
_SMOOTH_FROM = 100  # points
_MAX_OTHERS = 8  # charts of quantities that the payload does not write
_LEAST_RANGE = 1e-290  # parts of a smaller range are equal as floats
# What the payload writes, in the order of the page: title, unit, the quantities in one chart.
_KNOWN: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("Loss", "cross-entropy (nats)", ("loss", "val_loss")),
    ("Throughput", "tokens/s", ("tokens_per_second",)),
    ("Throughput", "samples/s", ("samples_per_second",)),
    ("Learning rate", "", ("lr",)),
    ("Memory", "peak MiB of rank 0", ("memory_mib",)),
    ("GPU use", "% of rank 0's GPU", ("gpu_percent",)),
    ("Gradient norm", "", ("grad_norm",)),
)
_LABELS = {"val_loss": "evaluation", "loss": "training"}


@dataclasses.dataclass(frozen=True)
class Axis:
    """The mapping of values to pixels."""

    low: float
    high: float
    begin: float  # pixels
    end: float
    is_log: bool = False
    is_whole: bool = False  # its ticks are whole numbers

    def at(self, value: float) -> float:
        """Map a value to its pixel."""
        low, high = self.low, self.high
        if self.is_log:
            value, low, high = math.log10(value), math.log10(low), math.log10(high)
        return round(self.begin + (value - low) / (high - low) * (self.end - self.begin), 1)

    @property
    def ticks(self) -> list[tuple[float, str]]:
        """The pixels and texts of the grid's lines."""
        values = _log_ticks(self.low, self.high) if self.is_log else _ticks(self.low, self.high, is_whole=self.is_whole)
        texts = [number_text(value) for value in values]
        if len(set(texts)) < len(texts):  # they differ in later digits only
            texts = [f"{value:.10g}" for value in values]
        return [(self.at(value), text) for value, text in zip(values, texts, strict=True)]


@dataclasses.dataclass(frozen=True)
class Curve:
    """One quantity of one run."""

    run: int
    name: str
    points: tuple[Point, ...]
    smooth: tuple[Point, ...]
    lost_step: float | None  # from which on the value is not finite

    @property
    def label(self) -> str:
        """Its name in the legend."""
        return _LABELS.get(self.name, self.name)

    @property
    def is_eval(self) -> bool:
        """Whether this is the evaluation loss."""
        return self.name == "val_loss"

    @property
    def dots(self) -> tuple[Point, ...]:
        """The points that are marked."""
        return self.points if len(self.points) == 1 or (self.is_eval and len(self.points) <= _MAX_DOTS) else ()


@dataclasses.dataclass(frozen=True)
class Chart:
    """A picture with a curve of each run; `axes` are the vertical ones, without `log` if a value is not > 0."""

    number: int
    title: str
    unit: str
    x: Axis
    axes: dict[str, Axis]
    curves: tuple[Curve, ...]

    @property
    def has_several(self) -> bool:
        """Whether it shows more than one quantity."""
        return len({curve.name for curve in self.curves}) > 1

    def path(self, points: collections.abc.Iterable[Point], scale: str) -> str:
        """Return the `d` of an SVG path."""
        text = "L".join(f"{self.x.at(step):.1f} {self.axes[scale].at(value):.1f}" for step, value in points)
        return f"M{text}" if text else ""


def make(runs: collections.abc.Sequence[Run]) -> list[Chart]:
    """Make a chart of each quantity that any of the runs measured."""
    known = {name for *_, names in _KNOWN for name in names}
    others = dict.fromkeys(name for run in runs for name in run.metrics.series if name not in known)
    wanted = [*_KNOWN, *((name, "", (name,)) for name in list(others)[:_MAX_OTHERS])]
    limit = _ALL_POINTS // max(1, sum(len(run.metrics.series) for run in runs))
    limit = max(_MIN_POINTS, min(_MAX_POINTS, limit))
    charts: list[Chart] = []
    for title, unit, names in wanted:
        pairs = [(at, name, run.metrics.series.get(name)) for at, run in enumerate(runs) for name in names]
        found = [_curve(at, name, one, limit) for at, name, one in pairs if one and (len(one) or one.lost is not None)]
        if found:
            charts.append(_chart(len(charts), title, unit, tuple(found)))
    return charts


def number_text(value: float) -> str:
    """Format a number for an axis: 12k, 3.5M, 0.002, 1e-09."""
    for unit, name in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if (1e4 if name == "k" else unit) <= abs(value) < 1e15:
            return f"{value / unit:.4g}{name}"
    return f"{value:.4g}"


def _curve(run: int, name: str, series: Series, limit: int) -> Curve:
    points, smooth = series.points(limit), list[Point]()
    if len(points) >= _SMOOTH_FROM and name != "val_loss":
        smooth = smoothed(points, len(points) // 40)
        smooth = smooth[:: max(1, len(smooth) // 250)] + smooth[-1:]
    return Curve(run, name, tuple(points), tuple(smooth), series.lost)


def _chart(number: int, title: str, unit: str, curves: tuple[Curve, ...]) -> Chart:
    steps = [step for curve in curves for step, _ in curve.points]
    steps += [curve.lost_step for curve in curves if curve.lost_step is not None]
    values = [value for curve in curves for _, value in curve.points] or [0.0]
    low, high = min(values), max(values)
    bottom, top = _span(low, high, abs(low) * 0.05 or 1.0)
    margin = (top - bottom) * 0.04
    axes = {"linear": Axis(bottom if bottom == 0 else bottom - margin, top + margin, HEIGHT - BOTTOM, TOP)}
    if low > 0:
        bottom, top = max(low * 0.95, 1e-307), high * 1.05
        bottom, top = (bottom, top) if top / bottom >= 1.2 else (bottom / 1.2, top * 1.2)  # so that it holds a tick
        axes["log"] = Axis(bottom, top, HEIGHT - BOTTOM, TOP, is_log=True)
    x = Axis(*_span(min(steps), max(steps), 0.5), LEFT, WIDTH - RIGHT, is_whole=True)
    return Chart(number, title, unit, x, axes, curves)


def _span(low: float, high: float, least: float) -> tuple[float, float]:
    """Widen an empty range; around huge numbers `least` would be lost in rounding."""
    if high - low > _LEAST_RANGE:
        return low, high
    half = max(least, abs(low) * 1e-3)
    return low - half, high + half


def _ticks(low: float, high: float, *, is_whole: bool = False) -> list[float]:
    width = (high - low) / 5
    scale = 10.0 ** math.floor(math.log10(width))
    width = next(scale * part for part in (1, 2, 2.5, 5, 10) if scale * part >= width * 0.999)
    width = max(1.0, width) if is_whole else width
    first = math.ceil(low / width - 1e-9)
    count = min(12, int((high - first * width) / width + 1e-9) + 1)
    return [value if abs(value) > width * 1e-9 else 0.0 for value in ((first + i) * width for i in range(count))]


def _log_ticks(low: float, high: float) -> list[float]:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    parts = (1, 2, 5) if last - first <= 3 else (1,)
    every = max(1, -(-(last - first) // 8))
    found = [part * 10.0**power for power in range(max(first, -307), min(last, 308), every) for part in parts]
    inside = [value for value in found if low <= value <= high]
    return inside if len(inside) > 1 else _ticks(low, high)
