"""The report: one self-contained page of HTML."""

import base64
import collections
import collections.abc
import dataclasses
import datetime
import functools
import hashlib
import json
import math
import pathlib
import typing

import jinja2

from ddp.report import charts, facts, files

COLORS = 8  # in page.css; further runs repeat them, dashed
# Of the final figures: whether more (1) or less (-1) is better.
_BETTER = {
    "last_loss": -1, "val_loss": -1, "best_loss": -1, "tokens_per_second": 1, "samples_per_second": 1, "mfu": 1,
    "elapsed_s": -1,
}  # fmt: skip
_HERE = pathlib.Path(__file__).parent
_DIGITS = 6  # of the values that the pointer shows


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of a table with a column for each run."""

    name: str
    cells: tuple[str, ...]
    differs: bool
    best: tuple[bool, ...] = ()


def page(runs: collections.abc.Sequence[facts.RunFacts], *, made: datetime.datetime) -> str:
    """Render the page about these runs, side by side; `made` is the time shown on it.

    Its Content-Security-Policy keeps a browser from fetching anything and from running any script but page.js,
    whatever the runs' files hold.
    """
    labels = _labels(runs)
    made_charts = charts.make(runs)
    script = (_HERE / "page.js").read_text(encoding="utf-8")
    return _template().render(
        runs=runs,
        labels=labels,
        charts=made_charts,
        data=_data(labels, made_charts),
        figures=_figures(runs),
        settings=_rows([run.settings for run in runs]),
        cluster=_rows([run.cluster for run in runs]),
        made=made,
        style=(_HERE / "page.css").read_text(encoding="utf-8"),
        script=script,
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        size=charts,
        color=lambda run: run % COLORS,  # pyright: ignore[reportUnknownLambdaType]
        dash=lambda run: run // COLORS % 3,  # pyright: ignore[reportUnknownLambdaType]
    )


@functools.cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    environment.filters |= {"clean": _clean, "when": _when, "lasted": _lasted}
    return environment.get_template("page.html.j2")


def _labels(runs: collections.abc.Sequence[facts.RunFacts]) -> list[str]:
    """Name the runs; those with the same name by their folders."""
    counts = collections.Counter(run.name for run in runs)
    return [files.printable(run.name if counts[run.name] == 1 else run.folder, 120) for run in runs]


def _data(labels: list[str], made: list[charts.Chart]) -> str:
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
            for chart in made
        ],
    }
    text = json.dumps(record, separators=(",", ":"), allow_nan=False)  # ASCII only
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _short(value: float) -> float | int:
    value = float(f"{value:.{_DIGITS}g}") if not value.is_integer() else value
    return int(value) if value.is_integer() and abs(value) < 2**53 else value


def _rows(columns: list[collections.abc.Mapping[str, str]]) -> list[Row]:
    """Make a row for each name that any run has; rows in which the runs differ come first."""
    names = list(dict.fromkeys(name for column in columns for name in column))
    rows: list[Row] = []
    for name in names:
        cells = tuple(column.get(name, "-") for column in columns)
        rows.append(Row(name, cells, len(set(cells)) > 1))
    return sorted(rows, key=lambda row: not row.differs)


def _figures(runs: collections.abc.Sequence[facts.RunFacts]) -> list[Row]:
    names = list(dict.fromkeys(name for run in runs for name in run.figures))
    rows: list[Row] = []
    for name in names:
        values = [run.figures.get(name) for run in runs]
        numbers = [float(value) for value in values if _is_number(value)]
        best: float | None = None
        if (sign := _BETTER.get(name)) and len(set(numbers)) > 1:
            best = max(numbers) if sign > 0 else min(numbers)
        cells = tuple("-" if value is None else _figure(name, value) for value in values)
        rows.append(Row(name, cells, False, tuple(best is not None and value == best for value in values)))
    return rows


def _is_number(value: object) -> typing.TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def _figure(name: str, value: object) -> str:
    if name.endswith("_s") and _is_number(value) and value >= 60:
        return f"{facts.shown(value)} ({_duration(value)})"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}".replace(",", "\N{NARROW NO-BREAK SPACE}") if abs(value) < 10**30 else facts.shown(math.inf)
    return facts.shown(value)


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, hours = int(seconds // 60) % 60, int(seconds // 3600)
    return f"{hours}h {minutes:02d}m {int(seconds % 60):02d}s" if hours else f"{minutes}m {int(seconds % 60):02d}s"


def _clean(value: object, limit: int = 500) -> str:
    """Make a run's text safe to show in one line."""
    return files.printable(value, limit)


def _when(moment: datetime.datetime | None) -> str:
    return "-" if moment is None else moment.astimezone(facts.UTC).strftime("%Y-%m-%d %H:%M:%S")


def _lasted(attempt: facts.Attempt) -> str:
    if attempt.began is None or attempt.ended is None or attempt.ended < attempt.began:
        return "-"
    return _duration((attempt.ended - attempt.began).total_seconds())
