"""What runs left behind: listed, shown, compared. Slurm is asked only for what the files do not say."""

import collections.abc
import dataclasses
import typing

import trainer_jobs
import trainer_params
import trainer_params_runs
import trainer_workspace
from slurm_ddp.slurm import jobs
from trainer_base import Log, ParameterError, Results, Settings, TrainerError, one_line

Json = dict[str, typing.Any]

_CURVE_ROWS, _CURVE_COLUMNS = 12, 64
_OUTCOMES = {"done": "COMPLETED", "preempted": "PREEMPTED", "failed": "FAILED", "cancelled": "CANCELLED"}
# Of summary.json, in the order in which people look at it; the sign says whether more or less is better.
_FIGURES = {
    "last_loss": -1, "best_loss": -1, "first_loss": 0, "tokens_per_second": 1, "samples_per_second": 1, "mfu": 1,
    "steps": 0, "tokens": 0, "samples": 0, "elapsed_s": -1, "world_size": 0, "nodes": 0,
}  # fmt: skip
_NOT_SETTINGS = {"run_dir", "data", "report_json", "job_id", "run", "submitted", "summary_before", "format"}


@dataclasses.dataclass(frozen=True)
class State:
    """How a run stands."""

    word: str  # one of Slurm's states, PREEMPTED for saved and stopped, or UNKNOWN
    why: str = ""


def list_runs(settings: Settings, params: trainer_params_runs.ListRuns, _: Log) -> Results:
    """Return the runs, the newest first, each with its state and last figures."""
    found = trainer_workspace.ask(
        settings, "list_results", timeout_s=60, workspace=str(settings.workspace), limit=params.lines
    )
    runs: list[Json] = found["runs"]
    states, silence = _states(settings, runs)
    rows = [["RUN", "KIND", "STATE", "JOB", "RANKS", "STEP", "LOSS", "BEST", "PER-SECOND", "SUBMITTED"]]
    for run in runs:
        job, summary, metric = _dict(run["job"]), _dict(run["summary"]), _dict(run["metric"])
        rate = summary.get("tokens_per_second") or summary.get("samples_per_second") or metric.get("tokens_per_second")
        unit = " tokens" if summary.get("tokens_per_second") or metric.get("tokens_per_second") else " samples"
        rows.append(
            [
                trainer_jobs.printable(str(run["name"]))[:64],
                _cell(job.get("kind") or summary.get("workload")),
                states[str(run["name"])].word,
                _cell(job.get("job_id")),
                _cell(summary.get("world_size")),
                _cell(metric.get("step") or summary.get("steps")),
                _cell(metric.get("loss") if metric.get("loss") is not None else summary.get("last_loss")),
                _cell(summary.get("best_loss")),
                _cell(rate) + (unit if rate else ""),
                _cell(job.get("submitted")),
            ]
        )
    results = {"count": str(found["count"]), "runs": _table(rows)}
    if found["foreign"]:
        results["foreign"] = f"{found['foreign']} folders in {settings.runs} are no runs and left out"
    return results | ({"slurm": silence} if silence else {})


def show_run(settings: Settings, params: trainer_params_runs.ShowRun, _: Log) -> Results:
    """Return a run's settings, figures, checkpoints and curve; the newest run's when none is named."""
    run = params.run or trainer_jobs.find(settings, trainer_params.ShowJob()).run
    read = _read(settings, run)
    states, silence = _states(settings, [read])
    job, summary = _dict(read["job"]), _dict(read["summary"])
    state = states[run]
    results: Results = {
        "run": run,
        "run-dir": str(settings.runs / run),
        "state": state.word + (f" ({state.why})" if state.why else ""),
        "job-id": _cell(job.get("job_id")),
        "submitted": _cell(job.get("submitted")),
    }
    results |= trainer_jobs.figures(summary)
    results["settings"] = "\n".join(f"{name}: {value}" for name, value in sorted(_settings(read).items()))
    results["metrics"] = _told_metrics(read)
    results["best"] = _best(read)
    results["checkpoints"] = "\n".join(
        f"{c['name']}  step {c['step']}{' (latest)' if c['name'] == read['latest'] else ''}"
        f"{' (best)' if c['name'] == read['best'] else ''}"
        for c in read["checkpoints"]
    )
    results["attempts"] = "\n".join(f"{a['attempt']}: {a['outcome']}, step {a['step']}" for a in read["attempts"])
    results["curve-text"] = text_curve(_points(read["steps"]), _points(read["evals"]))
    results["curve"] = str(read["png"] or "")
    results["tracking"] = _cell(_dict(read["tracking"]).get("url"))
    results["slurm"] = silence
    return {name: value for name, value in results.items() if value not in ("", "-")}


