"""compare-runs: the settings that differ between runs, and their results."""

from ddp.actions import list as listing
from ddp.options import fields, models
from ddp.problem import Command, ParameterError
from ddp.results.progress import Log
from ddp.results.result import Result
from ddp.run import catalog
from ddp.run.model import WITHOUT_LOSS, Run
from ddp.settings import Settings
from ddp.workspace.folders import Workspace

_WIDEST = 120  # columns; a wider table has a column for each run instead of a line
_MOST = 40  # characters of a setting


def compare_runs(settings: Settings, params: models.CompareRuns, _: Log) -> Result:
    """Compare the settings and results of runs; a sweep stands for all of its runs."""
    runs, silence = _select(settings.workspace, params.runs or "")
    _check(runs)
    differing = _differing_settings(runs)
    best = catalog.best_of(runs)
    results = {
        "runs": ", ".join(run.name for run in runs),
        "results": _table(runs, differing, best),
        "differing": ", ".join(differing) or "nothing",
    }
    if best is not None:
        results["best-run"] = best.name
        results["best-loss"] = catalog.cell(best.score)
    if silence:
        results["slurm"] = silence
    values: dict[str, object] = {
        "runs": [_describe(run) for run in runs],
        "best_run": None if best is None else best.name,
    }
    return Result(results, values)


def _select(workspace: Workspace, text: str) -> tuple[list[Run], str]:
    """Load the runs that are named, once each; return also why Slurm was not asked, or ""."""
    given = text.replace(",", " ").split()
    names = dict.fromkeys(catalog.name_of(workspace, name)[0] for name in given)
    queue = catalog.ask_queue(workspace)
    read = [catalog.read(workspace, name, is_brief=True) for name in names]
    runs: list[Run] = []
    for run in catalog.judge(workspace, read, queue):
        if run.kind == "sweep":
            runs += catalog.elements(workspace, run, queue)
        else:
            runs.append(run)
    return runs, catalog.silence_of(runs, queue)


def _check(runs: list[Run]) -> None:
    """Raise ParameterError unless these runs can be compared."""
    if not 2 <= len(runs) <= fields.MAX_SWEEP:
        raise ParameterError(
            "runs", f"{len(runs)} named; from two to {fields.MAX_SWEEP} different ones are compared"
        )
    for run in runs:
        if what := WITHOUT_LOSS.get(run.kind):
            text = f"{run.name} is {what}, which has no loss to compare"
            raise ParameterError("runs", text, remedy=Command("show", arguments=(run.name,)))


def _differing_settings(runs: list[Run]) -> list[str]:
    """List the settings that differ: the choices of a sweep first, then the others by name."""
    recipes = [run.recipe for run in runs]
    # A sweep's element that has not started has recorded nothing but its choice
    started = [run.recipe for run in runs if run.config or "sweep" not in run.record]
    chosen: dict[str, None] = {}
    for run in runs:
        chosen.update(dict.fromkeys(run.choice))
    others: set[str] = set()
    for recipe in recipes:
        others.update(recipe.keys() - chosen.keys())
    differing = [name for name in chosen if _differs(name, recipes)]
    return differing + [name for name in sorted(others) if _differs(name, started)]


def _differs(name: str, recipes: list[dict[str, str]]) -> bool:
    return len({recipe.get(name) for recipe in recipes}) > 1


def _table(runs: list[Run], differing: list[str], best: Run | None) -> str:
    """Make the table of settings and results: a row for each run, or a column if it is too wide."""
    head = [
        "RUN",
        "STATE",
        *(name.upper() for name in differing),
        "STEPS",
        "LOSS",
        "BEST",
        "PER-SECOND",
    ]
    rows = [head, *(_row(run, differing, is_best=run is best) for run in runs)]
    table = catalog.aligned(rows)
    is_wide = max(map(len, table.splitlines())) > _WIDEST
    if is_wide and len(rows) < len(head):
        columns = [list(column) for column in zip(*rows, strict=True)]
        return catalog.aligned(columns)
    return table


def _row(run: Run, differing: list[str], *, is_best: bool) -> list[str]:
    """Make a run's line; an asterisk marks the loss that makes it the best."""
    loss, best_loss = catalog.cell(run.loss), catalog.cell(run.best_loss)
    if is_best and run.validated is not None:
        best_loss += " *"
    elif is_best:
        loss += " *"
    recipe = run.recipe
    values = [recipe.get(name, "-")[:_MOST] for name in differing]
    rate = run.rate[0] if run.rate else None
    return [
        run.name,
        str(run.state),
        *values,
        catalog.cell(run.step),
        loss,
        best_loss,
        catalog.cell(rate),
    ]


def _describe(run: Run) -> dict[str, object]:
    about = {"settings": run.settings, "changes": run.changes, "figures": run.figures}
    return listing.describe(run) | about
