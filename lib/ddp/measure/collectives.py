"""benchmark-collectives: measure collectives over the chosen nodes, and keep them as the cluster's baseline."""

import dataclasses
import functools
import re
import typing

from ddp.environment import environments
from ddp.options import fields, models
from ddp.problem import Command, Results
from ddp.results.progress import Log
from ddp.run import folder, reading
from ddp.settings import Settings
from ddp.slurm import cluster
from ddp.submit import control, resources, scripts
from ddp.workspace import operations
from ddp.workspace.folders import Workspace

Json = dict[str, typing.Any]
BASELINE = "collectives.json"
KEEPS = 0.9  # a measurement below this share of the baseline does not replace it
_TABLE = re.compile(
    r"^# nThread.*?^# Collective test concluded[^\n]*", re.DOTALL | re.MULTILINE
)  # of nccl-tests


def benchmark_collectives(
    settings: Settings, params: models.BenchmarkCollectives, log: Log
) -> Results:
    """Measure, and store the figures unless they are worse. Raises Problem unless the job completes in time."""
    partitions = cluster.partitions(params.reservation)
    asked = as_training(params)
    request = resources.training(asked, partitions)
    run = control.new_name(settings.workspace, "collectives")
    run_dir = settings.workspace.runs / run
    files = ("--run-dir", str(run_dir), "--json", str(run_dir / "collectives.json"))
    command = ("--module", "ddptrain", "collectives", *_flags(params), *files)
    program = scripts.Program(command, leaves_outcome=True)
    texts = functools.partial(scripts.training, settings, request, asked, run=run, program=program)
    cluster.judge(texts(environments.NOT_INSTALLED)["job.sbatch"], request.partition)
    environment = environments.ensure(settings, log)
    facts: dict[str, object] = {
        "kind": "collectives",
        "args": " ".join(_flags(params)),
        "ranks_per_node": request.ranks_per_node,
        "environment": environment.hash,
        "torch": environment.torch,
        "request": dataclasses.asdict(request),
    }
    submitted = control.submit(settings, run, texts(environment), facts, again=False)
    log(f"job {submitted.job_id} measures {params.collective} on {request.num_nodes} nodes")
    results = control.follow(settings, submitted, log, timeout_s=params.wait_timeout)
    return results | _conclude(settings, submitted, log)


def read_baseline(workspace: Workspace) -> list[Json]:
    """Read the entries that this user stored, or else the trainer's account; none if nothing was measured."""
    for place in workspace.folders:
        path = str(place / "baselines" / BASELINE)
        if entries := workspace.do(operations.read_baseline, path=path)["entries"]:
            return entries
    return []


def entries(measured: Json, run: str) -> list[Json]:
    """Turn a measurement into the entries of a baseline, one for each collective."""
    about = {
        name: measured[name]
        for name in ("backend", "nodes", "world_size", "iface", "torch", "created")
    }
    found: list[Json] = []
    for one in measured["collectives"]:
        points: list[Json] = []
        for row in one["results"]:
            figures = row["in_place"] or row["out_of_place"]  # DDP reduces in place
            point = {
                "time_us": figures["time"],
                "algbw": figures["alg_bw"],
                "busbw": figures["bus_bw"],
            }
            points.append({"bytes": row["size"], **point})
        figures = {"average_busbw": one["average_bus_bandwidth"]["bandwidth"], "points": points}
        found.append(about | {"collective": one["collective"], "run": run} | figures)
    return found


def _conclude(settings: Settings, submitted: control.Submitted, log: Log) -> Results:
    workspace = settings.workspace
    measured = workspace.read_json(f"{submitted.folder}/collectives.json")
    fresh = entries(measured, submitted.run)
    old = {operations.shape(entry): entry for entry in read_baseline(workspace)}
    comparison: list[str] = []
    stored: list[Json] = []
    for entry in fresh:
        verdict, ratio = f"{entry['collective']}: {entry['average_busbw']:.4g} GB/s", 1.0
        if before := old.get(operations.shape(entry)):
            ratio = (
                entry["average_busbw"] / before["average_busbw"] if before["average_busbw"] else 1.0
            )
            of = f"the baseline of {before['created']} ({before['average_busbw']:.4g} GB/s)"
            verdict = f"{verdict}, {ratio:.2f} of {of}"
        else:
            verdict = f"{verdict}, the first of its kind"
        if ratio < KEEPS:
            log(f"{verdict}: slower; to find out why: {settings.render(Command('doctor'))}")
        else:
            stored.append(entry)
        comparison.append(verdict + ("; not stored" if ratio < KEEPS else "; stored"))
    path = str(workspace.baselines / BASELINE)
    if stored:
        workspace.do(operations.store_baseline, path=path, entries=stored)
    return {
        "table": _printed(workspace, submitted),
        "average-busbw": ", ".join(f"{entry['average_busbw']:.6g}" for entry in fresh),
        "backend": f"{measured['backend']} over {measured['iface'] or 'its own choice of interface'}",
        "comparison": "\n".join(comparison),
        "baseline": path,
    }


def _printed(workspace: Workspace, submitted: control.Submitted) -> str:
    about: dict[str, typing.Any] = {"job_id": submitted.job_id, "lines": 2000, "rank": 0}
    printed = workspace.do(folder.read_log, path=workspace.runs / submitted.run, **about)[1]
    text = "\n".join(
        reading.printable(line).rstrip() for line in printed if not line.startswith("[")
    )
    return "\n".join(_TABLE.findall(text))


def _flags(params: models.BenchmarkCollectives) -> tuple[str, ...]:
    names = (
        "collective",
        "min_bytes",
        "max_bytes",
        "step_factor",
        "iters",
        "warmup_iters",
        "datatype",
    )
    given = {f"--{name.replace('_', '-')}": getattr(params, name) for name in names}
    return tuple(
        word for flag, value in given.items() if value is not None for word in (flag, str(value))
    )


def as_training(params: models.BenchmarkCollectives | models.Plan) -> models.SubmitDdp:
    """Return the parameters that a training has, too, as a training's."""
    names = fields.directives(type(params)).keys() | {
        "env",
        "fabric",
        "gpus_per_node",
        "cpus_per_task",
        "sbatch",
    }
    given = {name.replace("_", "-"): getattr(params, name, None) for name in names}
    return fields.parse(
        models.SubmitDdp, {name: value for name, value in given.items() if value is not None}
    )
