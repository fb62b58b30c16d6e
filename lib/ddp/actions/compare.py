"""compare-runs: in which settings runs differ, and their results side by side."""

import collections

from ddp.actions import list as listing
from ddp.base import Log, ParameterError, Results, Settings, TrainerError
from ddp.options import fields, models
from ddp.problem import Command
from ddp.run import catalog
from ddp.run.model import WITHOUT_LOSS, Run
from ddp.view.result import Result

# Of a summary, the most interesting first; 1: more is better, -1: less is.
FIGURES = {
    "last_loss": -1,
    "best_loss": -1,
    "first_loss": 0,
    "tokens_per_second": 1,
    "samples_per_second": 1,
    "mfu": 1,
    "steps": 0,
    "tokens": 0,
    "samples": 0,
    "elapsed_s": -1,
    "world_size": 0,
    "nodes": 0,
}
_MAX_OPTIONS = 10  # columns of a table


def compare_runs(settings: Settings, params: models.CompareRuns, _: Log) -> Result:
    """Compare runs; of a sweep each run is a line."""
    names = params.runs.replace(",", " ").split() if params.runs else _newest_two(settings)
    names = list(dict.fromkeys(catalog.name_of(settings, name)[0] for name in names))
    is_sweep = {name: catalog.read_record(settings, name).get("kind") == "sweep" for name in names}
    if not any(is_sweep.values()) and not 2 <= len(names) <= 8:
        raise ParameterError("runs", f"{len(names)} named; two to eight different ones, separated by commas")
    runs, silence = catalog.load(settings, names, is_brief=any(is_sweep.values()), parameter="runs")
    results = _lines(settings, runs) if any(is_sweep.values()) else _side_by_side(runs)
    found, shown = results
    best = catalog.best_of(found)
    if best is not None:
        shown |= {"best-run": best.name, "best-loss": catalog.cell(best.score)}
    values: dict[str, object] = {
        "runs": [listing.describe(run) | {"settings": run.settings, "figures": run.figures} for run in found],
        "best_run": best.name if best is not None else None,
    }
    return Result(shown | ({"slurm": silence} if silence else {}), values)


def _side_by_side(runs: list[Run]) -> tuple[list[Run], Results]:
    for run in runs:
        if what := WITHOUT_LOSS.get(run.kind):
            text = f"{run.name} is {what}, which has no loss to compare"
            raise ParameterError("runs", text, remedy=Command("show", arguments=(run.name,)))
    names, given = [run.name for run in runs], [run.settings for run in runs]
    keys = sorted({key for one in given for key in one})
    differing = [key for key in keys if len({one.get(key) for one in given}) > 1]
    header = ["", *names]
    rows = [[key, *(one.get(key, "-")[:60] for one in given)] for key in differing]
    results = [["state", *(str(run.state) for run in runs)], *figure_rows(runs)]
    shown: Results = {
        "runs": ", ".join(names),
        "settings": catalog.aligned([header, *rows]) if differing else "the same",
        "same-settings": str(len(keys) - len(differing)),
        "results": catalog.aligned([header, *results]),
    }
    if losses := _loss_rows(runs):
        shown["losses"] = catalog.aligned([["step", *names], *losses])
    curves = [run.curve_png for run in runs if run.curve_png]
    return runs, shown | ({"curves": "\n".join(curves)} if curves else {})


def _lines(settings: Settings, named: list[Run]) -> tuple[list[Run], Results]:
    """Show a line for each run of the sweeps and each other run: what differs, and its figures, the best marked."""
    runs = [one for run in named for one in (catalog.elements(settings, run) if run.kind == "sweep" else [run])]
    if len(runs) > fields.MAX_SWEEP:
        raise ParameterError("runs", f"{len(runs)} runs are named; at most {fields.MAX_SWEEP} are compared")
    varied = list(dict.fromkeys(key for run in runs for key in run.choice))
    given = [run.settings for run in runs]
    differing = [key for key in varied if len({one.get(key) for one in given}) > 1]
    others = sorted({key for one in given for key in one} - set(varied))
    differing += [key for key in others if len({one[key] for one in given if key in one}) > 1]
    columns = differing[:_MAX_OPTIONS]
    rows = [["RUN", "STATE", *(key.upper() for key in columns), "STEPS", "LOSS", "BEST", "PER-SECOND"]]
    best = catalog.best_of(runs)
    for run, one in zip(runs, given, strict=True):
        figures = [run.step, run.loss, run.best_loss, run.rate[0] if run.rate else None]
        cells = list(map(catalog.cell, figures))
        if run is best:
            cells[2 if run.best_loss is not None else 1] += " *"
        rows.append([run.name, str(run.state), *(one.get(key, "-")[:40] for key in columns), *cells])
    counts = collections.Counter(str(run.state) for run in runs)
    return runs, {
        "runs": ", ".join(run.name for run in runs),
        "results": catalog.aligned(rows),
        "differing": ", ".join(differing) or "nothing",
        "states": catalog.counted(counts),
        "state": catalog.whole(counts),
    }


def _newest_two(settings: Settings) -> list[str]:
    runs = catalog.load(settings, catalog.names(settings)[:100], is_brief=True)[0]
    names = [run.name for run in runs if run.summary and run.kind not in WITHOUT_LOSS]
    if len(names) < 2:
        text = f"{settings.runs} holds {len(names)} runs with results; two are needed to compare"
        raise TrainerError(text, remedy=catalog.START)
    return names[:2]


def figure_rows(runs: list[Run]) -> list[list[str]]:
    """Return a row for each figure that any of the runs has: the best is marked; of two runs with the ratio."""
    rows: list[list[str]] = []
    for key, sign in FIGURES.items():
        values = [run.summary.get(key) for run in runs]
        if not any(isinstance(value, int | float) for value in values):
            continue
        numbers = [run.figure(key) for run in runs]
        known = {number for number in numbers if number is not None}
        best = (max(known) if sign > 0 else min(known)) if sign and len(known) > 1 else None
        pairs = zip(values, numbers, strict=True)
        cells = [catalog.cell(value) + (" *" if best is not None and number == best else "") for value, number in pairs]
        if len(numbers) == 2 and sign and numbers[0] and numbers[1] is not None:
            cells[1] += f"  ({numbers[1] / numbers[0]:.3f}x)"
        rows.append([key.replace("_", "-"), *cells])
    return rows


def _loss_rows(runs: list[Run]) -> list[list[str]]:
    """Return the losses at five steps that all runs have reached."""
    curves = [dict(run.metrics.series["loss"].points(2000)) if "loss" in run.metrics.series else {} for run in runs]
    if not all(curves):
        return []
    least, most = max(min(curve) for curve in curves), min(max(curve) for curve in curves)
    rows: list[list[str]] = []
    for step in [least + (most - least) * part // 4 for part in range(5)] if most > least else []:
        nearest = [min(curve, key=lambda known: abs(known - step)) for curve in curves]
        rows.append([f"{step:.0f}", *(f"{curve[at]:.4f}" for curve, at in zip(curves, nearest, strict=True))])
    return rows
