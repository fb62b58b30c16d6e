"""Charts of runs: the coordinates of their curves in SVG, on a linear and on a logarithmic axis."""

import collections.abc
import dataclasses
import math

from ddp.report import curves, facts

WIDTH, HEIGHT = 640, 300
LEFT, RIGHT, TOP, BOTTOM = 62, 26, 12, 34
_ALL_POINTS = 60_000  # of a page; a point takes some 40 bytes
_MIN_POINTS, _MAX_POINTS = 100, 1000  # of a curve
_MAX_DOTS = 60  # more would hide the line
_SMOOTH_FROM = 100  # points
_MAX_OTHERS = 8  # charts of quantities that the payload does not write

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
_LEAST_RANGE = 1e-290  # parts of a smaller range are equal as floats


@dataclasses.dataclass(frozen=True)
class Tick:
    """A line of the grid and its text."""

    at: float  # pixels
    text: str


@dataclasses.dataclass(frozen=True)
class Curve:
    """One quantity of one run."""

    run: int
    name: str
    label: str
    points: tuple[curves.Point, ...]
    linear: str  # the `d` of an SVG path
    log: str
    smooth_linear: str
    smooth_log: str
    dots_linear: tuple[tuple[float, float], ...]
    dots_log: tuple[tuple[float, float], ...]
    lost_at: float | None  # pixels from the left at which the value stops being finite
    lost_step: float | None

    @property
    def is_eval(self) -> bool:
        """Whether this is the evaluation loss."""
        return self.name == "val_loss"


@dataclasses.dataclass(frozen=True)
class Axis:
    """The mapping of values to pixels."""

    low: float
    high: float
    is_log: bool
    begin: float  # pixels
    end: float

    def at(self, value: float) -> float:
        """Map a value to its pixel."""
        low, high = self.low, self.high
        if self.is_log:
            value, low, high = math.log10(value), math.log10(low), math.log10(high)
        return self.begin + (value - low) / (high - low) * (self.end - self.begin)


@dataclasses.dataclass(frozen=True)
class Chart:
    """A picture with a curve of each run."""

    number: int
    title: str
    unit: str
    x: Axis
    y: Axis
    y_log: Axis | None  # None if a value is not above 0
    curves: tuple[Curve, ...]

    @property
    def has_several(self) -> bool:
        """Whether it shows more than one quantity."""
        return len({curve.name for curve in self.curves}) > 1

    @property
    def x_ticks(self) -> tuple[Tick, ...]:
        """The steps below the picture."""
        return _ticks(self.x, whole=True)

    @property
    def y_ticks(self) -> tuple[Tick, ...]:
        """The values beside it."""
        return _ticks(self.y)

    @property
    def log_ticks(self) -> tuple[Tick, ...]:
        """The values beside it on the logarithmic axis."""
        return _ticks(self.y_log) if self.y_log else ()


