"""The prediction of a step: its communication, and the part that the backward pass cannot hide.

DDP reduces the gradients in buckets. The backward pass is two thirds of the computation (it does
twice the forward's work: Kaplan et al. 2020, 2.1), and all buckets but the last can travel during
it (Li et al., VLDB 2020, 3.2.3). The network's speed is read from the baseline, at the size of a
bucket.
"""

import dataclasses
import math

from ddp.prediction import baseline, workload

BYTES_PER_GRADIENT = 4  # DDP reduces in the parameters' own dtype, and those are fp32
BYTES_IN_BF16 = 2  # with --gradients bf16, and of an exchange between sites
INTERVALS = (10, 50, 500)  # of exchanges, which the table has
BACKWARD_SHARE = 2 / 3  # of the computation
# Of the bytes that could be hidden: on CPUs the transport takes the ranks' own cores (two gloo
# ranks over 2 Gbit/s, November 2026: 43 % of all bytes were hidden, of 62 % before the last bucket)
OVERLAP_ON_GPU = 1.0
OVERLAP_ON_CPU = 0.7
BUCKET_BYTES = 25 << 20  # the payload's bucket_mb
IDLE_BELOW = 0.5  # of the time: then exchanges are recommended,
LEAST_COMPUTED = 0.005  # of a measured step
WORTHWHILE = 0.9  # namely the first that lets ranks compute that share of the time


@dataclasses.dataclass(frozen=True)
class Place:
    """The nodes and ranks that run the step."""

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


@dataclasses.dataclass(frozen=True)
class Choice:
    """A way to exchange the ranks' gradients or weights, and its cost."""

    flags: str
    step_bytes: float  # that a rank sends in a step
    step_s: float
    efficiency: float


def choices(
    work: workload.Workload, compute_s: float, place: Place, points: list[baseline.Json]
) -> list[Choice]:
    """Compare plain DDP, bf16, and exchanges of sites, each a node, every so many steps.

    An exchange is not hidden. Traffic within a site, over its fast network, is not counted.
    """
    found: list[Choice] = []
    ring = 2 * (place.world - 1) / place.world
    for flags, size in (("", BYTES_PER_GRADIENT), ("--gradients bf16", BYTES_IN_BF16)):
        _, exposed_s = predict(
            work,
            compute_s,
            place.world,
            points,
            overlap=overlap(on_gpu=place.on_gpu),
            bytes_per_gradient=size,
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


def overlap(*, on_gpu: bool) -> float:
    """Return the share that the backward pass hides of the communication that it could hide."""
    return OVERLAP_ON_GPU if on_gpu else OVERLAP_ON_CPU


def recommended(options: list[Choice], plain: Choice) -> Choice | None:
    """Return the first choice that keeps ranks busy if they are mostly idle with `plain`."""
    if plain.efficiency >= IDLE_BELOW:
        return None
    return next((one for one in options if one.efficiency >= WORTHWHILE), options[-1])


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


def compute_seconds(
    work: workload.Workload, rate: workload.Rate, known: list[baseline.Json], *, on_gpu: bool
) -> float:
    """Return the seconds that a rank computes in a step, by a measured rate.

    If several nodes measured it, the rate includes their communication, which is taken off.
    """
    measured_s = work.tokens * work.accumulate / rate.tokens_per_second
    entry = None
    if rate.num_nodes > 1:
        entry = baseline.nearest(known, rate.num_nodes, rate.world, on_gpu=on_gpu)
    if entry is None:
        return measured_s

    run = dataclasses.replace(work, tokens=rate.step_tokens, accumulate=rate.accumulate)
    run_s = rate.step_tokens * rate.accumulate / rate.tokens_per_second
    low_s = LEAST_COMPUTED * run_s
    high_s = run_s
    while high_s - low_s > LEAST_COMPUTED * run_s:
        middle_s = (low_s + high_s) / 2
        _, exposed_s = predict(
            run, middle_s, rate.world, entry["points"], overlap=overlap(on_gpu=on_gpu)
        )
        if middle_s + exposed_s < run_s:
            low_s = middle_s
        else:
            high_s = middle_s
    return measured_s * low_s / run_s
