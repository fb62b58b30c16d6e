"""plan: predict the memory, the time and the efficiency of a training step before anything is submitted.

t_step = t_compute + the part of t_comm that the backward pass does not hide.

t_comm: gradients of N parameters in fp32 are 4 N bytes; DDP reduces them in buckets. A ring all-reduce of S bytes over
n ranks moves 2 (n - 1) / n S over each link, so it takes that divided by busbw (nccl-tests, doc/PERFORMANCE.md), and
busbw is read at the bucket's size from the cluster's own baseline. The backward pass is two thirds of the computation
(it does twice the forward's work: Kaplan et al. 2020, 2.1), and all buckets but the last can travel during it (Li et
al., VLDB 2020, 3.2.3). On CPUs the transport takes the ranks' own cores, so only a part of that is counted as hidden.

t_compute: the rate of an earlier run of the same model, or the one that is given.
"""

import dataclasses
import itertools
import math
import runpy
import types
import typing

from ddp.measure import collectives
from ddp.options import models
from ddp.problem import Command, ParameterError, Problem, Results
from ddp.results.progress import Log
from ddp.run import folder
from ddp.settings import Settings
from ddp.slurm import cluster
from ddp.submit import resources
from ddp.workspace import checks, folders
from ddp.workspace.folders import Workspace

Json = dict[str, typing.Any]
BYTES_PER_GRADIENT = 4  # DDP reduces in the parameters' own dtype, and those are fp32
BYTES_OF_STATE = 16  # of a parameter in fp32: itself, its gradient, and AdamW's two moments
BACKWARD_SHARE = 2 / 3
# of what could be hidden; on CPUs the row ddp of `make bench` has 0.7: 43 % of all bytes where the last bucket is 38 %
_OVERLAP = {True: 1.0, False: 0.7}  # on_gpu
_BUCKET = 25 << 20  # bytes, the payload's bucket_mb


@dataclasses.dataclass(frozen=True)
class Work:
    """The work of every rank in a step."""

    model: str
    parameters: int
    seq_len: int
    tokens: int  # of one rank and one forward pass
    accumulate: int


def plan(settings: Settings, params: models.Plan, _: Log) -> Results:
    """Predict a step's memory, time, rate and efficiency, for nodes that need not exist yet. Raises Problem."""
    num_nodes, gpus, place = params.nodes, params.gpus_per_node, ""
    if num_nodes is None or gpus is None:
        asked = params.model_copy(update={"nodes": None, "gpus_per_node": None})
        there = resources.training(
            collectives.as_training(asked), cluster.partitions()
        )  # as a training now
        num_nodes, place = num_nodes or there.num_nodes, f" in {there.partition}"
        gpus = there.gpus_per_node if gpus is None else gpus
    per_node, on_gpu = max(gpus, 1), gpus > 0
    world = num_nodes * per_node
    work = describe_work(settings, params, on_gpu=on_gpu)
    rate, source = _rate(settings.workspace, params, work, on_gpu=on_gpu)
    compute_s = work.tokens * work.accumulate / rate
    per_step = work.tokens * work.accumulate * world
    results: Results = {
        "resources": f"{num_nodes} nodes x {per_node} ranks{place}",
        "parameters": f"{work.parameters:,}",
        "memory": f"{BYTES_OF_STATE * work.parameters / 2**30:.2f} GiB a rank, and activations",
        "tokens-per-step": f"{per_step:,}",
        "compute": f"{_seconds(compute_s)} a step ({source})",
    }
    if world == 1:
        rest = {
            "step": _seconds(compute_s),
            "tokens-per-second": f"{rate:.0f}",
            "efficiency": "100 %: one rank",
        }
        return results | rest
    entry, about = _baseline(
        collectives.read_baseline(settings.workspace), num_nodes, world, on_gpu=on_gpu
    )
    if entry is None:
        between, devices = (
            "several nodes" if num_nodes > 1 else "one node",
            "GPUs" if on_gpu else "CPUs",
        )
        text = f"no baseline of all_reduce over {between} on {devices}: the network is not measured"
        measure = Command("bench", {"nodes": min(num_nodes, 2), "partition": params.partition})
        raise Problem(text, remedy=measure, results=results)
    comm_s, exposed_s, buckets = predict(
        work, compute_s, world, entry["points"], overlap=_OVERLAP[on_gpu]
    )
    step_s = compute_s + exposed_s
    results |= {
        "communication": f"{_seconds(comm_s)} a step in {buckets} buckets ({about})",
        "exposed": _seconds(exposed_s),
        "step": _seconds(step_s),
        "tokens-per-second": f"{per_step / step_s:.0f}",
        "efficiency": f"{compute_s / step_s:.0%}",
    }
    if compute_s / step_s < 0.9:
        wanted = math.ceil(9 * exposed_s / (compute_s / work.accumulate))
        results["advice"] = (
            f"grad-accum={max(wanted, work.accumulate + 1)} raises the efficiency to 90 %"
        )
    return results


