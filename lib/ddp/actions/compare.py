"""compare-runs: in which settings runs differ, and their results."""

from ddp.actions import list as listing
from ddp.options import fields, models
from ddp.problem import Command, ParameterError
from ddp.results.progress import Log
from ddp.results.result import Result
from ddp.run import catalog
from ddp.run.model import WITHOUT_LOSS, Run
from ddp.settings import Settings

_WIDEST = 120  # columns; a wider table has a column for each run instead of a line


def compare_runs(settings: Settings, params: models.CompareRuns, _: Log) -> Result:
    """Compare runs; a sweep stands for all of its runs."""
    given = (params.runs or "").replace(",", " ").split()
    names = list(dict.fromkeys(catalog.name_of(settings, name)[0] for name in given))
    queue = catalog.ask_queue(settings)
    read = [catalog.read(settings, name, is_brief=True) for name in names]
    runs: list[Run] = []
    for run in catalog.judge(settings, read, queue):
        runs += catalog.elements(settings, run, queue) if run.kind == "sweep" else [run]
    silence = catalog.silence_of(runs, queue)
    if not 2 <= len(runs) <= fields.MAX_SWEEP:
        raise ParameterError("runs", f"{len(runs)} named; from two to {fields.MAX_SWEEP} different ones are compared")
    for run in runs:
        if what := WITHOUT_LOSS.get(run.kind):
            text = f"{run.name} is {what}, which has no loss to compare"
            raise ParameterError("runs", text, remedy=Command("show", arguments=(run.name,)))
    settings_of = [run.recipe for run in runs]
    started = [run.recipe for run in runs if run.config or "sweep" not in run.record]
    chosen = dict.fromkeys(key for run in runs for key in run.choice)
    differing = [key for key in chosen if len({one.get(key) for one in settings_of}) > 1]
    others = sorted({key for one in settings_of for key in one} - chosen.keys())
    differing += [key for key in others if len({one.get(key) for one in started}) > 1]
    best = catalog.best_of(runs)
    rows = [["RUN", "STATE", *map(str.upper, differing), "STEPS", "LOSS", "BEST", "PER-SECOND"]]
    for run, given_to in zip(runs, settings_of, strict=True):
        cells = list(map(catalog.cell, (run.step, run.loss, run.best_loss, run.rate[0] if run.rate else None)))
        if run is best:
            cells[2 if run.validated is not None else 1] += " *"
        rows.append([run.name, str(run.state), *(given_to.get(key, "-")[:40] for key in differing), *cells])
    table = catalog.aligned(rows)
    if max(map(len, table.splitlines())) > _WIDEST and len(rows) < len(rows[0]):
        table = catalog.aligned([list(column) for column in zip(*rows, strict=True)])
    results = {
        "runs": ", ".join(run.name for run in runs),
        "results": table,
        "differing": ", ".join(differing) or "nothing",
        **({"best-run": best.name, "best-loss": catalog.cell(best.score)} if best is not None else {}),
        **({"slurm": silence} if silence else {}),
    }
    values: dict[str, object] = {
        "runs": [_describe(run) for run in runs],
        "best_run": best.name if best is not None else None,
    }
    return Result(results, values)


def _describe(run: Run) -> dict[str, object]:
    about = {"settings": run.settings, "changes": run.changes, "figures": run.figures}
    return listing.describe(run) | about
