"""sweep: one training many times with different options, as an array of jobs; each is a run like any other."""

import itertools
import json
import math
import time

from ddp.options import fields, models
from ddp.problem import Command, ParameterError, Problem, Results, UnfinishedError
from ddp.project import copies
from ddp.results import tables
from ddp.results.progress import REPORT_S, Log
from ddp.results.result import Answer, Result
from ddp.run import catalog, creation, folder
from ddp.run.model import State
from ddp.settings import Settings
from ddp.slurm import cluster, jobs, outages
from ddp.submit import control, resources, scripts, tokens, training

Choice = dict[str, str]


def submit_sweep(settings: Settings, params: models.SubmitSweep, log: Log) -> Answer:
    """Submit the runs of a sweep; with `wait` follow them to their end."""
    workspace = settings.workspace
    choices = _choices(params.grid)
    array = scripts.Array(len(choices), min(params.parallel or len(choices), len(choices)))
    name = params.name or control.new_name(workspace, "sweep")
    for taken in (name, f"{name}-0"):
        path = workspace.runs / taken
        if workspace.locate(str(path)).kind == "absent":
            continue
        if not workspace.do(creation.is_unfinished, path=path, sweep="" if taken == name else name):
            raise ParameterError("name", f"{path} exists already; choose another name")
    resources.check_array("grid", array.size, cluster.partitions())
    checked = training.check(settings, params, run=name, array=array, choices=choices)
    lines = [json.dumps(choice, sort_keys=True) for choice in choices]
    if params.dry_run:
        dry = training.dry(checked)
        runs = {f"{name}-{number}": choice for number, choice in enumerate(choices)}
        return Result({**dry.shown, "runs": _listing(name, choices)}, {**dry.values, "runs": runs})
    environment = training.provide(checked, log)
    with copies.copied(workspace, params, name, log) as kept:
        facts = checked.facts(environment, kept)
        texts = {
            **checked.texts(environment, kept),
            "sweep.jsonl": "".join(f"{line}\n" for line in lines),
        }
        elements: list[dict[str, str]] = []
        for number, (choice, line) in enumerate(zip(choices, lines, strict=True)):
            record = control.new_record(
                f"{name}-{number}", {**facts, "sweep": name, "choice": line}
            )
            words = "".join(f"{word}\n" for word in checked.workload.options_of(choice))
            elements.append({"args": words, folder.RECORD: folder.dump(record)})
        if kept is not None:
            log(
                f"all runs start in one folder, {kept.start.folder}: let each write to $RUN_DIR, which is its own"
            )
        facts |= {"kind": "sweep", "count": len(choices)}
        submitted = control.Submission(workspace, name).submit(
            texts,
            facts,
            again=False,
            token=checked.token,
            kept=kept,
            secrets=checked.secrets,
            elements=elements,
        )
    log(
        f"job {submitted.job_id}: sweep {name}, {len(choices)} runs, each on {training.describe(checked.request)}"
    )
    results = {
        key: text for key, text in submitted.as_results().items() if key not in ("run", "log")
    }
    results |= {"sweep": name, "count": str(len(choices)), "runs": _listing(name, choices)}
    if not params.wait:
        return results
    return _follow(settings, name, results, log, timeout_s=params.wait_timeout)


def _follow(
    settings: Settings, name: str, results: Results, log: Log, *, timeout_s: float
) -> Results:
    """Wait for all runs of a sweep and return their table. Raises Problem unless all ended well."""
    workspace = settings.workspace
    settings.wait.begin(name, results["job-id"])
    began = reported_at = time.monotonic()
    states = ""
    slurm = outages.PatientClient(log)
    while True:
        queue = slurm.ask(lambda: jobs.jobs(user=workspace.user, name=name))
        has_answer = not isinstance(queue, jobs.Silence)
        shown_now, runs = catalog.show_sweep(workspace, name, queue)
        if has_answer and not any(run.state.is_active for run in runs):
            break
        is_due = shown_now["states"] != states or time.monotonic() - reported_at > REPORT_S
        if has_answer and is_due:
            states, reported_at = shown_now["states"], time.monotonic()
            log(tables.Step(f"sweep {name}: {states}", f"sweep {name}"))
        if settings.wait.is_over:
            raise UnfinishedError(name, results | shown_now)
        if time.monotonic() - began > timeout_s:
            show = Command("show", arguments=(name,))
            text = f"no end after {timeout_s:g} s: {states}; the sweep continues"
            raise Problem(text, remedy=show, results=results | shown_now)
        control.pause(2.0)
    tokens.drop(workspace, name)
    results |= shown_now
    if bad := [run for run in runs if run.state != State.COMPLETED]:
        show = Command("show", arguments=(bad[0].name,))
        raise Problem(
            f"{len(bad)} of {len(runs)} runs did not complete", remedy=show, results=results
        )
    return results


def _choices(grid: str) -> list[Choice]:
    """Combine the grid's values: the options of each run. Raises ParameterError."""
    axes = [
        (name, values.split(","))
        for name, _, values in (word.partition("=") for word in grid.split())
    ]
    count = math.prod(len(values) for _, values in axes)
    if not axes or count > fields.MAX_SWEEP:
        most = f"from 1 to {fields.MAX_SWEEP} are allowed, such as lr=0.001,0.003 batch=8,16"
        raise ParameterError("grid", f"makes {count if axes else 0} runs; {most}")
    combinations = itertools.product(*(values for _, values in axes))
    return [dict(zip((name for name, _ in axes), values, strict=True)) for values in combinations]


def _listing(name: str, choices: list[Choice]) -> str:
    words = (
        " ".join(f"{option}={value}" for option, value in sorted(choice.items()))
        for choice in choices
    )
    rows = [("RUN", "OPTIONS"), *((f"{name}-{number}", line) for number, line in enumerate(words))]
    return tables.Table(rows, "\n".join(" ".join(row) for row in rows[1:]))