def predict(
    work: Work, compute_s: float, world: int, points: list[Json], *, overlap: float
) -> tuple[float, float, int]:
    """Return the seconds of communication in a step, those that no computation hides, and the number of buckets."""
    gradient = BYTES_PER_GRADIENT * work.parameters
    buckets = max(1, math.ceil(gradient / _BUCKET))
    last_s = reduce_seconds(gradient - (buckets - 1) * _BUCKET, world, points)
    comm_s = (buckets - 1) * reduce_seconds(_BUCKET, world, points) + last_s
    backward_s = BACKWARD_SHARE * compute_s / work.accumulate * (1 - 1 / buckets)
    return comm_s, comm_s - overlap * min(comm_s - last_s, backward_s), buckets


def reduce_seconds(size: int, world: int, points: list[Json]) -> float:
    """Return the seconds of a ring all-reduce of `size` bytes over `world` ranks."""
    return 2 * (world - 1) / world * size / (busbw(size, points) * 1e9)


def busbw(size: int, points: list[Json]) -> float:
    """Interpolate the bus bandwidth in GB/s at a size, linearly in the logarithms of both."""
    known = sorted(
        (int(point["bytes"]), float(point["busbw"])) for point in points if point["busbw"] > 0
    )
    if size <= known[0][0]:
        return known[0][1] * size / known[0][0]  # latency dominates: the time stays the same
    for (low, slow), (high, fast) in itertools.pairwise(known):
        if size <= high:
            share = (math.log(size) - math.log(low)) / (math.log(high) - math.log(low))
            return math.exp(math.log(slow) + share * (math.log(fast) - math.log(slow)))
    return known[-1][1]


def describe_work(settings: Settings, params: models.Plan, *, on_gpu: bool) -> Work:
    """Describe the step that the payload would do, with its own defaults for what is not given."""
    shapes = types.SimpleNamespace(
        **runpy.run_path(str(settings.payload / "ddptrain" / "shapes.py"))
    )
    model = params.model or ("gpt2" if on_gpu else "tiny")
    seq_len = params.seq_len or (1024 if on_gpu else 128)
    tokens = (params.batch or (32 if on_gpu else 16)) * seq_len
    if params.parameters is not None:
        return Work("", params.parameters, seq_len, tokens, params.grad_accum)
    vocab = shapes.padded(_vocabulary(settings.workspace, params.dataset, on_gpu=on_gpu))
    parameters = shapes.count(shapes.Shape(*shapes.SIZES[model], seq_len, vocab))
    return Work(model, parameters, seq_len, tokens, params.grad_accum)


def _vocabulary(workspace: Workspace, dataset: str | None, *, on_gpu: bool) -> int:
    if dataset is None:
        return 50257 if on_gpu else 257  # gpt2's and the byte tokenizer's
    path = (
        dataset
        if "/" in dataset
        else workspace.look().datasets.get(dataset, str(workspace.datasets / dataset))
    )
    checks.check_inside(workspace, "dataset", path, kinds=("folder",))
    try:
        return int(workspace.read_json(f"{path}/dataset.json")["tokenizer"]["vocab"])
    except (folders.MissingError, KeyError, TypeError, ValueError) as e:
        raise Problem(
            f"dataset: {path} has no dataset.json with a vocabulary", remedy=Command("prepare")
        ) from e


def _rate(
    workspace: Workspace, params: models.Plan, work: Work, *, on_gpu: bool
) -> tuple[float, str]:
    """Return the tokens per second of one rank, and their source."""
    if params.tokens_per_second is not None:
        return float(params.tokens_per_second), "as given"
    found = workspace.do(folder.measured_rates, timeout_s=60, runs=workspace.runs)
    same = [
        run
        for run in found
        if (run["model"], run["seq_len"], run["on_gpu"]) == (work.model, work.seq_len, on_gpu)
    ]
    if same:
        best = min(same, key=lambda run: (run["world_size"], -run["tokens_per_second"]))
        world = best["world_size"]  # of several ranks the communication is included
        return best[
            "tokens_per_second"
        ] / world, f"measured by the run {best['run']}, ranks: {world}"
    device = "GPU" if on_gpu else "rank"
    raise ParameterError(
        "tokens-per-second",
        f"no run has measured this model; give that of one {device}, or train it",
    )


def _baseline(
    entries: list[Json], num_nodes: int, world: int, *, on_gpu: bool
) -> tuple[Json | None, str]:
    """Choose the entry nearest to the planned job, and describe it.

    busbw hardly depends on the number of ranks, but very much on whether a network lies between them.
    """
    wanted = ("all_reduce", "nccl" if on_gpu else "gloo", num_nodes > 1)
    fitting = [
        one for one in entries if (one["collective"], one["backend"], one["nodes"] > 1) == wanted
    ]
    if not fitting:
        return None, ""
    entry = min(
        fitting,
        key=lambda one: (abs(math.log(one["world_size"] / world)), abs(one["nodes"] - num_nodes)),
    )
    same = entry["world_size"] == world and entry["nodes"] == num_nodes
    of = f"{entry['world_size']} ranks on {entry['nodes']} nodes, {entry['created']}"
    return entry, f"baseline of {of}" + ("" if same else "; the nearest measurement")


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.1f} ms"