def make(runs: collections.abc.Sequence[facts.RunFacts]) -> list[Chart]:
    """Make a chart of each quantity that any of the runs measured."""
    known = {name for _, _, names in _KNOWN for name in names}
    others = list(dict.fromkeys(name for run in runs for name in run.series if name not in known))[:_MAX_OTHERS]
    wanted = [*_KNOWN, *((name, "", (name,)) for name in others)]
    count = sum(len(run.series) for run in runs)
    limit = max(_MIN_POINTS, min(_MAX_POINTS, _ALL_POINTS // max(1, count)))
    charts: list[Chart] = []
    for title, unit, names in wanted:
        found = [
            (index, name, run.series[name])
            for index, run in enumerate(runs)
            for name in names
            if name in run.series and (len(run.series[name]) or run.series[name].lost is not None)
        ]
        if found:
            charts.append(_chart(len(charts), title, unit, found, limit))
    return charts


def number_text(value: float) -> str:
    """Format a number for an axis: 12k, 3.5M, 0.002, 1e-09."""
    for unit, name in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if (1e4 if name == "k" else unit) <= abs(value) < 1e15:
            return f"{value / unit:.4g}{name}"
    return f"{value:.4g}"


def _chart(number: int, title: str, unit: str, found: list[tuple[int, str, curves.Series]], limit: int) -> Chart:
    sampled = [(index, name, series, series.points(limit)) for index, name, series in found]
    steps = [step for *_, points in sampled for step, _ in points]
    steps += [series.lost for _, _, series, _ in sampled if series.lost is not None]
    values = [value for *_, points in sampled for _, value in points] or [0.0]
    x = Axis(*_span(min(steps), max(steps), 0.5), False, LEFT, WIDTH - RIGHT)
    low, high = min(values), max(values)
    y = Axis(*_padded(low, high), False, HEIGHT - BOTTOM, TOP)
    y_log = Axis(*_log_span(low, high), True, HEIGHT - BOTTOM, TOP) if low > 0 else None
    return Chart(number, title, unit, x, y, y_log, tuple(_curve((x, y, y_log), *one) for one in sampled))


def _curve(
    axes: tuple[Axis, Axis, Axis | None], run: int, name: str, series: curves.Series, points: list[curves.Point]
) -> Curve:
    x, y, y_log = axes
    is_eval = name == "val_loss"
    smooth: list[curves.Point] = []
    if len(points) >= _SMOOTH_FROM and not is_eval:
        smooth = curves.smoothed(points, len(points) // 40)
        smooth = smooth[:: max(1, len(smooth) // 250)] + smooth[-1:]
    dotted = points if len(points) == 1 or (is_eval and len(points) <= _MAX_DOTS) else []
    return Curve(
        run=run,
        name=name,
        label=_LABELS.get(name, name),
        points=tuple(points),
        linear=_path(x, y, points),
        log=_path(x, y_log, points) if y_log else "",
        smooth_linear=_path(x, y, smooth),
        smooth_log=_path(x, y_log, smooth) if y_log else "",
        dots_linear=_dots(x, y, dotted),
        dots_log=_dots(x, y_log, dotted) if y_log else (),
        lost_at=None if series.lost is None else round(x.at(series.lost), 1),
        lost_step=series.lost,
    )


def _path(x: Axis, y: Axis, points: collections.abc.Sequence[curves.Point]) -> str:
    pairs = (f"{x.at(step):.1f} {y.at(value):.1f}" for step, value in points)
    text = "L".join(pairs)
    return f"M{text}" if text else ""


def _dots(x: Axis, y: Axis, points: collections.abc.Sequence[curves.Point]) -> tuple[tuple[float, float], ...]:
    return tuple((round(x.at(step), 1), round(y.at(value), 1)) for step, value in points)


def _span(low: float, high: float, least: float) -> tuple[float, float]:
    """Widen an empty range; around huge numbers `least` would be lost in rounding."""
    if high - low > _LEAST_RANGE:
        return low, high
    half = max(least, abs(low) * 1e-3)
    return low - half, high + half


def _padded(low: float, high: float) -> tuple[float, float]:
    low, high = _span(low, high, abs(low) * 0.05 or 1.0)
    margin = (high - low) * 0.04
    return low if low == 0 else low - margin, high + margin


def _log_span(low: float, high: float) -> tuple[float, float]:
    """Widen a range so that it holds a tick."""
    low, high = max(low * 0.95, 1e-307), high * 1.05
    return (low, high) if high / low >= 1.2 else (low / 1.2, high * 1.2)


def _ticks(axis: Axis, *, whole: bool = False) -> tuple[Tick, ...]:
    values = _log_values(axis.low, axis.high) if axis.is_log else _linear_values(axis.low, axis.high, whole=whole)
    texts = [number_text(value) for value in values]
    if len(set(texts)) < len(texts):  # they differ in later digits only
        texts = [f"{value:.10g}" for value in values]
    return tuple(Tick(round(axis.at(value), 1), text) for value, text in zip(values, texts, strict=True))


def _linear_values(low: float, high: float, *, whole: bool) -> list[float]:
    width = (high - low) / 5
    scale = 10.0 ** math.floor(math.log10(width))
    width = next(scale * part for part in (1, 2, 2.5, 5, 10) if scale * part >= width * 0.999)
    width = max(1.0, width) if whole else width
    first = math.ceil(low / width - 1e-9)
    count = min(12, int((high - first * width) / width + 1e-9) + 1)
    return [value if abs(value) > width * 1e-9 else 0.0 for value in ((first + i) * width for i in range(count))]


def _log_values(low: float, high: float) -> list[float]:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    parts = (1, 2, 5) if last - first <= 3 else (1,)
    every = max(1, -(-(last - first) // 8))
    found = [part * 10.0**power for power in range(max(first, -307), min(last, 308), every) for part in parts]
    inside = [value for value in found if low <= value <= high]
    return inside if len(inside) > 1 else _linear_values(low, high, whole=False)
