"""How fast the ranks talk, in the table that nccl-tests prints, and whether what arrives is right.

Sizes, counts, algbw and busbw mean what they mean there (its doc/PERFORMANCE.md): GB is 1e9 bytes, the time of a size
is the mean of its iterations, then over the ranks. Values are integers that every dtype holds exactly, so `#wrong`
compares bits. torch reduces and broadcasts in place only: the out-of-place columns of all_reduce and broadcast
include the copy before it.
"""

# pyright: basic, reportPrivateImportUsage=false
import argparse
import collections.abc
import dataclasses
import itertools
import math
import os
import pathlib
import re
import time
import typing

import torch
import torch.distributed as dist
from torch import Tensor

from ddptrain import config, distributed, errors, files, markers, report

PERIOD = 61  # of the values that are reduced
DTYPES: dict[str, torch.dtype] = {
    "float": torch.float32,
    "double": torch.float64,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "int32": torch.int32,
    "int64": torch.int64,
}
# The integers from 0 up that the dtype holds without gaps reach this far.
EXACT_BELOW = {
    "float": 1 << 24, "double": 1 << 53, "half": 1 << 11, "bfloat16": 1 << 8, "int8": 1 << 7, "uint8": 1 << 8,
    "int32": 1 << 31, "int64": 1 << 62,
}  # fmt: skip
REDUCTIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


@dataclasses.dataclass(frozen=True)
class Options:
    """The command line; the short flags are nccl-tests'."""

    collective: tuple[str, ...]
    min_bytes: int
    max_bytes: int
    step_factor: int
    step_bytes: int | None
    iters: int
    warmup_iters: int
    check: int
    op: str
    datatype: str
    root: int
    average: int
    json: pathlib.Path | None
    plot: pathlib.Path | None
    device: str
    timeout_minutes: float
    run_dir: pathlib.Path | None


@dataclasses.dataclass
class Buffers:
    """One size's memory; `count` is the table's column, `send` and `recv` are as long as the collective needs."""

    send: Tensor
    recv: Tensor
    count: int
    rank: int
    size: int
    root: int
    op: typing.Any


@dataclasses.dataclass(frozen=True)
class Collective:
    """A collective: its call out of place and in place, what it sends and what must arrive, and its figures."""

    total: bool  # the size column counts all ranks' parts
    sends: int  # parts in the send buffer: 1 or the number of ranks (0 stands for it)
    receives: int
    reduces: bool
    rooted: bool
    bus_factor: collections.abc.Callable[[int], float]
    out_of_place: collections.abc.Callable[[Buffers], object]
    in_place: collections.abc.Callable[[Buffers], object] | None
    expected: collections.abc.Callable[["Coder", Buffers], Tensor]


