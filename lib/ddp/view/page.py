"""The report: one self-contained page of HTML."""

import base64
import collections
import collections.abc
import dataclasses
import datetime
import functools
import hashlib
import json
import pathlib

import jinja2

from ddp.actions.compare import FIGURES
from ddp.run import reading
from ddp.run.model import UTC, Attempt, Run, text
from ddp.view import charts

COLORS = 8  # in page.css; further runs repeat them, dashed
_BETTER = {**FIGURES, "val_loss": -1}
_HERE = pathlib.Path(__file__).parent
_DIGITS = 6  # of the values that the pointer shows


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of a table with a column for each run."""

    name: str
    cells: tuple[str, ...]
    differs: bool
    best: tuple[bool, ...] = ()


def page(
    runs: collections.abc.Sequence[Run], *, made: datetime.datetime, logs: collections.abc.Sequence[list[str]] = ()
) -> str:
    """Render the page about these runs, side by side, with the last lines of their logs; `made` is the time on it.

    Its Content-Security-Policy keeps a browser from fetching anything and from running any script but page.js,
    whatever the runs' files hold.
    """
    counts = collections.Counter(run.name for run in runs)
    labels = [reading.printable(run.name if counts[run.name] == 1 else run.folder, 120) for run in runs]
    drawn = charts.make(runs)
    script = (_HERE / "page.js").read_text(encoding="utf-8")
    return _template().render(
        runs=runs,
        logs=[*logs, *([] for _ in runs)],
        labels=labels,
        charts=drawn,
        data=_data(labels, drawn),
        figures=_figures(runs),
        settings=_rows([run.settings for run in runs]),
        cluster=_rows([run.cluster for run in runs]),
        made=made,
        style=(_HERE / "page.css").read_text(encoding="utf-8"),
        script=script,
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        size=charts,
        colors=COLORS,
    )


@functools.cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"clean": _clean, "when": _when, "lasted": _lasted}
    return environment.get_template("page.html.j2")


def _data(labels: list[str], drawn: list[charts.Chart]) -> str:
    """Dump the data of page.js as JSON that cannot end a script element (HTML, 4.12.1.3)."""
    record = {
        "runs": labels,
        "charts": [
            {
                "x": [chart.x.low, chart.x.high],
                "curves": [
                    {
                        "run": curve.run,
                        "label": curve.label,
                        "steps": [_short(step) for step, _ in curve.points],
                        "values": [_short(value) for _, value in curve.points],
                    }
                    for curve in chart.curves
                ],
            }
            for chart in drawn
        ],
    }
    dumped = json.dumps(record, separators=(",", ":"), allow_nan=False)  # ASCII only
    return dumped.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _short(value: float) -> float | int:
    value = float(f"{value:.{_DIGITS}g}") if not value.is_integer() else value
    return int(value) if value.is_integer() and abs(value) < 2**53 else value


def _rows(columns: list[dict[str, str]]) -> list[Row]:
    """Make a row for each name that any run has; rows in which the runs differ come first."""
    rows: list[Row] = []
    for name in dict.fromkeys(name for column in columns for name in column):
        cells = tuple(column.get(name, "-") for column in columns)
        rows.append(Row(name, cells, len(set(cells)) > 1))
    return sorted(rows, key=lambda row: not row.differs)


def _figures(runs: collections.abc.Sequence[Run]) -> list[Row]:
    rows: list[Row] = []
    for name in dict.fromkeys(name for run in runs for name in run.figures):
        numbers = [run.figure(name) for run in runs]
        known = {number for number in numbers if number is not None}
        sign = _BETTER.get(name)
        best = (max(known) if sign > 0 else min(known)) if sign and len(known) > 1 else None
        cells = tuple(_figure(name, run.figures.get(name)) for run in runs)
        rows.append(Row(name, cells, False, tuple(best is not None and number == best for number in numbers)))
    return rows


def _figure(name: str, value: object) -> str:
    if value is None:
        return "-"
    if name.endswith("_s") and isinstance(value, float) and 60 <= value < 1e300:
        return f"{text(value)} ({_duration(value)})"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}".replace(",", "\N{NARROW NO-BREAK SPACE}") if abs(value) < 10**30 else "inf"
    return text(value)


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, hours = int(seconds // 60) % 60, int(seconds // 3600)
    return f"{hours}h {minutes:02d}m {int(seconds % 60):02d}s" if hours else f"{minutes}m {int(seconds % 60):02d}s"


def _clean(value: object, limit: int = 500) -> str:
    """Make a run's text safe to show in one line."""
    return reading.printable(value, limit)


def _when(moment: datetime.datetime | None) -> str:
    return "-" if moment is None else moment.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S")


def _lasted(attempt: Attempt) -> str:
    if attempt.began is None or attempt.ended is None or attempt.ended < attempt.began:
        return "-"
    return _duration((attempt.ended - attempt.began).total_seconds())
