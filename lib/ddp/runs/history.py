"""List, show and compare runs by their files; Slurm is asked only for what the files lack."""

import collections
import collections.abc
import math
import typing

from ddp.base import Log, ParameterError, Results, Settings, TrainerError, one_line
from ddp.options import fields, models
from ddp.report import facts, files
from ddp.runs import control, drawing, run_files
from ddp.slurm import jobs
from ddp.submit import sweeps
from ddp.workspace import folders

Json = files.Json
# Of summary.json, the most interesting first; 1: more is better, -1: less is.
_FIGURES = {
    "last_loss": -1, "best_loss": -1, "first_loss": 0, "tokens_per_second": 1, "samples_per_second": 1, "mfu": 1,
    "steps": 0, "tokens": 0, "samples": 0, "elapsed_s": -1, "world_size": 0, "nodes": 0,
}  # fmt: skip
_WITHOUT_LOSS = {"collectives": "a benchmark", "prepare": "the preparation of a dataset"}
_MAX_OPTIONS = 10  # columns of a table


class State(typing.NamedTuple):
    """The state of a run."""

    word: str  # one of Slurm's states, PREEMPTED for saved and stopped, or UNKNOWN
    why: str = ""


def list_runs(settings: Settings, params: models.ListRuns, _: Log) -> Results:
    """List the runs, the newest first, each with its state and last figures."""
    found = _call(settings, run_files.list_results, limit=params.lines)
    runs: list[Json] = found["runs"]
    states, silence = _states(settings, runs)
    rows = [["RUN", "KIND", "STATE", "JOB", "RANKS", "STEP", "LOSS", "BEST", "PER-SECOND", "SUBMITTED"]]
    for run in runs:
        job, summary, metric = _records(run)
        rate = _rate(summary, metric)
        unit = " tokens" if summary.get("tokens_per_second") or metric.get("tokens_per_second") else " samples"
        cells = [
            job.get("kind") or summary.get("workload"), states[str(run["name"])].word, job.get("job_id"),
            summary.get("world_size"), metric.get("step") or summary.get("steps"),
            metric.get("loss") if metric.get("loss") is not None else summary.get("last_loss"),
            summary.get("best_loss"), _cell(rate) + unit if rate else None, job.get("submitted"),
        ]  # fmt: skip
        rows.append([control.printable(str(run["name"]))[:64], *map(_cell, cells)])
    results = {"count": str(found["count"]), "runs": control.aligned(rows)}
    if found["foreign"]:
        results["foreign"] = f"{found['foreign']} folders in {settings.runs} are not runs and are left out"
    return results | ({"slurm": silence} if silence else {})


def show_run(settings: Settings, params: models.ShowRun, _: Log) -> Results:
    """Show a run's settings, figures, checkpoints and curve; by default the newest run's."""
    run = params.run or control.newest(settings)
    read = _read(settings, run)
    if not (read["job"] or read["summary"] or read["steps"]):
        hint = f"see: {settings.typed('list-runs')}"
        raise ParameterError("run", f"{settings.runs / run} is a folder without a run's files; {hint}")
    if _kind(read) == "sweep":
        return sweeps.show(settings, run)[0] | {"run-dir": str(settings.runs / run)}
    states, silence = _states(settings, [read])
    job, summary = _records(read)[:2]
    state = states[run]
    results: Results = {
        "run": run,
        "run-dir": str(settings.runs / run),
        "state": state.word + (f" ({state.why})" if state.why else ""),
        "kind": _kind(read),
        "job-id": _cell(job.get("job_id")),
        "submitted": _cell(job.get("submitted")),
    }
    results |= control.figures(summary)
    results["settings"] = "\n".join(f"{name}: {value}" for name, value in sorted(_settings(read).items()))
    results["metrics"] = _describe_metrics(settings, read)
    results["best"] = _best(read)
    results["checkpoints"] = "\n".join(
        f"{c['name']}  step {_cell(c['step'])}{' (latest)' if c['name'] == read['latest'] else ''}"
        f"{' (best)' if c['name'] == read['best'] else ''}"
        for c in read["checkpoints"]
    )
    results["attempts"] = "\n".join(
        f"{a['attempt']}: {_cell(a['outcome'])}, step {_cell(a['step'])}" for a in read["attempts"]
    )
    results["curve-text"] = drawing.draw(read["steps"], read["evals"])
    results["curve"] = str(read["png"] or "")
    results["tracking"] = _cell(files.as_object(read["tracking"]).get("url"))
    results["slurm"] = silence
    return {name: value for name, value in results.items() if value not in ("", "-")}


