"""plan: predict a step's memory, time and efficiency before anything is submitted.

A step takes the computation, and the part of the communication that the backward pass does not
hide. DDP reduces the gradients in buckets. The backward pass is two thirds of the computation (it
does twice the forward's work: Kaplan et al. 2020, 2.1), and all buckets but the last can travel
during it (Li et al., VLDB 2020, 3.2.3). The network's speed is read from the baseline, at the size
of a bucket.
"""

import dataclasses
import math

from ddp.measure import baseline, collectives, workload
from ddp.options import fields, models
from ddp.problem import Command, Problem, Results
from ddp.results import tables
from ddp.results.progress import Log
from ddp.settings import Settings
from ddp.slurm import cluster
from ddp.submit import resources

BYTES_PER_GRADIENT = 4  # DDP reduces in the parameters' own dtype, and those are fp32
BYTES_IN_BF16 = 2  # with --gradients bf16, and of an exchange between sites
INTERVALS = (10, 50, 500)  # of exchanges, which the table has
BYTES_OF_STATE = 16  # of a parameter in fp32: itself, its gradient, and AdamW's two moments
BACKWARD_SHARE = 2 / 3  # of the computation
# Of what could be hidden: on CPUs the transport takes the ranks' own cores (two gloo ranks over 2
# Gbit/s, November 2026: 43 % of all bytes were hidden where the last bucket is 38 %)
OVERLAP_ON_GPU = 1.0
OVERLAP_ON_CPU = 0.7
BUCKET_BYTES = 25 << 20  # the payload's bucket_mb
IDLE_BELOW = 0.5  # of the time: then exchanges are recommended,
WORTHWHILE = 0.9  # and the first with which ranks compute that much


@dataclasses.dataclass(frozen=True)
class Place:
    """Where the step runs."""

    num_nodes: int
    per_node: int  # ranks
    on_gpu: bool
    partition: str = ""

    @property
    def world(self) -> int:
        """The number of ranks."""
        return self.num_nodes * self.per_node

    def __str__(self) -> str:
        where = f" in {self.partition}" if self.partition else ""
        return f"{self.num_nodes} nodes x {self.per_node} ranks{where}"


def plan(settings: Settings, params: models.Plan, _: Log) -> Results:
    """Predict a step on nodes that need not exist yet. Raises Problem."""
    place = _place(params)
    work = workload.describe(settings, params, on_gpu=place.on_gpu)
    workspace = settings.workspace
    rate, source = workload.find_rate(workspace, params, work, on_gpu=place.on_gpu)
    compute_s = work.tokens * work.accumulate / rate
    results: Results = {
        "resources": str(place),
        "parameters": f"{work.parameters:,}",
        "memory": f"{BYTES_OF_STATE * work.parameters / 2**30:.2f} GiB a rank, and activations",
        "compute": f"{_seconds(compute_s)} a step ({source})",
    }
    exposed_s = 0.0
    entry: baseline.Json | None = None
    if place.world > 1:
        known = baseline.read(workspace)
        entry = baseline.nearest(known, place.num_nodes, place.world, on_gpu=place.on_gpu)
        if entry is None:
            raise _unmeasured(place, params, results)
        overlap = OVERLAP_ON_GPU if place.on_gpu else OVERLAP_ON_CPU
        comm_s, exposed_s = predict(work, compute_s, place.world, entry["points"], overlap=overlap)
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
        options = choices(work, compute_s, place, entry["points"])
        results["table"] = _table(options)
        results["advice"] = advice(options)
    return results


@dataclasses.dataclass(frozen=True)
class Choice:
    """A way to exchange what ranks learn, and what it costs."""

    flags: str
    step_bytes: float  # that a rank sends in a step
    step_s: float
    efficiency: float


