"""plan: predict a step's memory, time and efficiency before anything is submitted.

A step takes the computation, and the part of the communication that the backward pass does not
hide: see ddp.prediction.step.
"""

from ddp.measure import collectives
from ddp.options import fields, models
from ddp.prediction import baseline, memory, step, workload
from ddp.problem import Command, ParameterError, Problem, Results
from ddp.results import tables
from ddp.results.progress import Log
from ddp.settings import Settings
from ddp.slurm import cluster
from ddp.submit import resources

BYTES_OF_STATE = 16  # of a parameter in fp32: itself, its gradient, and AdamW's two moments


def plan(settings: Settings, params: models.Plan, _: Log) -> Results:
    """Predict a step on nodes that need not exist yet. Raises Problem."""
    place = _place(params)
    workspace = settings.workspace
    work = workload.describe(workspace, settings.payload, params, on_gpu=place.on_gpu)
    results: Results = {
        "resources": str(place),
        "parameters": f"{work.parameters:,}",
        "memory": f"{BYTES_OF_STATE * work.parameters / 2**30:.2f} GiB a rank, and activations",
        "ways": _ways(work, place.world),
    }
    known = baseline.read(workspace)
    try:
        rate = workload.find_rate(workspace, params, work, on_gpu=place.on_gpu)
    except ParameterError as e:
        if params.parameters is not None:  # any model: its memory is what can be asked
            results["step"] = f"not predicted: {e.what}"
            return results
        e.results = results  # the memory is known all the same
        raise
    compute_s = step.compute_seconds(work, rate, known, on_gpu=place.on_gpu)
    results["compute"] = f"{_seconds(compute_s)} a step ({rate.source})"
    exposed_s = 0.0
    entry: baseline.Json | None = None
    if place.world > 1:
        entry = baseline.nearest(known, place.num_nodes, place.world, on_gpu=place.on_gpu)
        if entry is None:
            raise _unmeasured(place, params, results)
        overlap = step.overlap(on_gpu=place.on_gpu)
        comm_s, exposed_s = step.predict(
            work, compute_s, place.world, entry["points"], overlap=overlap
        )
        of = (
            f"baseline of {entry['world_size']} ranks on {entry['nodes']} nodes, {entry['created']}"
        )
        hidden = f"{_seconds(exposed_s)} not hidden"
        results["communication"] = f"{_seconds(comm_s)} a step, {hidden} ({of})"
    step_s = compute_s + exposed_s
    results["step"] = _seconds(step_s)
    results["tokens-per-second"] = f"{work.tokens * work.accumulate * place.world / step_s:.0f}"
    results["efficiency"] = f"{compute_s / step_s:.0%}"
    if place.num_nodes > 1 and entry is not None:
        options = step.choices(work, compute_s, place, entry["points"])
        results["table"] = _table(options)
        results["advice"] = _advice(options)
    return results


def _ways(work: workload.Workload, world: int) -> tables.Table:
    """Return the GiB that a rank needs by DDP, FSDP2 and LoRA."""
    model = memory.typical(work.parameters)
    if work.model:
        model = memory.Model(work.parameters, work.layers, work.width, work.vocab)

    head = "PARAMETERS GRADIENTS OPTIMIZER ACTIVATIONS SUM RECOMPUTED".split()
    rows = [["GIB A RANK", *head]]
    for need in memory.needs(model, work.tokens, world):
        amounts = (
            need.parameters,
            need.gradients,
            need.optimizer,
            need.activations,
            need.total,
            need.least,
        )
        sizes = [f"{amount / 2**30:.1f}" for amount in amounts]
        rows.append([need.way, *sizes])
    return tables.Table(rows)


def _table(options: list[step.Choice]) -> tables.Table:
    rows = [("OPTIONS", "MB A STEP", "STEP", "EFFICIENCY")]
    for one in options:
        megabytes = f"{one.step_bytes / 1e6:.4g}"
        rows.append((one.flags or "-", megabytes, _seconds(one.step_s), f"{one.efficiency:.0%}"))
    return tables.Table(rows)


def _advice(options: list[step.Choice]) -> str:
    best = step.recommended(options, options[0])
    if best is None:
        return ""
    shares = f"{best.efficiency:.0%} of the time, not {options[0].efficiency:.0%}"
    return f"{best.flags}: ranks compute {shares} (gpt only)"


def _place(params: models.Plan) -> step.Place:
    """Return the nodes and GPUs of the step; the defaults are those of a training."""
    num_nodes = params.nodes
    gpus = fields.num_gpus(params.gpus_per_node)
    partition = ""
    if num_nodes is None or gpus is None:
        asked = params.model_copy(update={"nodes": None, "gpus_per_node": None})
        there = resources.training(collectives.as_training(asked), cluster.partitions())
        partition = there.partition
        num_nodes = num_nodes or there.num_nodes
        gpus = there.gpus_per_node if gpus is None else gpus
    return step.Place(num_nodes, max(gpus, 1), gpus > 0, partition)


def _unmeasured(place: step.Place, params: models.Plan, results: Results) -> Problem:
    between = "several nodes" if place.num_nodes > 1 else "one node"
    devices = "GPUs" if place.on_gpu else "CPUs"
    text = f"no baseline of all_reduce over {between} on {devices}: the network is not measured"
    given = {"nodes": min(place.num_nodes, 2), "partition": params.partition}
    return Problem(text, remedy=Command("bench", given), results=results)


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.1f} ms"
