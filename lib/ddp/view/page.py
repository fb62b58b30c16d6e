"""The report: one self-contained page of HTML."""

import collections.abc
import datetime
import pathlib

import jinja2

from ddp.run import reading
from ddp.run.model import UTC, Attempt, Run, text
from ddp.view import charts
from slurm_ddp.slurm import times

COLORS = 8  # in page.css; further runs repeat them, dashed
_HERE = pathlib.Path(__file__).parent


def page(
    runs: collections.abc.Sequence[Run],
    *,
    made: datetime.datetime,
    logs: collections.abc.Sequence[list[str]] = (),
) -> str:
    """Render the page about these runs, side by side, with the last lines of their logs; `made` is the time on it.

    Its Content-Security-Policy keeps a browser from fetching anything and from running any script, whatever the runs'
    files hold.
    """
    labels = [reading.printable(run.name, 120) for run in runs]
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE), autoescape=True, undefined=jinja2.StrictUndefined
    )
    environment.trim_blocks = environment.lstrip_blocks = True
    environment.filters |= {"clean": reading.printable, "when": _when, "lasted": _lasted}
    return environment.get_template("page.html.j2").render(
        runs=runs,
        logs=[*logs, *([] for _ in runs)],
        labels=labels,
        charts=charts.make(runs),
        figures=_rows([{name: text(value) for name, value in run.figures.items()} for run in runs]),
        settings=sorted(_rows([run.recipe for run in runs]), key=lambda row: len(set(row[1])) == 1),
        cluster=_rows([run.cluster for run in runs]),
        made=made,
        style=(_HERE / "page.css").read_text(encoding="utf-8"),
        size=charts,
        colors=COLORS,
    )


def _rows(columns: list[dict[str, str]]) -> list[tuple[str, list[str]]]:
    """Make a row of a name and a cell for each run, for each name that any of them has."""
    names = dict.fromkeys(name for column in columns for name in column)
    return [(name, [column.get(name, "-") for column in columns]) for name in names]


def _when(seconds: float | None) -> str:
    return (
        "-"
        if seconds is None
        else datetime.datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")
    )


def _lasted(attempt: Attempt) -> str:
    if not attempt.began or not attempt.ended:
        return "-"
    return times.format_time(max(0, int(attempt.ended - attempt.began)))