def choices(
    work: workload.Workload, compute_s: float, place: Place, points: list[baseline.Json]
) -> list[Choice]:
    """Compare plain DDP, bf16, and exchanges of sites, each a node, every so many steps.

    An exchange is not hidden. What a site's own ranks exchange by a fast network is not counted.
    """
    found: list[Choice] = []
    overlap = OVERLAP_ON_GPU if place.on_gpu else OVERLAP_ON_CPU
    ring = 2 * (place.world - 1) / place.world
    for flags, size in (("", BYTES_PER_GRADIENT), ("--gradients bf16", BYTES_IN_BF16)):
        _, exposed_s = predict(
            work, compute_s, place.world, points, overlap=overlap, bytes_per_gradient=size
        )
        step_s = compute_s + exposed_s
        found.append(Choice(flags, ring * size * work.parameters, step_s, compute_s / step_s))

    sent = BYTES_IN_BF16 * work.parameters
    exchange_s = baseline.reduce_seconds(sent, place.num_nodes, points)
    between = 2 * (place.num_nodes - 1) / place.num_nodes
    for every in INTERVALS:
        step_s = compute_s + exchange_s / every
        flags = f"--sync-every {every}"
        found.append(Choice(flags, between * sent / every, step_s, compute_s / step_s))
    return found


def advice(options: list[Choice]) -> str:
    """Recommend exchanges if ranks would wait for more than half of the time; else ""."""
    plain = options[0].efficiency
    if plain >= IDLE_BELOW:
        return ""
    best = next((one for one in options if one.efficiency >= WORTHWHILE), options[-1])
    return (
        f"{best.flags}: ranks compute {best.efficiency:.0%} of the time, not {plain:.0%} (gpt only)"
    )


def _table(options: list[Choice]) -> tables.Table:
    rows = [("OPTIONS", "MB A STEP", "STEP", "EFFICIENCY")]
    for one in options:
        megabytes = f"{one.step_bytes / 1e6:.4g}"
        rows.append((one.flags or "-", megabytes, _seconds(one.step_s), f"{one.efficiency:.0%}"))
    return tables.Table(rows)


def predict(
    work: workload.Workload,
    compute_s: float,
    world: int,
    points: list[baseline.Json],
    *,
    overlap: float,
    bytes_per_gradient: int = BYTES_PER_GRADIENT,
) -> tuple[float, float]:
    """Return the seconds of communication in a step, and those that no computation hides."""
    gradient = bytes_per_gradient * work.parameters
    num_buckets = max(1, math.ceil(gradient / BUCKET_BYTES))
    full = num_buckets - 1
    full_s = full * baseline.reduce_seconds(BUCKET_BYTES, world, points)
    last_s = baseline.reduce_seconds(gradient - full * BUCKET_BYTES, world, points)
    # Only the last of the accumulated passes has something to overlap with
    backward_s = BACKWARD_SHARE * compute_s / work.accumulate * full / num_buckets
    hidden_s = overlap * min(full_s, backward_s)
    return full_s + last_s, full_s + last_s - hidden_s


def _place(params: models.Plan) -> Place:
    """Return where the step is planned, with a training's own choice for what is not given."""
    num_nodes = params.nodes
    gpus = fields.num_gpus(params.gpus_per_node)
    partition = ""
    if num_nodes is None or gpus is None:
        asked = params.model_copy(update={"nodes": None, "gpus_per_node": None})
        there = resources.training(collectives.as_training(asked), cluster.partitions())
        partition = there.partition
        num_nodes = num_nodes or there.num_nodes
        gpus = there.gpus_per_node if gpus is None else gpus
    return Place(num_nodes, max(gpus, 1), gpus > 0, partition)


def _unmeasured(place: Place, params: models.Plan, results: Results) -> Problem:
    between = "several nodes" if place.num_nodes > 1 else "one node"
    devices = "GPUs" if place.on_gpu else "CPUs"
    text = f"no baseline of all_reduce over {between} on {devices}: the network is not measured"
    given = {"nodes": min(place.num_nodes, 2), "partition": params.partition}
    return Problem(text, remedy=Command("bench", given), results=results)


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.1f} ms"