def compare_runs(settings: Settings, params: models.CompareRuns, _: Log) -> Results:
    """Show in which settings runs differ, and their results side by side."""
    names = params.runs.replace(",", " ").split() if params.runs else _newest_two(settings)
    names = list(dict.fromkeys(names))
    if among := [name for name in names if sweeps.is_sweep(settings, name)]:
        return _compare_sweeps(settings, names, among)
    if not 2 <= len(names) <= 8:
        raise ParameterError("runs", f"{len(names)} named; two to eight different ones, separated by commas")
    read = {name: _read(settings, name, parameter="runs") for name in names}
    for name in names:
        if what := _WITHOUT_LOSS.get(_kind(read[name])):
            hint = f"see: {settings.typed('show-run', run=name)}"
            raise ParameterError("runs", f"{name} is {what}, which has no loss to compare; {hint}")
    states, silence = _states(settings, list(read.values()))
    all_settings = {name: _settings(found) for name, found in read.items()}
    keys = sorted({key for found in all_settings.values() for key in found})
    differing = [key for key in keys if len({found.get(key, "-") for found in all_settings.values()}) > 1]
    header = ["", *names]
    rows = [header, *([key, *(all_settings[name].get(key, "-")[:60] for name in names)] for key in differing)]
    results: Results = {
        "runs": ", ".join(names),
        "settings": control.aligned(rows) if differing else "the same",
        "same-settings": str(len(keys) - len(differing)),
        "results": control.aligned([header, ["state", *(states[name].word for name in names)], *_figure_rows(read)]),
    }
    if losses := _loss_rows(read):
        results["losses"] = control.aligned([["step", *names], *losses])
    curves = [str(read[name]["png"]) for name in names if read[name]["png"]]
    return results | ({"curves": "\n".join(curves)} if curves else {}) | ({"slurm": silence} if silence else {})


def _states(settings: Settings, runs: list[Json]) -> tuple[dict[str, State], str]:
    """Return the state of each run by its name, and Slurm's error or nothing.

    Decided by an active job; then by the outcome that the run wrote; then by the controller; at last by the accounting.
    """
    silence = ""
    known: tuple[jobs.Job, ...] = ()
    try:
        known = jobs.jobs(user=settings.user)
    except jobs.SlurmError as e:
        silence = f"Slurm does not answer, so states are from the runs' files: {e}"
    found: dict[str, State] = {}
    forgotten: dict[int, str] = {}
    for run in runs:
        name, job, outcome = str(run["name"]), files.as_object(run["job"]), files.as_object(run["outcome"])
        if job.get("kind") == "sweep":
            found[name] = State("UNKNOWN") if silence else _sweep_state(settings, name)
            continue
        at_work = _job_of(name, job, known)
        number = job.get("job_id")
        if at_work is not None and at_work.is_active:
            found[name] = State(at_work.state, at_work.reason if at_work.state == "PENDING" else "")
        elif outcome:
            word = control.OUTCOMES.get(str(outcome.get("outcome")), "UNKNOWN")
            why = f"saved at step {outcome.get('step')}" if word == "PREEMPTED" else str(outcome.get("error") or "")
            found[name] = State(word, one_line(why, 200))
        elif at_work is not None and at_work.job_id == number:
            found[name] = State(at_work.state, at_work.reason if at_work.reason not in ("None", "") else "")
        else:
            found[name] = State("UNKNOWN", "it wrote no outcome, and Slurm no longer knows its job")
            if isinstance(number, int):
                forgotten[number] = name
    if forgotten and not silence:
        for number, job in jobs.accounted(tuple(forgotten), user=settings.user).items():
            if control.is_of(job, forgotten[number]):
                found[forgotten[number]] = State(job.state)
    return found, silence