class Coder:
    """Makes the values: `reduced` ones repeat after PERIOD, so that their sum over any number of ranks is a table."""

    def __init__(self, datatype: str, op: str, size: int, device: torch.device) -> None:
        self.dtype, self.device, self.size = DTYPES[datatype], device, size
        limit = EXACT_BELOW[datatype]
        if op == "sum" and size >= limit:
            raise errors.UserError(f"--datatype {datatype}: a sum over {size} ranks is not exact; take float or int32")
        self.top = min(PERIOD, limit // size if op == "sum" else PERIOD)  # values are 0 .. top - 1
        self.modulus = min(limit, 1 << 20) - 1
        values = torch.arange(PERIOD).repeat(size, 1)
        own = torch.stack([self._value(values[rank], rank) for rank in range(size)])
        reduce = {"sum": lambda v: v.sum(0), "max": lambda v: v.amax(0), "min": lambda v: v.amin(0)}[op]
        self._table = reduce(own).to(self.dtype).to(device)

    def _value(self, index: Tensor, rank: int) -> Tensor:
        return (index * 5 + rank * 3) % PERIOD % self.top

    def reducible(self, rank: int, count: int) -> Tensor:
        """Make a rank's input of a reduction, shape (count,)."""
        period = self._value(torch.arange(PERIOD), rank).to(self.dtype).to(self.device)
        return _repeated(period, 0, count)

    def reduced(self, start: int, count: int) -> Tensor:
        """Compute the expected result of a reduction for elements [start, start + count)."""
        return _repeated(self._table, start, count)

    def coded(self, source: int, target: int, count: int) -> Tensor:
        """Return values that tell by themselves whence, whither and at which place they belong."""
        narrow = count < 1 << 30  # the sums below stay in 32 bits; half the memory beside buffers of gigabytes
        index = torch.arange(count, device=self.device, dtype=torch.int32 if narrow else torch.int64)
        return ((index + 7919 * source + 104_729 * target) % self.modulus).to(self.dtype)


def _repeated(period: Tensor, start: int, count: int) -> Tensor:
    shifted = period.roll(-(start % PERIOD))
    return shifted.repeat(count // PERIOD + 1)[:count]


def _newer(name: str, older: str) -> collections.abc.Callable[..., object]:
    """Return torch's function under its name since 2.13, or the one before."""
    return getattr(dist, name, None) or getattr(dist, older)


def _part(tensor: Tensor, b: Buffers) -> Tensor:
    return tensor[b.rank * b.count : (b.rank + 1) * b.count]


def _all_reduce(b: Buffers) -> None:
    b.recv.copy_(b.send)
    dist.all_reduce(b.recv, op=b.op)


def _broadcast(b: Buffers) -> None:
    if b.rank == b.root:
        b.recv.copy_(b.send)
    dist.broadcast(b.recv, src=b.root)


def _sendrecv(b: Buffers) -> None:
    """Send to the next rank, receive from the one before."""
    if b.size == 1:
        b.recv.copy_(b.send)
        return
    both = [
        dist.P2POp(dist.isend, b.send, (b.rank + 1) % b.size),
        dist.P2POp(dist.irecv, b.recv, (b.rank - 1) % b.size),
    ]
    for work in dist.batch_isend_irecv(both):  # as one group: NCCL would wait for each by itself, all senders first
        work.wait()


_gather = _newer("all_gather_single", "all_gather_into_tensor")
_scatter = _newer("reduce_scatter_single", "reduce_scatter_tensor")

COLLECTIVES: dict[str, Collective] = {
    "all_reduce": Collective(
        total=False, sends=1, receives=1, reduces=True, rooted=False, bus_factor=lambda n: 2 * (n - 1) / n,
        out_of_place=_all_reduce,
        in_place=lambda b: dist.all_reduce(b.recv, op=b.op),
        expected=lambda c, b: c.reduced(0, b.count),
    ),
    "all_gather": Collective(
        total=True, sends=1, receives=0, reduces=False, rooted=False, bus_factor=lambda n: (n - 1) / n,
        out_of_place=lambda b: _gather(b.recv, b.send),
        in_place=lambda b: _gather(b.recv, _part(b.recv, b)),
        expected=lambda c, b: torch.cat([c.coded(rank, 0, b.count) for rank in range(b.size)]),
    ),
    "reduce_scatter": Collective(
        total=True, sends=0, receives=1, reduces=True, rooted=False, bus_factor=lambda n: (n - 1) / n,
        out_of_place=lambda b: _scatter(b.recv, b.send, op=b.op),
        in_place=lambda b: _scatter(_part(b.send, b), b.send, op=b.op),
        expected=lambda c, b: c.reduced(b.rank * b.count, b.count),
    ),
    "broadcast": Collective(
        total=False, sends=1, receives=1, reduces=False, rooted=True, bus_factor=lambda _: 1.0,
        out_of_place=_broadcast,
        in_place=lambda b: dist.broadcast(b.recv, src=b.root),
        expected=lambda c, b: c.coded(b.root, 0, b.count),
    ),
    "alltoall": Collective(
        total=True, sends=0, receives=0, reduces=False, rooted=False, bus_factor=lambda n: (n - 1) / n,
        out_of_place=lambda b: dist.all_to_all_single(b.recv, b.send),
        in_place=None,
        expected=lambda c, b: torch.cat([c.coded(rank, b.rank, b.count) for rank in range(b.size)]),
    ),
    "sendrecv": Collective(
        total=False, sends=1, receives=1, reduces=False, rooted=False, bus_factor=lambda _: 1.0,
        out_of_place=_sendrecv,
        in_place=None,
        expected=lambda c, b: c.coded((b.rank - 1) % b.size, 0, b.count),
    ),
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    names = ", ".join(COLLECTIVES)
    add = parser.add_argument
    add("--collective", default="all_reduce", help=f"comma-separated, or all: {names} (default: all_reduce)")
    add("-b", "--min-bytes", help="smallest size, with K, M, G (default: 1K on CPUs, 8M on GPUs)")
    add("-e", "--max-bytes", help="largest size (default: 64M on CPUs, 8G on GPUs)")
    add("-f", "--step-factor", type=int, help="each size is so many times the last (default: 4 on CPUs, 2 on GPUs)")
    add("-i", "--step-bytes", help="add so many bytes from size to size, instead of multiplying")
    add("-n", "--iters", type=int, help="timed calls per size (default: 10 on CPUs, 50 on GPUs)")
    add("-w", "--warmup-iters", type=int, help="calls before (default: 2 on CPUs, 5 on GPUs)")
    add("-c", "--check", type=int, choices=(0, 1), default=1, help="1: compare the results (default)")
    add("-o", "--op", choices=tuple(REDUCTIONS), default="sum", help="what reductions do (default: sum)")
    add("-d", "--datatype", choices=tuple(DTYPES), default="float", help="(default: float)")
    add("-r", "--root", type=int, default=0, help="broadcast's source (default: 0)")
    add(
        "-a",
        "--average",
        type=int,
        choices=(0, 1, 2, 3),
        default=1,
        help="time of rank 0, mean (default), min, max over ranks",
    )
    add("-J", "--json", type=pathlib.Path, help="also write the figures to this file")
    add("--plot", type=pathlib.Path, help="also draw the bus bandwidth by size into this PNG")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: GPUs where there are some")
    config.add_timeout(parser)
    add("--run-dir", type=pathlib.Path, help="folder for the rendezvous under srun and for the outcome")


def check(args: argparse.Namespace) -> Options:
    """Return the options; what depends on the device is completed later. Raises UserError naming the flag."""
    wanted = tuple(COLLECTIVES) if args.collective == "all" else tuple(args.collective.split(","))
    if unknown := [name for name in wanted if name not in COLLECTIVES]:
        raise errors.UserError(f"--collective {unknown[0]}: must be one of {', '.join(COLLECTIVES)}, or all")
    for flag in ("step_factor", "iters", "warmup_iters", "root"):
        least = {"step_factor": 2, "iters": 1, "warmup_iters": 0, "root": 0}[flag]
        if getattr(args, flag) is not None and getattr(args, flag) < least:
            raise errors.UserError(f"--{flag.replace('_', '-')} {getattr(args, flag)}: must be at least {least}")
    config.check_timeout(args.timeout_minutes)
    values = {field.name: getattr(args, field.name) for field in dataclasses.fields(Options)}
    sizes = {
        flag: parse_bytes(f"--{flag.replace('_', '-')}", values[flag])
        for flag in ("min_bytes", "max_bytes", "step_bytes")
    }
    return Options(**{**values, **sizes, "collective": wanted})


def parse_bytes(flag: str, text: str | None) -> int | None:
    """Return a number of bytes from `64M` or `1024`. Raises UserError naming the flag."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d{1,15})([KkMmGg]?)[Bb]?", text)
    if not match or not int(match[1]):
        raise errors.UserError(f"{flag} {text}: give a number of bytes, with K, M or G if you like")
    return int(match[1]) << {"": 0, "k": 10, "m": 20, "g": 30}[match[2].lower()]


def run(options: Options, world: distributed.World) -> None:
    """Measure and print. Raises SharedError on every rank when anything arrived wrong."""
    began = time.perf_counter()
    distributed.report_world(world)
    options = _completed(options, world.device.type)
    if options.min_bytes > options.max_bytes:
        raise errors.SharedError("--min-bytes is above --max-bytes")
    if options.root >= world.size:
        raise errors.SharedError(f"--root {options.root}: there are {world.size} ranks, from 0")
    with world.together():
        if world.is_main:
            files.need_outputs(options.run_dir, {"--json": options.json, "--plot": options.plot})
    ready_s = _first_all_reduce(world)
    coder = Coder(options.datatype, options.op, world.size, world.device)
    results = [_measure(name, options, world, coder) for name in options.collective]
    wrong = sum(result["out_of_bounds"]["count"] for result in results)
    if world.is_main:
        facts = {
            "world_size": world.size, "nodes": world.num_nodes, "ranks": world.members, "torch": torch.__version__,
            "backend": "nccl" if world.device.type == "cuda" else "gloo",
            "iface": os.environ.get("NCCL_SOCKET_IFNAME" if world.device.type == "cuda" else "GLOO_SOCKET_IFNAME"),
            "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "ready_s": ready_s,
        }  # fmt: skip
        if options.json is not None:
            files.write_json(options.json, {**facts, "collectives": results})
        if options.plot is not None:
            title = f"{world.size} ranks on {world.num_nodes} nodes, {facts['backend']}"
            report.draw_bandwidth(results, options.plot, title)
    if wrong:
        raise errors.SharedError(
            f"{wrong} elements arrived wrong; a link, a GPU or its memory is at fault: drain the nodes and test "
            f"them one by one"
        )
    markers.emit("DONE", workload="collectives", ranks=world.size, elapsed_s=time.perf_counter() - began)
    if world.is_main:
        report.write_outcome(options.run_dir, "done", step=0)


def _first_all_reduce(world: distributed.World) -> float | None:
    """Return how long after the begin of the job's attempt the ranks had reduced something; None outside of a job."""
    dist.all_reduce(torch.zeros(1, device=world.device))
    if world.device.type == "cuda":
        torch.cuda.synchronize()
    began = os.environ.get("ATTEMPT_BEGAN")
    return time.time() - float(began) if began else None


def _completed(options: Options, device: str) -> Options:
    cpu = device == "cpu"
    defaults = {
        "min_bytes": 1 << 10 if cpu else 8 << 20,
        "max_bytes": 64 << 20 if cpu else 8 << 30,
        "step_factor": 4 if cpu else 2,
        "iters": 10 if cpu else 50,
        "warmup_iters": 2 if cpu else 5,
    }
    return dataclasses.replace(
        options, **{name: value for name, value in defaults.items() if getattr(options, name) is None}
    )


def sizes(options: Options) -> list[int]:
    """Return the sizes in bytes, smallest first."""
    found = [options.min_bytes]
    while (
        after := found[-1] + options.step_bytes if options.step_bytes else found[-1] * options.step_factor
    ) <= options.max_bytes:
        found.append(after)
    return found


def _measure(name: str, options: Options, world: distributed.World, coder: Coder) -> dict[str, typing.Any]:
    """Print one collective's table and return its figures."""
    collective = COLLECTIVES[name]
    _print_header(options, world)
    rows: list[dict[str, typing.Any]] = []
    for wanted in sizes(options):
        element = coder.dtype.itemsize
        parts = world.size if collective.total else 1
        count = max(1, wanted // (element * parts))
        row: dict[str, typing.Any] = {
            "size": count * element * parts, "count": count, "type": options.datatype,
            "redop": options.op if collective.reduces else "none", "root": options.root if collective.rooted else -1,
        }  # fmt: skip
        with world.together():  # a size that does not fit is refused by all
            buffers = _allocate(collective, count, world, options, coder)
        for placement, call in (("out_of_place", collective.out_of_place), ("in_place", collective.in_place)):
            row[placement] = (
                None
                if call is None
                else _time(
                    call, collective, buffers, options=options, world=world, coder=coder, inside=placement == "in_place"
                )
            )
            if call is not None:
                row[placement]["alg_bw"] = row["size"] / row[placement]["time"] / 1e3
                row[placement]["bus_bw"] = row[placement]["alg_bw"] * collective.bus_factor(world.size)
        rows.append(row)
        _print(_row_text(row), world)
    measured = [row[placement] for row in rows for placement in ("out_of_place", "in_place") if row[placement]]
    wrong = sum(m["nwrong"] or 0 for m in measured)
    average = sum(m["bus_bw"] for m in measured) / len(measured)
    _print(f"# Out of bounds values : {wrong} {'FAILED' if wrong else 'OK'}", world)
    _print(f"# Avg bus bandwidth    : {average:g}", world)
    _print("#", world)
    _print(f"# Collective test concluded: {name}_perf", world)
    markers.emit(
        "RESULT",
        collective=name,
        ranks=world.size,
        avg_busbw=average,
        max_busbw=max(m["bus_bw"] for m in measured),
        wrong=wrong,
    )
    return {
        "collective": name, "config": {"iters": options.iters, "warmup_iters": options.warmup_iters,
        "average": options.average},
        "results": rows, "out_of_bounds": {"count": wrong, "okay": not wrong},
        "average_bus_bandwidth": {"bandwidth": average},
    }  # fmt: skip


def _allocate(collective: Collective, count: int, world: distributed.World, options: Options, coder: Coder) -> Buffers:
    n = world.size
    try:
        send = torch.empty(count * (collective.sends or n), dtype=coder.dtype, device=world.device)
        recv = torch.empty(count * (collective.receives or n), dtype=coder.dtype, device=world.device)
    except RuntimeError as e:
        raise errors.UserError(
            f"no memory for buffers of {count * coder.dtype.itemsize} bytes; lower --max-bytes"
        ) from e
    return Buffers(send, recv, count, world.rank, n, options.root, REDUCTIONS[options.op])


def _fill(collective: Collective, b: Buffers, coder: Coder, *, inside: bool) -> None:
    """Give both buffers their values before a checked call; what must be overwritten holds something else."""
    if collective.reduces:
        values = coder.reducible(b.rank, b.send.numel())
    elif collective.sends == 0:
        values = torch.cat([coder.coded(b.rank, target, b.count) for target in range(b.size)])
    else:
        values = coder.coded(b.rank, 0, b.count)
    b.send.copy_(values)
    b.recv.fill_(1)
    if inside and collective.receives == 0:
        _part(b.recv, b).copy_(values)
    elif inside and collective.sends == 1:
        b.recv.copy_(values)


def count_wrong(found: Tensor, expected: Tensor) -> int:
    """Return how many elements differ."""
    return int((found != expected).sum())


def _time(
    call: typing.Callable[[Buffers], object],
    collective: Collective,
    b: Buffers,
    *,
    options: Options,
    world: distributed.World,
    coder: Coder,
    inside: bool,
) -> dict[str, typing.Any]:
    """Return time in microseconds, its spread on CPUs, and the number of wrong elements over all ranks."""
    wrong = None
    if options.check:
        _fill(collective, b, coder, inside=inside)
        call(b)
        found = _part(b.send, b) if inside and collective.sends == 0 else b.recv
        (total,) = world.sum([float(count_wrong(found, collective.expected(coder, b)))])
        wrong = int(total)
    else:
        b.send.zero_()
        b.recv.zero_()
    for _ in range(options.warmup_iters):
        call(b)
    laps: list[float] = []
    if world.device.type == "cuda":
        torch.cuda.synchronize()
        world.barrier()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(options.iters):
            call(b)
        end.record()
        end.synchronize()
        mean = start.elapsed_time(end) * 1e3 / options.iters
    else:
        world.barrier()
        marks = [time.perf_counter()]
        for _ in range(options.iters):
            call(b)
            marks.append(time.perf_counter())
        mean = (marks[-1] - marks[0]) * 1e6 / options.iters
        laps = sorted((after - before) * 1e6 for before, after in itertools.pairwise(marks))
    means = world.collect(mean)
    choices = {0: means[0], 1: sum(means) / len(means), 2: min(means), 3: max(means)} if means else {}
    shown = world.broadcast(choices.get(options.average))
    spread = {"p50": laps[len(laps) // 2], "p99": laps[math.ceil(0.99 * len(laps)) - 1]} if laps else {}
    return {"time": shown, "nwrong": wrong, **spread}


def _print(line: str, world: distributed.World) -> None:
    if world.is_main:
        print(line, flush=True)


def _print_header(options: Options, world: distributed.World) -> None:
    step, kind = (options.step_bytes, "bytes") if options.step_bytes else (options.step_factor, "factor")
    _print(
        f"# nThread 1 nGpus 1 minBytes {options.min_bytes} maxBytes {options.max_bytes} step: {step}({kind}) "
        f"warmup iters: "
        f"{options.warmup_iters} iters: {options.iters} agg iters: 1 validation: {options.check} graph: 0",
        world,
    )
    _print("#\n# Using devices", world)
    pids = world.collect(os.getpid())
    index = world.collect(world.device.index or 0)
    for member, pid, device in zip(world.members, pids, index, strict=True):
        _print(
            f"#  Rank {member['rank']:2d} Group  0 Pid {pid:6d} on {member['host']:>10s} device {device:2d} "
            f"[0x00] {member['device']}",
            world,
        )
    _print("#", world)
    titles = ("time", "algbw", "busbw", "#wrong")
    half = "  {:>7s}  {:>6s}  {:>6s}  {:>6s}"
    left = "{:>12s}  {:>12s}  {:>8s}  {:>6s}  {:>6s}"
    _print("#" + " " * 51 + "{:>31s}  {:>31s}".format("out-of-place".center(31), "in-place".center(31)), world)
    _print("#" + (left.format("size", "count", "type", "redop", "root") + 2 * half.format(*titles))[1:], world)
    _print(
        "#" + (left.format("(B)", "(elements)", "", "", "") + 2 * half.format("(us)", "(GB/s)", "(GB/s)", ""))[1:],
        world,
    )


def _row_text(row: dict[str, typing.Any]) -> str:
    text = f"{row['size']:12d}  {row['count']:12d}  {row['type']:>8s}  {row['redop']:>6s}  {row['root']:6d}"
    for placement in ("out_of_place", "in_place"):
        found = row[placement]
        if found is None:
            text += "  {:>7s}  {:>6s}  {:>6s}  {:>6s}".format(*["N/A"] * 4)
            continue
        wrong = "N/A" if found["nwrong"] is None else f"{found['nwrong']:g}"
        text += (
            f"  {_time_text(found['time'])}  {_rate_text(found['alg_bw'])}  {_rate_text(found['bus_bw'])}  {wrong:>6s}"
        )
    return text


def _time_text(microseconds: float) -> str:
    return (
        f"{microseconds:7.0f}"
        if microseconds >= 10_000
        else f"{microseconds:7.1f}"
        if microseconds >= 100
        else f"{microseconds:7.2f}"
    )


def _rate_text(rate: float) -> str:
    return f"{rate:6.1f}" if rate >= 1000 else f"{rate:6.2f}"
