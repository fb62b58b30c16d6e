"""Draw panels of Grafana dashboards as one SVG, with Prometheus' answers to their queries."""

import collections.abc
import dataclasses
import math
import pathlib
import re
import time
from typing import Any

import jinja2

from ddp.view import charts

WIDTH, HEADING, GAP = 1000, 40, 8
ROW = 22  # pixels per unit of panel height; a row is 24 units wide, as in Grafana
_UNITS = {
    "percentunit": (100, "%"),
    "s": (1, " s"),
    "h": (1, " h"),
}  # of Grafana; others are plain numbers
_TICKS = (5, 10, 30, 60, 120, 300, 600, 1800, 3600, 86400)  # seconds

Json = dict[str, Any]
Points = list[tuple[float, float]]


@dataclasses.dataclass(frozen=True)
class Period:
    """The time that the panels show, in Unix seconds."""

    begin: float
    end: float
    scrape_s: int

    @property
    def ticks(self) -> list[tuple[int, str]]:
        """Up to seven round times and their texts, in UTC."""
        step = next(step for step in _TICKS if self.end - self.begin <= 6 * step)
        form = "%H:%M" if step >= 60 else "%H:%M:%S"
        first = math.ceil(self.begin / step) * step
        times = range(first, int(self.end) + 1, step)
        return [(at, time.strftime(form, time.gmtime(at))) for at in times]


@dataclasses.dataclass(frozen=True)
class Panel:
    """A panel with data, and its place in the picture. Its axes start at its own corner."""

    suffix: str
    is_stat: bool
    place: tuple[int, int]
    size: tuple[int, int]
    chart: charts.Chart
    series: list[tuple[str, Points]]  # by legend


def expressions(
    board: Json, variables: collections.abc.Mapping[str, str], period: Period
) -> list[str]:
    """Return a dashboard's queries as Grafana sends them; variables default to "All"."""
    queries: list[str] = []
    for panel in board["panels"]:
        queries += [target["expr"] for target in panel["targets"]]
    text = "\n".join(queries)
    text = text.replace("$__rate_interval", f"{4 * period.scrape_s}s")
    text = text.replace("$__range", f"{round(period.end - period.begin)}s")

    def value(name: re.Match[str]) -> str:
        chosen = variables.get(name[1], ".*")
        return f'"{chosen}"'

    text = re.sub(r'"\$([a-z]\w+)"', value, text)
    return text.splitlines()


def draw(answered: collections.abc.Iterable[tuple[Json, list[list[Json]]]], period: Period) -> str:
    """Return the SVG of dashboards with the answers to `expressions`; "" without any data."""
    drawn: list[tuple[int, str, list[Panel]]] = []
    bottom = 0
    for board, answers in answered:
        found = list(_panels(board, answers, period, bottom + HEADING))
        if found:
            drawn.append((bottom, board["title"], found))
            bottom = found[-1].place[1] + found[-1].size[1] + GAP
    template = pathlib.Path(__file__).with_suffix(".svg.j2").read_text()
    values = {
        "boards": drawn,
        "width": WIDTH,
        "height": bottom,
        "period": period,
        "number": charts.number_text,
    }
    return (
        jinja2.Template(template, autoescape=True, trim_blocks=True).render(values) if drawn else ""
    )


def _panels(
    board: Json, answers: list[list[Json]], period: Period, y: int
) -> collections.abc.Iterator[Panel]:
    """Yield the panels that have data in rows of 24 units, the first row at `y`."""
    left = iter(answers)
    x = 0
    row = 0
    for panel in board["panels"]:
        series: list[tuple[str, Points]] = []
        scale, suffix = _UNITS.get(panel["fieldConfig"]["defaults"]["unit"], (1, ""))
        for target in panel["targets"]:
            series += _series(target["legendFormat"], next(left), scale)
        if not series:
            continue
        width = panel["gridPos"]["w"] * WIDTH // 24
        height = panel["gridPos"]["h"] * ROW
        if x and (x + width > WIDTH or height != row):
            x = 0
            y += row
        is_stat = panel["type"] == "stat"
        chart = _chart(panel["title"], series, period, (width, height), is_stat=is_stat)
        yield Panel(suffix, is_stat, (x + GAP // 2, y), (width - GAP, height - GAP), chart, series)
        x += width
        row = height


def _chart(
    title: str,
    series: list[tuple[str, Points]],
    period: Period,
    size: tuple[int, int],
    *,
    is_stat: bool,
) -> charts.Chart:
    width, height = size
    points = [point for _, points in series for point in points]
    if is_stat:
        across = charts.Axis(period.begin, period.end, 6, width - GAP - 6)
        up = _y_axis(points, height - 16, height - 28)
    else:
        across = charts.Axis(period.begin, period.end, 74, width - GAP - 32)
        up = _y_axis(points, height - 52, 32)
    return charts.Chart(title, across, up, [])


def _series(
    form: str, answers: list[Json], scale: float
) -> collections.abc.Iterator[tuple[str, Points]]:
    """Yield legend and finite points of each series that has any."""
    for answer in answers:
        labels: dict[str, str] = answer["metric"]
        points: Points = []
        for at, text in answer["values"]:
            value = float(text)
            if math.isfinite(value):
                points.append((at, scale * value))
        if points:
            yield _legend(form, labels), points


def _legend(form: str, labels: dict[str, str]) -> str:
    return re.sub(r"\{\{(\w+)\}\}", lambda name: labels.get(name[1], ""), form)


def _y_axis(points: Points, begin: int, end: int) -> charts.Axis:
    """Return an axis with room above and below the values, that does not go below 0 for them."""
    values = [value for _, value in points]
    low = min(values)
    high = max(values)
    margin = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    bottom = low - margin
    if low >= 0:
        bottom = max(0.0, bottom)
    return charts.Axis(bottom, high + margin, begin, end)
