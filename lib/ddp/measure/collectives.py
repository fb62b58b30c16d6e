"""benchmark-collectives: nccl-tests' table over the chosen nodes, kept as the cluster's baseline."""

import dataclasses
import typing

from ddp.base import Log, ParameterError, Results, Settings, TrainerError
from ddp.environment import environments
from ddp.options import fields, models
from ddp.runs import control, run_files
from ddp.submit import checks, resources, scripts
from ddp.workspace import folders, operations

Json = dict[str, typing.Any]
BASELINE = "collectives.json"
KEEPS = 0.9  # a measurement below this share of the baseline does not replace it by itself
_BEGINS, _ENDS = "# nThread", "# Collective test concluded"


@dataclasses.dataclass(frozen=True)
class Shape:
    """What makes two measurements comparable."""

    collective: str
    backend: str  # nccl or gloo
    nodes: int
    world_size: int


def benchmark_collectives(settings: Settings, params: models.BenchmarkCollectives, log: Log) -> Results:
    """Measure, and store the figures where they are the first or no worse than the stored ones. Raises TrainerError."""
    submitted, results = measure(settings, params, log)
    return results | _conclude(settings, submitted, params.store, log)


def measure(settings: Settings, params: models.BenchmarkCollectives, log: Log) -> tuple[control.Submitted, Results]:
    """Run the job; return it with its results. Raises TrainerError where it did not end well, or not in time."""
    _check_sizes(params)
    partitions = checks.partitions(params.reservation)
    asked = _as_job(params)
    request = resources.training(asked, partitions)
    checks.admission(settings, params, resources.choose_partition(request.partition, partitions))
    run = control.new_name(settings, "collectives")
    folder = settings.runs / run
    program = scripts.Program(_command(params, folder=str(folder)), leaves_outcome=True)

    def texts(environment: environments.Environment) -> dict[str, str]:
        return scripts.training(settings, request, asked, environment, run=run, program=program)

    checks.judge(texts(environments.NOT_INSTALLED)["job.sbatch"])
    environment = environments.ensure(
        settings, partitions, log, gpus=request.gpus_per_node > 0, reservation=params.reservation
    )
    facts: dict[str, object] = {
        "kind": "collectives",
        "args": " ".join(_flags(params)),
        "ranks_per_node": request.ranks_per_node,
        "environment": environment.manifest.hash,
        "torch": environment.manifest.torch,
        "request": dataclasses.asdict(request),
    }
    submitted = control.submit(settings, run, texts(environment), facts, again=False)
    log(f"job {submitted.job_id} measures {params.collective} on {request.num_nodes} nodes")
    return submitted, control.follow(settings, submitted, log, timeout_s=params.wait_timeout)


def _check_sizes(params: models.BenchmarkCollectives) -> None:
    if params.min_bytes and params.max_bytes and _bytes(params.min_bytes) > _bytes(params.max_bytes):
        raise ParameterError("min-bytes", f"{params.min_bytes} is more than max-bytes={params.max_bytes}; swap them")


def _bytes(text: str) -> int:
    return int(text.rstrip("KMG")) << {"K": 10, "M": 20, "G": 30}.get(text[-1], 0)


def baseline_path(settings: Settings) -> str:
    """Return the file that holds what was measured."""
    return str(settings.baselines / BASELINE)


def read_baseline(settings: Settings) -> list[Json]:
    """Return the entries that this user stored, or else the trainer's; none where nothing was measured."""
    for folder in settings.folders:
        path = str(folder / "baselines" / BASELINE)
        if entries := folders.call(settings, operations.read_baseline, path=path)["entries"]:
            return entries
    return []


def entries(measured: Json, run: str) -> list[Json]:
    """Return what is stored of a measurement: an entry for each collective."""
    found: list[Json] = []
    for one in measured["collectives"]:
        points: list[Json] = []
        for row in one["results"]:
            figures = row["in_place"] or row["out_of_place"]  # DDP reduces in place
            points.append(
                {
                    "bytes": row["size"],
                    "time_us": figures["time"],
                    "algbw": figures["alg_bw"],
                    "busbw": figures["bus_bw"],
                }
            )
        found.append(
            {
                "collective": one["collective"],
                "backend": measured["backend"],
                "nodes": measured["nodes"],
                "world_size": measured["world_size"],
                "hosts": sorted({str(rank.get("host")) for rank in measured["ranks"]}),
                "device": str(measured["ranks"][0].get("device")) if measured["ranks"] else "",
                "iface": measured["iface"],
                "torch": measured["torch"],
                "created": measured["created"],
                "run": run,
                "average_busbw": one["average_bus_bandwidth"]["bandwidth"],
                "points": points,
            }
        )
    return found


