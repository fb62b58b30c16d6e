"""The report page: HTML that needs no other file."""

import collections.abc
import datetime
import pathlib

import jinja2

from ddp.run import untrusted
from ddp.run.model import UTC, Attempt, Run, text
from ddp.view import charts
from slurm_ddp.slurm import times

COLORS = 8  # in page.css; further runs repeat them, dashed
_HERE = pathlib.Path(__file__).parent
Row = tuple[str, list[str]]


def page(
    runs: collections.abc.Sequence[Run],
    *,
    made: datetime.datetime,
    logs: collections.abc.Sequence[list[str]] = (),
) -> str:
    """Render the page about these runs, side by side, with the last lines of their logs.

    `made` is the time on it. The runs' files may hold anything: its Content-Security-Policy keeps a
    browser from fetching anything and from running scripts.
    """
    settings = _rows([run.recipe for run in runs])
    settings.sort(key=_is_equal_in_all)  # what differs comes first
    return _template().render(
        runs=runs,
        logs=[*logs, *([] for _ in runs)],
        labels=[untrusted.printable(run.name, 120) for run in runs],
        charts=charts.make(runs),
        figures=_rows([_figures(run) for run in runs]),
        settings=settings,
        cluster=_rows([run.cluster for run in runs]),
        made=made,
        style=(_HERE / "page.css").read_text(encoding="utf-8"),
        size=charts,
        colors=COLORS,
    )


def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"clean": untrusted.printable, "when": _when, "lasted": _lasted}
    return environment.get_template("page.html.j2")


def _figures(run: Run) -> dict[str, str]:
    return {name: text(value) for name, value in run.figures.items()}


def _rows(columns: list[dict[str, str]]) -> list[Row]:
    """Make a row for each name that any run has: the name, and a cell for each run."""
    names: dict[str, None] = {}
    for column in columns:
        names |= dict.fromkeys(column)
    return [(name, [column.get(name, "-") for column in columns]) for name in names]


def _is_equal_in_all(row: Row) -> bool:
    return len(set(row[1])) == 1


def _when(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return datetime.datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")


def _lasted(attempt: Attempt) -> str:
    if not attempt.began or not attempt.ended:
        return "-"
    return times.format_time(max(0, int(attempt.ended - attempt.began)))
