"""sweep: one training many times with different options, as an array of jobs; each is a run like any other."""

import collections
import itertools
import json
import math
import re
import time
import typing

from ddp import project, tables
from ddp.base import REPORT_S, Answer, Facts, Log, ParameterError, Results, Settings, TrainerError, shown
from ddp.options import fields, models
from ddp.problem import Command
from ddp.runs import control, run_files
from ddp.slurm import jobs
from ddp.submit import checks, precheck, scripts, training
from ddp.workspace import folders, operations, tokens

_MAX_FILE_BYTES = 256 * 1024
_OPTION = re.compile(r"[a-z][a-z0-9-]{0,63}", re.ASCII)
_VALUE = re.compile(r"[A-Za-z0-9._+=/:,@%^-]{1,512}", re.ASCII)
Choice = dict[str, str | int | float | bool]


def submit_sweep(settings: Settings, params: models.SubmitSweep, log: Log) -> Answer:
    """Submit the runs of a sweep; with `wait` follow them to their end."""
    choices = _choices(settings, params)
    if params.workload in ("gpt", "smoke") and any("run-dir" in choice for choice in choices):
        text = "run-dir is set by ddp; omit it"
        raise ParameterError("grid" if params.file is None else "file", text)
    sweep = scripts.Sweep(len(choices) - 1, min(params.parallel or len(choices), len(choices)))
    name = params.name or control.new_name(settings, "sweep")
    for taken in (name, f"{name}-0"):
        if folders.locate(settings, str(settings.runs / taken)).kind != "absent":
            raise ParameterError("name", f"{settings.runs / taken} exists already; choose another name")
    checked = training.check(settings, params, run=name, sweep=sweep, choices=choices)
    lines = [json.dumps(choice, sort_keys=True) for choice in choices]
    if params.dry_run:
        facts = training.dry(settings, params, checked, sweep=sweep).values
        return Facts({**facts, "runs": _listing(name, lines)})
    environment = training.provide(settings, params, checked, log)
    with project.copied(settings, params, name, log) as kept:
        checked = training.with_code(checked, kept)
        facts = training.facts_of(params, checked, environment, kept)
        stamp = control.now().strftime("%Y-%m-%dT%H:%M:%SZ")
        record = {"format": 1, "job_id": None, "submitted": stamp, **facts}
        texts = training.texts_of(settings, params, checked, environment, sweep=sweep)
        texts["sweep.jsonl"] = "".join(f"{line}\n" for line in lines)
        texts["job.json"] = _dump({**record, "kind": "sweep", "run": name, "count": len(choices)})
        elements = [
            {
                "args": "".join(f"{word}\n" for word in precheck.words(choice)),
                "job.json": _dump({**record, "run": f"{name}-{number}", "sweep": name, "choice": line}),
            }
            for number, (choice, line) in enumerate(zip(choices, lines, strict=True))
        ]
        place: dict[str, object] = {"workspace": str(settings.folder), "run": name}
        folders.call(settings, run_files.create_sweep, timeout_s=120, **place, texts=texts, elements=elements)
        folder = settings.runs / name
        if kept is not None:
            kept.place()
        try:
            if tokens.is_wanted(settings, params):
                tokens.deliver(settings, name)
            job_id = jobs.submit(str(folder / "job.sbatch"))
        except (jobs.SlurmError, folders.WorkspaceError) as e:
            tokens.drop(settings, name)
            folders.call(settings, run_files.remove_sweep, timeout_s=120, **place, count=len(choices))
            if isinstance(e, folders.WorkspaceError):
                raise
            raise checks.refused(str(e)) from e
        folders.call(settings, run_files.number_sweep, timeout_s=120, **place, count=len(choices), job_id=job_id)
    settings.claims.drop(name)
    log(f"job {job_id}: sweep {name}, {len(choices)} runs, each on {training.describe(checked.request)}")
    results = {
        "job-id": str(job_id),
        "sweep": name,
        "run-dir": str(folder),
        "script": str(folder / "job.sbatch"),
        "count": str(len(choices)),
        "runs": _listing(name, lines),
    }
    if not params.wait:
        return results
    return _follow(settings, name, results, log, timeout_s=params.wait_timeout)