def _job_of(name: str, job: Json, known: collections.abc.Iterable[jobs.Job]) -> jobs.Job | None:
    """Find the run's active job, else its last one. Pending runs of a sweep share one record."""
    sweep, number = str(job.get("sweep") or ""), name.rpartition("-")[2]
    mine = [
        one
        for one in known
        if one.run_name == name
        or (sweep and number.isdecimal() and one.name == sweep and jobs.holds_task(one.task, int(number)))
    ]
    return next((one for one in mine if one.is_active), next(iter(mine), None))


def _sweep_state(settings: Settings, name: str) -> State:
    try:
        shown = sweeps.show(settings, name)[0]
    except TrainerError as e:
        return State("UNKNOWN", one_line(str(e), 200))
    return State(shown["state"], shown["states"])


def _read(settings: Settings, run: str, *, parameter: str = "run") -> Json:
    try:
        return _call(settings, run_files.read_result, run=run)
    except folders.MissingError as e:
        raise _no_run(settings, run, parameter) from e


def _no_run(settings: Settings, run: str, parameter: str) -> ParameterError:
    return ParameterError(parameter, f"there is no run {run!r} in {settings.runs}; see: {settings.typed('list-runs')}")


def _call(
    settings: Settings, operation: collections.abc.Callable[..., Json], *, timeout_s: float = 60, **given: object
) -> Json:
    return folders.call(settings, operation, timeout_s=timeout_s, workspace=str(settings.folder), **given)


def _compare_sweeps(settings: Settings, names: list[str], among: list[str]) -> Results:
    """Show a line for each run of the sweeps and each other run: what differs, and its figures, the best marked."""
    runs: list[str] = []
    states: dict[str, str] = {}
    for name in names:
        rows = sweeps.show(settings, name)[1] if name in among else [{"run": name, "state": ""}]
        runs += [str(row["run"]) for row in rows]
        states |= {str(row["run"]): str(row["state"]) for row in rows}
    if len(runs) > fields.MAX_SWEEP:
        text = f"{len(runs)} runs are in {', '.join(names)}; at most {fields.MAX_SWEEP} are compared"
        raise ParameterError("runs", text)
    read: list[Json] = _call(settings, run_files.read_briefly, timeout_s=120, runs=runs)["runs"]
    if lacking := [str(run["name"]) for run in read if not (run["job"] or run["summary"])]:
        raise _no_run(settings, lacking[0], "runs")
    alone = _states(settings, [run for run in read if run["name"] not in states or not states[run["name"]]])[0]
    varied = list(dict.fromkeys(key for run in read for key in facts.choice(files.as_object(run["job"]))))
    given = [_settings(run) for run in read]
    differing = [key for key in varied if len({one.get(key, "-") for one in given}) > 1]
    others = sorted({key for one in given for key in one} - set(varied))
    differing += [key for key in others if len({one[key] for one in given if key in one}) > 1]
    columns = differing[:_MAX_OPTIONS]
    rows = [["RUN", "STATE", *(key.upper() for key in columns), "STEPS", "LOSS", "BEST", "PER-SECOND"]]
    figures = [_outcome_figures(run) for run in read]
    best = [_best_of([one[at] for one in figures], sign) for at, sign in enumerate((0, -1, -1, 1))]
    for run, one, numbers in zip(read, given, figures, strict=True):
        name = str(run["name"])
        cells = [_marked(value, mark) for value, mark in zip(numbers, best, strict=True)]
        rows.append([name, states.get(name) or alone[name].word, *(one.get(key, "-")[:40] for key in columns), *cells])
    results: Results = {
        "runs": ", ".join(runs),
        "results": control.aligned(rows),
        "differing": ", ".join(differing) or "nothing",
    }
    finished = [(one[1], str(run["name"])) for run, one in zip(read, figures, strict=True) if one[1] is not None]
    if finished:
        loss, name = min(finished)
        results |= {"best-run": name, "best-loss": _cell(loss)}
    counts = collections.Counter(row[1] for row in rows[1:])
    return results | {"states": sweeps.counted(counts), "state": sweeps.whole(counts)}


def _outcome_figures(run: Json) -> tuple[float | None, float | None, float | None, float | None]:
    """Return a run's steps, last loss, best validation loss and rate."""
    _, summary, metric = _records(run)
    steps = summary.get("steps") or metric.get("step")
    loss = summary.get("last_loss", metric.get("loss"))
    return _real(steps), _real(loss), _real(summary.get("best_loss")), _real(_rate(summary, metric))