def compare_runs(settings: Settings, params: trainer_params_runs.CompareRuns, _: Log) -> Results:
    """Return in which settings runs differ, and their results side by side."""
    names = params.runs.replace(",", " ").split() if params.runs else _newest_two(settings)
    names = list(dict.fromkeys(names))
    if not 2 <= len(names) <= 8:
        raise ParameterError("runs", f"{len(names)} named; two to eight different ones, separated by commas")
    read = {name: _read(settings, name) for name in names}
    states, silence = _states(settings, list(read.values()))
    all_settings = {name: _settings(found) for name, found in read.items()}
    keys = sorted({key for found in all_settings.values() for key in found})
    differing = [key for key in keys if len({found.get(key, "-") for found in all_settings.values()}) > 1]
    header = ["", *names]
    rows = [header, *([key, *(all_settings[name].get(key, "-")[:60] for name in names)] for key in differing)]
    results: Results = {
        "runs": ", ".join(names),
        "settings": _table(rows) if differing else "the same",
        "same-settings": str(len(keys) - len(differing)),
        "results": _table([header, ["state", *(states[name].word for name in names)], *_figure_rows(read)]),
    }
    if losses := _loss_rows(read):
        results["losses"] = _table([["step", *names], *losses])
    curves = [str(read[name]["png"]) for name in names if read[name]["png"]]
    return results | ({"curves": "\n".join(curves)} if curves else {}) | ({"slurm": silence} if silence else {})