def is_sweep(settings: Settings, run: str) -> bool:
    """Return whether this name is a sweep's."""
    read = folders.call(settings, run_files.read_run, workspace=str(settings.folder), run=run, job_id=None)
    job: folders.Json = read["job"] or {}
    return job.get("kind") == "sweep"


def show(settings: Settings, name: str) -> tuple[Results, list[dict[str, typing.Any]]]:
    """Return how a sweep stands, as a table, and the same as rows with a `state` each."""
    read = folders.call(settings, run_files.read_sweep, workspace=str(settings.folder), run=name)
    try:
        known = {job.job_id: job for job in jobs.jobs(user=settings.user, name=name)}
    except jobs.SlurmError as e:
        raise TrainerError(f"Slurm: {e}") from e
    waiting = known.get(read["job_id"])
    silent = [row["job_id"] for row in read["rows"] if row["job_id"] not in known and row["outcome"] is None]
    accounted = (
        jobs.accounted([number for number in silent if number is not None], user=settings.user) if silent else {}
    )
    rows: list[dict[str, typing.Any]] = []
    for row in read["rows"]:
        if row["job_id"] is None:
            state = waiting.state if waiting and waiting.is_active else "CANCELLED"
        elif job := known.get(row["job_id"]) or accounted.get(row["job_id"]):
            state = job.state
        else:
            state = control.OUTCOMES.get(row["outcome"], "UNKNOWN")
        rows.append({**row, "state": state})
    best = _best(rows)
    table = [("RUN", "JOB-ID", "STATE", "STEP", "LOSS", "OPTIONS")]
    for row in rows:
        loss = f"{row['loss']:.6g}" if isinstance(row["loss"], int | float) else ""
        loss += " *" if row is best else ""
        step = str(row["step"]) if isinstance(row["step"], int) else ""
        table.append((row["run"], str(row["job_id"] or ""), row["state"], step, loss, str(row["choice"])))
    counts = collections.Counter(row["state"] for row in rows)
    results = {"sweep": name, "state": whole(counts), "states": counted(counts), "runs": control.aligned(table)}
    if best is not None:
        words = control.printable(str(best["choice"]))
        results |= {"best-run": best["run"], "best-loss": f"{best['loss']:.6g}", "best-options": words}
    return results, rows


def counted(states: collections.Counter[str]) -> str:
    """Return how many runs are in which state, in words."""
    return ", ".join(f"{count} {state}" for state, count in sorted(states.items()))


def whole(states: collections.Counter[str]) -> str:
    """Return the state of a sweep as a whole: at work as long as one of its runs is, then as good as the worst."""
    if at_work := set(jobs.ACTIVE) & set(states):
        return "PENDING" if at_work == {"PENDING"} and len(states) == 1 else "RUNNING"
    if len(states) == 1:
        return next(iter(states))
    return "FAILED" if set(states) - {"COMPLETED", "CANCELLED"} else "CANCELLED"


def _best(rows: list[dict[str, typing.Any]]) -> dict[str, typing.Any] | None:
    """Return the run that ended well with the least loss."""
    numbered = [row for row in rows if isinstance(row["loss"], int | float) and math.isfinite(row["loss"])]
    finished = [row for row in numbered if row["state"] == "COMPLETED"]
    return min(finished, key=lambda row: row["loss"], default=None)


