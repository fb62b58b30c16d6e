"""benchmark-collectives: measure collectives, and keep the figures as the baseline."""

import dataclasses
import re
import shutil
import typing

from ddp.environment import store
from ddp.options import fields, models
from ddp.prediction import baseline, round_trips
from ddp.problem import Command, Results
from ddp.results.progress import Log
from ddp.run import logs, untrusted
from ddp.settings import Settings
from ddp.slurm import cluster
from ddp.submit import control, following, resources, scripts
from ddp.workspace import operations
from ddp.workspace.folders import Workspace

KEEPS = 0.9  # a measurement below this share of the baseline does not replace it
# Of nccl-tests
_TABLE = re.compile(r"^# nThread.*?^# Collective test concluded[^\n]*", re.DOTALL | re.MULTILINE)
_FLAGS = "collective min_bytes max_bytes step_factor iters warmup_iters datatype".split()


def benchmark_collectives(
    settings: Settings, params: models.BenchmarkCollectives, log: Log
) -> Results:
    """Measure, and store the figures unless they are worse.

    Raises Problem unless the job completes in time.
    """
    submitted, results = _measure(settings, params, log, kind="collectives")
    return results | _conclude(settings, submitted, log)


def measure_pair(
    settings: Settings, params: models.BenchmarkCollectives, log: Log, *, kind: str
) -> float | None:
    """Measure, and return the slowest figure's share of the baseline; None without a baseline.

    The run is removed. Raises Problem unless the job completes in time; then the run stays.
    """
    submitted, _ = _measure(settings, params, log, kind=kind)
    workspace = settings.workspace
    measured = workspace.read_json(f"{submitted.folder}/{baseline.FILE}")
    fresh = baseline.entries_of(measured, submitted.run)
    old = {operations.shape(entry): entry for entry in baseline.read(workspace)}
    first = [entry for entry in fresh if operations.shape(entry) not in old]
    if first:
        path = str(workspace.baselines / baseline.FILE)
        workspace.do(operations.store_baseline, path=path, entries=first)
    workspace.do(shutil.rmtree, path=submitted.folder, ignore_errors=True)
    shares: list[float] = []
    for entry in fresh:
        before = old.get(operations.shape(entry), {}).get("average_busbw")
        if before:
            shares.append(entry["average_busbw"] / before)
    return min(shares, default=None)


def _measure(
    settings: Settings, params: models.BenchmarkCollectives, log: Log, *, kind: str
) -> tuple[control.Submitted, Results]:
    """Submit the job and wait for its end."""
    partitions = cluster.partitions(params.reservation)
    asked = as_training(params)
    request = resources.training(asked, partitions)
    run = control.new_name(settings.workspace, kind)
    run_dir = settings.workspace.runs / run
    files = ("--run-dir", str(run_dir), "--json", str(run_dir / baseline.FILE))
    command = ("--module", "ddptrain", "collectives", *_flags(params), *files)
    program = scripts.Program(command, leaves_outcome=True)
    job = scripts.TrainingJob(settings, request, asked, run, program)
    script = job.texts(store.NOT_INSTALLED)["job.sbatch"]
    cluster.judge(script, request.partition, contact=settings.contact)
    environment = store.Store(settings).ensure(log)
    facts: dict[str, object] = {
        "kind": "collectives",
        "args": " ".join(_flags(params)),
        "ranks_per_node": request.ranks_per_node,
        "environment": environment.hash,
        "torch": environment.torch,
        "request": dataclasses.asdict(request),
    }
    submitted = control.Submission(settings.workspace, run).submit(
        job.texts(environment), facts, again=False
    )
    log(f"job {submitted.job_id} measures {params.collective} on {request.num_nodes} nodes")
    results = following.follower(settings, submitted, log).follow(timeout_s=params.wait_timeout)
    return submitted, results


def _conclude(settings: Settings, submitted: control.Submitted, log: Log) -> Results:
    """Compare the figures with the baseline, and store those that are not worse."""
    workspace = settings.workspace
    measured = workspace.read_json(f"{submitted.folder}/{baseline.FILE}")
    fresh = baseline.entries_of(measured, submitted.run)
    old = {operations.shape(entry): entry for entry in baseline.read(workspace)}
    comparison: list[str] = []
    stored: list[baseline.Json] = []
    for entry in fresh:
        verdict, is_slower = _compare(entry, old.get(operations.shape(entry)))
        if is_slower:
            log(f"{verdict}: slower; to find out why: {settings.render(Command('doctor'))}")
        else:
            stored.append(entry)
        comparison.append(verdict + ("; not stored" if is_slower else "; stored"))
    round_trips.store(workspace, measured.get("trips_ms", {}))
    path = str(workspace.baselines / baseline.FILE)
    if stored:
        workspace.do(operations.store_baseline, path=path, entries=stored)
    interface = measured["iface"] or "its own choice of interface"
    return {
        "table": _printed(workspace, submitted),
        "average-busbw": ", ".join(f"{entry['average_busbw']:.6g}" for entry in fresh),
        "backend": f"{measured['backend']} over {interface}",
        "comparison": "\n".join(comparison),
        "baseline": path,
    }


def _compare(entry: baseline.Json, before: baseline.Json | None) -> tuple[str, bool]:
    """Return a figure compared with the baseline's, and whether it is too slow to replace it."""
    figure = f"{entry['collective']}: {entry['average_busbw']:.4g} GB/s"
    if before is None:
        return f"{figure}, the first of its kind", False
    of = f"the baseline of {before['created']} ({before['average_busbw']:.4g} GB/s)"
    ratio = 1.0
    if before["average_busbw"]:
        ratio = entry["average_busbw"] / before["average_busbw"]
    return f"{figure}, {ratio:.2f} of {of}", ratio < KEEPS


def _printed(workspace: Workspace, submitted: control.Submitted) -> str:
    """Return the table that rank 0 printed."""
    about: dict[str, typing.Any] = {"job_id": submitted.job_id, "lines": 2000, "rank": 0}
    printed = workspace.do(logs.read_log, path=workspace.runs / submitted.run, **about)[1]
    lines = [untrusted.printable(line).rstrip() for line in printed if not line.startswith("[")]
    return "\n".join(_TABLE.findall("\n".join(lines)))


def _flags(params: models.BenchmarkCollectives) -> list[str]:
    words: list[str] = []
    for name in _FLAGS:
        value = getattr(params, name)
        if value is not None:
            words += [f"--{name.replace('_', '-')}", str(value)]
    return words


def as_training(params: models.BenchmarkCollectives | models.Plan) -> models.SubmitDdp:
    """Return the parameters that a training has, too, as a training's."""
    names = set(fields.directives(type(params)))
    names |= {"env", "fabric", "gpus_per_node", "cpus_per_task", "sbatch"}
    given: dict[str, object] = {}
    for name in names:
        value = getattr(params, name, None)
        if value is not None:
            given[name.replace("_", "-")] = value
    return fields.parse(models.SubmitDdp, given)
