"""sweep: one training many times with different options, as an array of jobs."""

import dataclasses
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
from ddp.run import catalog, folder
from ddp.run.model import State
from ddp.settings import Settings
from ddp.slurm import cluster, jobs, outages
from ddp.submit import control, resources, scripts, tokens, training, workloads
from ddp.workspace.folders import Manifest, Workspace

Choice = dict[str, str]
Facts = dict[str, object]


@dataclasses.dataclass(frozen=True)
class _Sweep:
    """The runs of a sweep: its name, and the options of each run."""

    name: str
    choices: list[Choice]

    @property
    def lines(self) -> list[str]:
        """The options of each run as JSON."""
        return [json.dumps(choice, sort_keys=True) for choice in self.choices]

    def name_of(self, number: int) -> str:
        """Return the name of a run."""
        return f"{self.name}-{number}"

    def by_name(self) -> dict[str, Choice]:
        """Return the options of each run by its name."""
        return {self.name_of(number): choice for number, choice in enumerate(self.choices)}

    def elements(self, checked: training.Checked, facts: Facts) -> list[dict[str, str]]:
        """Render the files of each run."""
        found: list[dict[str, str]] = []
        for number, line in enumerate(self.lines):
            about = {**facts, "sweep": self.name, "choice": line}
            record = control.new_record(self.name_of(number), about)
            words = checked.workload.options_of(self.choices[number])
            args = "".join(f"{word}\n" for word in words)
            found.append({"args": args, folder.RECORD: folder.dump(record)})
        return found

    def describe(self) -> str:
        """Return the table of the runs and their options."""
        rows = [("RUN", "OPTIONS")]
        for name, choice in self.by_name().items():
            words = [f"{option}={value}" for option, value in sorted(choice.items())]
            rows.append((name, " ".join(words)))
        return tables.Table(rows, "\n".join(" ".join(row) for row in rows[1:]))


def submit_sweep(settings: Settings, params: models.SubmitSweep, log: Log) -> Answer:
    """Submit the runs of a sweep; with `wait` follow them to their end."""
    workspace = settings.workspace
    choices = _choices(params.grid)
    label = workloads.label_of_function(params) or "sweep"
    sweep = _Sweep(params.name or control.new_name(workspace, label), choices)
    _check_unused(workspace, sweep)
    parallel = min(params.parallel or len(choices), len(choices))
    array = scripts.Array(len(choices), parallel)
    resources.check_array("grid", array.size, cluster.partitions())
    checked = training.check(settings, params, run=sweep.name, array=array, choices=choices)
    if params.dry_run:
        dry = training.dry(checked)
        shown = {**dry.shown, "runs": sweep.describe()}
        return Result(shown, {**dry.values, "runs": sweep.by_name()})

    environment = training.provide(checked, log)
    checked = training.with_copier(checked, log)
    submitted = _submit(checked, sweep, environment, log)
    what = f"sweep {sweep.name}, {len(choices)} runs"
    log(f"job {submitted.job_id}: {what}, each on {training.describe(checked.request)}")
    results = submitted.as_results()
    del results["run"], results["log"]
    results |= {"sweep": sweep.name, "count": str(len(choices)), "runs": sweep.describe()}
    if not params.wait:
        return results
    return _follow(settings, sweep.name, results, log, timeout_s=params.wait_timeout)


def _check_unused(workspace: Workspace, sweep: _Sweep) -> None:
    """Raise ParameterError if the sweep or its first run exists."""
    for name, parent in ((sweep.name, ""), (sweep.name_of(0), sweep.name)):
        submission = control.Submission(workspace, name)
        if not submission.is_new() and not submission.is_unfinished(parent):
            text = f"{submission.path} exists already; choose another name"
            raise ParameterError("name", text)


def _submit(
    checked: training.Checked, sweep: _Sweep, environment: Manifest, log: Log
) -> control.Submitted:
    """Copy the project, and submit the array."""
    workspace = checked.settings.workspace
    with copies.copied(workspace, checked.params, sweep.name, log) as kept:
        if kept is not None:
            what = f"all runs start in one folder, {kept.start.folder}"
            log(f"{what}: let each write to $RUN_DIR, which is its own")
        texts = checked.texts(environment, kept)
        texts["sweep.jsonl"] = "".join(f"{line}\n" for line in sweep.lines)
        facts = checked.facts(environment, kept)
        elements = sweep.elements(checked, facts)
        facts |= {"kind": "sweep", "count": len(sweep.choices)}
        return control.Submission(workspace, sweep.name).submit(
            texts,
            facts,
            again=False,
            token=checked.token,
            kept=kept,
            secrets=checked.secrets,
            notify=checked.notify,
            function=checked.params.function or "",
            elements=elements,
        )


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
        settings.wait.pause(2.0)
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
    axes: dict[str, list[str]] = {}
    for word in grid.split():
        name, _, values = word.partition("=")
        axes[name] = values.split(",")
    count = math.prod(len(values) for values in axes.values())
    if not axes or count > fields.MAX_SWEEP:
        most = f"from 1 to {fields.MAX_SWEEP} are allowed, such as lr=0.001,0.003 batch=8,16"
        raise ParameterError("grid", f"makes {count if axes else 0} runs; {most}")
    combinations = itertools.product(*axes.values())
    return [dict(zip(axes, values, strict=True)) for values in combinations]