def text_curve(
    steps: collections.abc.Sequence[tuple[int, float]], evals: collections.abc.Sequence[tuple[int, float]] = ()
) -> str:
    """Return a loss curve of characters: `*` the training loss (mean of each column), `o` the validation loss."""
    if not steps:
        return ""
    first, last = steps[0][0], steps[-1][0]
    columns = min(_CURVE_COLUMNS, len(steps))

    def column(step: int) -> int:
        return min(columns - 1, max(0, (step - first) * columns // max(1, last - first + 1)))

    sums = [[0.0, 0] for _ in range(columns)]
    for step, loss in steps:
        cell = sums[column(step)]
        cell[0], cell[1] = cell[0] + loss, cell[1] + 1
    means = {index: total / count for index, (total, count) in enumerate(sums) if count}
    marks = {column(step): loss for step, loss in evals}
    values = [*means.values(), *marks.values()]
    low, high = min(values), max(values)
    span = (high - low) or 1.0

    def row(value: float) -> int:
        return round((high - value) / span * (_CURVE_ROWS - 1))

    canvas = [[" "] * columns for _ in range(_CURVE_ROWS)]
    for index, value in means.items():
        canvas[row(value)][index] = "*"
    for index, value in marks.items():
        canvas[row(value)][index] = "o"
    lines = [
        f"{high - span * number / (_CURVE_ROWS - 1):9.4f} |{''.join(cells)}".rstrip()
        for number, cells in enumerate(canvas)
    ]
    lines.append(" " * 10 + "+" + "-" * columns)
    lines.append(" " * 11 + str(first).ljust(max(1, columns - len(str(last)))) + f"{last}  step")
    return "\n".join(lines)


def _states(settings: Settings, runs: list[Json]) -> tuple[dict[str, State], str]:
    """Return the state of each run, and why Slurm could not be asked or nothing.

    A job at work decides; then what the job itself wrote; then what the controller and, at last, the accounting know.
    """
    silence = ""
    known: dict[str, jobs.Job] = {}
    try:
        for job in reversed(jobs.jobs(user=settings.user)):
            if job.name not in known or job.is_active or not known[job.name].is_active:
                known[job.name] = job
    except jobs.SlurmError as e:
        silence = f"Slurm gave no answer, so states are those that the runs wrote: {e}"
    found: dict[str, State] = {}
    forgotten: dict[int, str] = {}
    for run in runs:
        name, job, outcome = str(run["name"]), _dict(run["job"]), _dict(run["outcome"])
        at_work = known.get(name)
        number = job.get("job_id")
        if at_work is not None and at_work.is_active:
            found[name] = State(at_work.state, at_work.reason if at_work.state == "PENDING" else "")
        elif outcome:
            word = _OUTCOMES.get(str(outcome.get("outcome")), "UNKNOWN")
            why = f"saved at step {outcome.get('step')}" if word == "PREEMPTED" else str(outcome.get("error") or "")
            found[name] = State(word, one_line(why, 200))
        elif at_work is not None and at_work.job_id == number:
            found[name] = State(at_work.state, at_work.reason if at_work.reason not in ("None", "") else "")
        else:
            found[name] = State("UNKNOWN", "it wrote no outcome, and Slurm has forgotten its job")
            if isinstance(number, int):
                forgotten[number] = name
    if forgotten and not silence:
        for number, job in jobs.accounted(tuple(forgotten), user=settings.user).items():
            found[forgotten[number]] = State(job.state)
    return found, silence


def _read(settings: Settings, run: str) -> Json:
    try:
        return trainer_workspace.ask(settings, "read_result", timeout_s=60, workspace=str(settings.workspace), run=run)
    except trainer_workspace.MissingError as e:
        text = f"there is no run {run!r} in {settings.runs}; see: juju run {settings.unit} list-runs"
        raise ParameterError("run", text) from e


def _newest_two(settings: Settings) -> list[str]:
    found = trainer_workspace.ask(settings, "list_results", timeout_s=60, workspace=str(settings.workspace), limit=100)
    names = [str(run["name"]) for run in found["runs"] if run["summary"]]
    if len(names) < 2:
        raise TrainerError(f"{settings.runs} holds {len(names)} runs with results; two are needed to compare")
    return names[:2]


def _settings(read: Json) -> dict[str, str]:
    """Return what was asked for and what the payload made of it, as texts under one name each."""
    found: dict[str, str] = {}
    for source in (_dict(read["job"]), _dict(read["config"])):
        for name, value in _flat(source):
            if name.rsplit(".", maxsplit=1)[-1] not in _NOT_SETTINGS and value is not None:
                found[name.removeprefix("request.")] = _cell(value)
    return found


def _flat(record: Json, prefix: str = "") -> collections.abc.Iterator[tuple[str, object]]:
    for key, value in list(record.items())[:500]:
        name = trainer_jobs.printable(str(key))[:80]
        if isinstance(value, dict) and prefix.count(".") < 4:
            yield from _flat(typing.cast(Json, value), f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _figure_rows(read: dict[str, Json]) -> list[list[str]]:
    """Return a row for each figure that any of the runs has; the best is marked, of two the ratio is told."""
    rows: list[list[str]] = []
    for key, sign in _FIGURES.items():
        values = [_dict(found["summary"]).get(key) for found in read.values()]
        numbers = [float(value) for value in values if isinstance(value, int | float)]
        if not numbers:
            continue
        best = None if not sign or len(set(numbers)) < 2 else max(numbers, key=lambda number: sign * number)
        cells = [_cell(value) + (" *" if best is not None and value == best else "") for value in values]
        if len(values) == 2 and len(numbers) == 2 and sign and numbers[0]:
            cells[1] += f"  ({numbers[1] / numbers[0]:.3f}x)"
        rows.append([key.replace("_", "-"), *cells])
    return rows


def _loss_rows(read: dict[str, Json]) -> list[list[str]]:
    """Return the losses at five steps that all runs have reached."""
    curves = [dict(_points(found["steps"])) for found in read.values()]
    if not all(curves):
        return []
    least, most = max(min(curve) for curve in curves), min(max(curve) for curve in curves)
    if most <= least:
        return []
    rows: list[list[str]] = []
    for part in range(5):
        step = least + (most - least) * part // 4
        nearest = [min(curve, key=lambda known: abs(known - step)) for curve in curves]
        rows.append([str(step), *(f"{curve[at]:.4f}" for curve, at in zip(curves, nearest, strict=True))])
    return rows


def _told_metrics(read: Json) -> str:
    steps = _points(read["steps"])
    if not steps:
        return "none yet"
    text = f"{read['lines']} records, the last at step {steps[-1][0]} with loss {steps[-1][1]:.4f}"
    return text + (f"; validation loss {read['evals'][-1][1]:.4f}" if read["evals"] else "")


def _best(read: Json) -> str:
    evals = _points(read["evals"])
    if not evals:
        return ""
    step, loss = min(evals, key=lambda point: point[1])
    return f"validation loss {loss:.4f} at step {step}"


def _points(found: object) -> list[tuple[int, float]]:
    pairs = typing.cast(list[list[float]], found)
    return [(int(step), float(loss)) for step, loss in pairs]


def _table(rows: list[list[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def _cell(value: object) -> str:
    if value is None or value == "":
        return "-"
    return f"{value:.6g}" if isinstance(value, float) else one_line(str(value), 200)


def _dict(value: object) -> Json:
    return typing.cast(Json, value) if isinstance(value, dict) else {}