def _follow(settings: Settings, name: str, results: Results, log: Log, *, timeout_s: float) -> Results:
    """Wait for all runs of a sweep and return their table. Raises TrainerError unless all ended well."""
    began = reported_at = time.monotonic()
    states = ""
    waits = control.Waits(settings, log)
    while True:
        shown_now, rows = show(settings, name)
        if not any(row["state"] in jobs.ACTIVE for row in rows):
            break
        waits.note()
        if shown_now["states"] != states or time.monotonic() - reported_at > REPORT_S:
            states, reported_at = shown_now["states"], time.monotonic()
            ended = sum(row["state"] not in jobs.ACTIVE for row in rows)
            log(tables.Step(f"sweep {name}: {states}", f"sweep {name}", states, done=ended, total=len(rows)))
        if time.monotonic() - began > timeout_s:
            text = f"no end after {timeout_s:g} s: {states}; it goes on"
            raise TrainerError(text, remedy=Command("show", arguments=(name,)), results=results | shown_now)
        control.pause(2.0)
    tokens.drop(settings, name)
    results |= shown_now
    bad = [row for row in rows if row["state"] != "COMPLETED"]
    if bad:
        remedy = Command("show", arguments=(bad[0]["run"],))
        raise TrainerError(f"{len(bad)} of {len(rows)} runs failed", remedy=remedy, results=results)
    return results


def _choices(settings: Settings, params: models.SubmitSweep) -> list[Choice]:
    """List the options of each run. Raises ParameterError."""
    if bool(params.grid.strip()) == (params.file is not None):
        raise ParameterError("grid", "give either grid or file; a grid is such as lr=0.001,0.003 batch=8,16")
    if params.file is None:
        choices = _product(params.grid)
    else:
        checks.check_inside(settings, "file", params.file, kinds=("file",))
        try:
            lines = folders.call(settings, operations.read_lines, path=params.file, limit=_MAX_FILE_BYTES)["lines"]
        except folders.WorkspaceError as e:
            raise ParameterError("file", str(e)) from e
        choices = [_parse(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    name = "grid" if params.file is None else "file"
    if not 1 <= len(choices) <= fields.MAX_SWEEP:
        raise ParameterError(name, f"makes {len(choices)} runs; from 1 to {fields.MAX_SWEEP} are allowed")
    return choices


def _product(grid: str) -> list[Choice]:
    """Combine the grid's values, up to one more combination than is allowed."""
    axes = [(name, values.split(",")) for name, _, values in (word.partition("=") for word in grid.split())]
    combinations = itertools.product(*(values for _, values in axes))
    bounded = itertools.islice(combinations, fields.MAX_SWEEP + 1)
    return [dict(zip((name for name, _ in axes), values, strict=True)) for values in bounded]


def _parse(number: int, line: str) -> Choice:
    """Parse one line of a sweep's file. Raises ParameterError."""
    where = f"line {number}"
    try:
        value: object = json.loads(line)
    except (ValueError, RecursionError):
        raise ParameterError("file", f"{where}: {shown(line)} is not JSON; write {{'lr': 0.001}} with \"") from None
    if not isinstance(value, dict) or not value:
        raise ParameterError("file", f"{where}: {shown(line)} is not an object of options")
    choice: Choice = {}
    for name, given in typing.cast(dict[str, object], value).items():
        if not _OPTION.fullmatch(name):
            raise ParameterError("file", f"{where}: {shown(name)} is not an option; small letters, digits and -")
        if not isinstance(given, str | int | float | bool):
            raise ParameterError("file", f"{where}: {name} must be a text, a number, true or false")
        if isinstance(given, str) and not _VALUE.fullmatch(given):
            allowed = "letters, digits and . _ + = / : , @ % ^ -, up to 512"
            raise ParameterError("file", f"{where}: {name}: {shown(given)} is not allowed; {allowed}")
        choice[name] = given
    return choice


def _listing(name: str, lines: list[str]) -> str:
    rows = [("RUN", "OPTIONS"), *((f"{name}-{number}", line) for number, line in enumerate(lines))]
    return tables.Table(rows, "\n".join(" ".join(row) for row in rows[1:]))


def _dump(record: dict[str, object]) -> str:
    return json.dumps(record, indent=1, sort_keys=True) + "\n"