def _records(run: Json) -> tuple[Json, Json, Json]:
    """Return a run's job.json, summary.json and last metric; empty where it has none."""
    return files.as_object(run["job"]), files.as_object(run["summary"]), files.as_object(run.get("metric"))


def _rate(summary: Json, metric: Json) -> object:
    return summary.get("tokens_per_second") or summary.get("samples_per_second") or metric.get("tokens_per_second")


def _best_of(values: list[float | None], sign: int) -> float | None:
    """Return the best of the values; None if all are the same, or neither more nor less is better."""
    numbers = [value for value in values if value is not None]
    return max(numbers, key=lambda number: sign * number) if sign and len(set(numbers)) > 1 else None


def _marked(value: object, best: float | None) -> str:
    return _cell(value) + (" *" if best is not None and value == best else "")


def _real(value: object) -> float | None:
    return value if isinstance(value, int | float) and math.isfinite(value) else None


def _kind(read: Json) -> str:
    """Return the kind of a run: gpt, smoke, script, collectives, prepare, sweep; "-" if it is unknown."""
    job, summary, _ = _records(read)
    return _cell(job.get("kind") or summary.get("workload"))


def _newest_two(settings: Settings) -> list[str]:
    found = _call(settings, run_files.list_results, limit=100)
    names = [str(run["name"]) for run in found["runs"] if run["summary"] and _kind(run) not in _WITHOUT_LOSS]
    if len(names) < 2:
        hint = f"start one: {settings.typed('submit-ddp')}; see: {settings.typed('list-runs')}"
        raise TrainerError(f"{settings.runs} holds {len(names)} runs with results; two are needed to compare; {hint}")
    return names[:2]


def _settings(read: Json) -> dict[str, str]:
    """Merge the options of the job and of the payload, as texts under one name each."""
    job, config = files.as_object(read["job"]), files.as_object(read["config"])
    found = facts.settings(job, config, {"data"})
    return {control.printable(name)[:80]: _cell(value) for name, value in found.items()}


def _figure_rows(read: dict[str, Json]) -> list[list[str]]:
    """Return a row for each figure that any of the runs has: the best is marked; of two runs with the ratio."""
    rows: list[list[str]] = []
    for key, sign in _FIGURES.items():
        values = [files.as_object(found["summary"]).get(key) for found in read.values()]
        if not any(isinstance(value, int | float) for value in values):
            continue
        numbers = [_real(value) for value in values]
        best = _best_of(numbers, sign)
        cells = [_marked(value, best) for value in values]
        if len(numbers) == 2 and sign and numbers[0] and numbers[1] is not None:
            cells[1] += f"  ({numbers[1] / numbers[0]:.3f}x)"
        rows.append([key.replace("_", "-"), *cells])
    return rows


def _loss_rows(read: dict[str, Json]) -> list[list[str]]:
    """Return the losses at five steps that all runs have reached."""
    curves = [dict(_points(found, "steps")) for found in read.values()]
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


def _describe_metrics(settings: Settings, read: Json) -> str:
    steps, evals = _points(read, "steps"), _points(read, "evals")
    lost = f"the loss is not finite from step {read['lost']} on" if read["lost"] is not None else ""
    if not steps and lost:
        return f"{read['lines']} records; {lost}"
    if not steps:
        kind, run = _kind(read), read["name"]
        if what := _WITHOUT_LOSS.get(kind):
            return f"none, since it is {what}; its output: {settings.typed('job-log', run=run)}"
        return "none: the script wrote no metrics.jsonl" if kind == "script" else "none yet"
    last = "the last finite one" if lost else "the last"
    text = f"{read['lines']} records, {last} at step {steps[-1][0]} with loss {steps[-1][1]:.4f}"
    text += f"; {lost}" if lost else ""
    return text + (f"; validation loss {evals[-1][1]:.4f}" if evals else "")


def _best(read: Json) -> str:
    evals = _points(read, "evals")
    if not evals:
        return ""
    step, loss = min(evals, key=lambda point: point[1])
    return f"validation loss {loss:.4f} at step {step}"


def _points(read: Json, name: str) -> list[tuple[int, float]]:
    return read[name]


def _cell(value: object) -> str:
    if value is None or value == "":
        return "-"
    return f"{value:.6g}" if isinstance(value, float) else one_line(str(value), 200)