def shape(entry: Json) -> Shape:
    """Return what another entry must share to be comparable."""
    return Shape(str(entry["collective"]), str(entry["backend"]), int(entry["nodes"]), int(entry["world_size"]))


def read_measurement(settings: Settings, submitted: control.Submitted) -> tuple[Json, list[Json]]:
    """Return what a job measured, and what of it is stored: one entry at least. Raises TrainerError."""
    path = f"{submitted.run_dir}/collectives.json"
    measured = folders.call(settings, operations.read_json, path=path)
    try:
        fresh = entries(measured, submitted.run)
        return measured, [fresh[0], *fresh[1:]]
    except (KeyError, TypeError, IndexError) as e:
        raise TrainerError(f"{path} is not a measurement: {e!r}; measure again") from e


def read_printed(settings: Settings, submitted: control.Submitted) -> list[str]:
    """Return the last lines that rank 0 printed."""
    return folders.call(
        settings,
        run_files.read_log, workspace=str(settings.folder), run=submitted.run, job_id=submitted.job_id,
        lines=2000, rank=0,
    )["lines"]  # fmt: skip


def _conclude(settings: Settings, submitted: control.Submitted, store: str, log: Log) -> Results:
    measured, fresh = read_measurement(settings, submitted)
    old = {shape(entry): entry for entry in read_baseline(settings)}
    told: list[str] = []
    kept: list[Json] = []
    for entry in fresh:
        before = old.get(shape(entry))
        name = str(entry["collective"])
        if before is None:
            verdict, keep = f"{name}: {entry['average_busbw']:.4g} GB/s, the first of its kind", store != "never"
        else:
            ratio = entry["average_busbw"] / before["average_busbw"] if before["average_busbw"] else 1.0
            verdict = (
                f"{name}: {entry['average_busbw']:.4g} GB/s, {ratio:.2f} of the baseline of {before['created']} "
                f"({before['average_busbw']:.4g} GB/s)"
            )
            keep = store == "always" or (store == "auto" and ratio >= KEEPS)
            if ratio < KEEPS:
                log(f"{verdict}: slower; {settings.typed('doctor')} says what may be wrong")
        told.append(verdict + ("; stored" if keep else "; not stored"))
        if keep:
            kept.append(entry)
    if kept:
        settings.claims.wait(BASELINE, timeout_s=60)  # the file is read, and written with these entries
        folders.call(settings, operations.store_baseline, path=baseline_path(settings), entries=kept)
        settings.claims.drop(BASELINE)
    table = _printed(settings, submitted)
    average = ", ".join(f"{entry['average_busbw']:.6g}" for entry in fresh)
    return {
        "table": table,
        "average-busbw": average,
        "backend": f"{measured['backend']} over {measured['iface'] or 'its own choice of interface'}",
        "comparison": "\n".join(told),
        "baseline": baseline_path(settings),
        "plot": f"{submitted.run_dir}/collectives.png",
    }


def _printed(settings: Settings, submitted: control.Submitted) -> str:
    """Return the table as rank 0 printed it."""
    lines: list[str] = []
    inside = False
    for line in read_printed(settings, submitted):
        inside = inside or line.startswith(_BEGINS)
        if inside and not line.startswith("["):
            lines.append(control.printable(line).rstrip())
        if line.startswith(_ENDS):
            inside = False
    return "\n".join(lines)


def _command(params: models.BenchmarkCollectives, *, folder: str) -> tuple[str, ...]:
    files = ("--run-dir", folder, "--json", f"{folder}/collectives.json", "--plot", f"{folder}/collectives.png")
    return ("--module", "ddptrain", "collectives", *_flags(params), *files)


def _flags(params: models.BenchmarkCollectives) -> tuple[str, ...]:
    given = {
        "--collective": params.collective, "--min-bytes": params.min_bytes, "--max-bytes": params.max_bytes,
        "--step-factor": params.step_factor, "--iters": params.iters, "--warmup-iters": params.warmup_iters,
        "--datatype": params.datatype,
    }  # fmt: skip
    return tuple(word for flag, value in given.items() if value is not None for word in (flag, str(value)))


def _as_job(params: models.BenchmarkCollectives) -> fields.SubmitDdp:
    """Return the parameters that say where to run, as those of a training."""
    names = (
        "partition", "time_limit", "account", "qos", "reservation", "nodes", "gpus_per_node", "constraint", "nodelist",
        "exclude", "env", "fabric",
    )  # fmt: skip
    given = {name.replace("_", "-"): getattr(params, name) for name in names}
    return fields.parse(fields.SubmitDdp, {name: value for name, value in given.items() if value is not None})
