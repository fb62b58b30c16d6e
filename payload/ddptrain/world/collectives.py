"""The ranks' network measured as nccl-tests does, in its table, with every result checked.

Sizes, counts, algbw and busbw mean what they mean there (its doc/PERFORMANCE.md): GB is 1e9 bytes, the time of a size
is the mean of its iterations, then over the ranks. Values are integers that every dtype holds exactly, so `#wrong`
compares bits. torch reduces and broadcasts in place only: the out-of-place columns of all_reduce and broadcast
include the copy before it.
"""

# pyright: basic, reportPrivateImportUsage=false
# ruff: noqa: RUF009 - flags.option returns a dataclasses.field
import argparse
import collections.abc
import dataclasses
import functools
import os
import pathlib
import re
import time
import typing

import torch
import torch.distributed as dist
from torch import Tensor

from ddptrain.ground import attempt, errors, files, log
from ddptrain.options import flags
from ddptrain.world import distributed

PERIOD = 61  # of the values that are reduced
# The integers from 0 up that the dtype holds without gaps are below 2 to the power of:
EXACT_BITS = {
    "float": 24,
    "double": 53,
    "half": 11,
    "bfloat16": 8,
    "int8": 7,
    "uint8": 8,
    "int32": 31,
    "int64": 62,
}
_TORCH = {
    "float": "float32",
    "double": "float64",
    "half": "float16",
}  # of the others the name is torch's
DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, _TORCH.get(name, name)) for name in EXACT_BITS
}


@dataclasses.dataclass
class Buffers:
    """One size's memory; `count` is the table's column, `send` and `recv` are as long as the collective needs."""

    send: Tensor
    recv: Tensor
    count: int
    rank: int
    size: int


@dataclasses.dataclass(frozen=True)
class Collective:
    """A collective: its call out of place and in place, what it sends and what must arrive, and its figures."""

    out_of_place: collections.abc.Callable[[Buffers], object]
    expected: collections.abc.Callable[["Coder", Buffers], Tensor]
    bus_factor: collections.abc.Callable[[int], float] = lambda _: 1.0
    in_place: collections.abc.Callable[[Buffers], object] | None = None
    total: bool = False  # the size column counts all ranks' parts
    sends: int = 1  # parts in the send buffer: 1 or the number of ranks (0 stands for it)
    receives: int = 1
    reduces: bool = False
    rooted: bool = False


class Coder:
    """Makes the values: those to reduce repeat after PERIOD, so that their sum over any number of ranks is a table."""

    def __init__(self, datatype: str, size: int, device: torch.device) -> None:
        self.dtype, self.device, self.size = DTYPES[datatype], device, size
        limit = 1 << EXACT_BITS[datatype]
        if size >= limit:
            raise errors.UserError(
                f"--datatype {datatype}: a sum over {size} ranks is not exact; use float or int32"
            )
        self.top = min(PERIOD, limit // size)  # values are 0 .. top - 1
        self.modulus = min(limit, 1 << 20) - 1
        own = torch.stack([self._value(torch.arange(PERIOD), rank) for rank in range(size)])
        self._table = own.sum(0).to(self.dtype).to(device)

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
        """Return values that are unlike at any other source, target or place."""
        narrow = (
            count < 1 << 30
        )  # the sums below stay in 32 bits; half the memory beside buffers of gigabytes
        index = torch.arange(
            count, device=self.device, dtype=torch.int32 if narrow else torch.int64
        )
        return ((index + 7919 * source + 104_729 * target) % self.modulus).to(self.dtype)


def _repeated(period: Tensor, start: int, count: int) -> Tensor:
    shifted = period.roll(-(start % PERIOD))
    return shifted.repeat(count // PERIOD + 1)[:count]


def _part(tensor: Tensor, b: Buffers) -> Tensor:
    return tensor[b.rank * b.count : (b.rank + 1) * b.count]


def _all_reduce(b: Buffers) -> None:
    b.recv.copy_(b.send)
    dist.all_reduce(b.recv)


def _broadcast(b: Buffers) -> None:
    if b.rank == 0:
        b.recv.copy_(b.send)
    dist.broadcast(b.recv, src=0)


# By their names since torch 2.13, or by those before
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _ring(n: int) -> float:
    return (n - 1) / n


COLLECTIVES: dict[str, Collective] = {
    "all_reduce": Collective(
        reduces=True,
        bus_factor=lambda n: 2 * _ring(n),
        out_of_place=_all_reduce,
        in_place=lambda b: dist.all_reduce(b.recv),
        expected=lambda c, b: c.reduced(0, b.count),
    ),
    "all_gather": Collective(
        total=True,
        receives=0,
        bus_factor=_ring,
        out_of_place=lambda b: _gather(b.recv, b.send),
        in_place=lambda b: _gather(b.recv, _part(b.recv, b)),
        expected=lambda c, b: torch.cat([c.coded(rank, 0, b.count) for rank in range(b.size)]),
    ),
    "reduce_scatter": Collective(
        total=True,
        sends=0,
        reduces=True,
        bus_factor=_ring,
        out_of_place=lambda b: _scatter(b.recv, b.send),
        in_place=lambda b: _scatter(_part(b.send, b), b.send),
        expected=lambda c, b: c.reduced(b.rank * b.count, b.count),
    ),
    "broadcast": Collective(
        rooted=True,
        out_of_place=_broadcast,
        in_place=lambda b: dist.broadcast(b.recv, src=0),
        expected=lambda c, b: c.coded(0, 0, b.count),
    ),
    "alltoall": Collective(
        total=True,
        sends=0,
        receives=0,
        bus_factor=_ring,
        out_of_place=lambda b: dist.all_to_all_single(b.recv, b.send),
        expected=lambda c, b: torch.cat([c.coded(rank, b.rank, b.count) for rank in range(b.size)]),
    ),
}


@dataclasses.dataclass(frozen=True)
class Options:
    """The command line; the short flags are nccl-tests'."""

    collective: tuple[str, ...] = flags.option(
        "all_reduce", f"comma-separated, or all: {', '.join(COLLECTIVES)}", str
    )
    min_bytes: int = flags.option(
        None, "smallest, with K, M, G [default: 1K on CPUs, 8M on GPUs]", str, short="-b"
    )
    max_bytes: int = flags.option(
        None, "largest [default: 64M on CPUs, 8G on GPUs]", str, short="-e"
    )
    step_factor: int = flags.option(
        None,
        "ratio of a size to the last [default: 4 on CPUs, 2 on GPUs]",
        int,
        least=2,
        short="-f",
    )
    iters: int = flags.option(
        None, "timed calls per size [default: 10 on CPUs, 50 on GPUs]", int, least=1, short="-n"
    )
    warmup_iters: int = flags.option(
        None, "calls before [default: 2 on CPUs, 5 on GPUs]", int, least=0, short="-w"
    )
    datatype: str = flags.option(
        "float", "type of the elements", choices=tuple(EXACT_BITS), short="-d"
    )
    json: pathlib.Path | None = flags.option(
        None, "also write the figures to this file", pathlib.Path, short="-J"
    )
    device: str = flags.option(
        "auto", "auto: GPUs if there are any", choices=("auto", "cpu", "cuda")
    )
    timeout_minutes: float = flags.timeout()
    run_dir: pathlib.Path | None = flags.option(None, "folder for the outcome", pathlib.Path)


add_arguments = functools.partial(flags.declare, options=Options)


def check(args: argparse.Namespace) -> Options:
    """Return the options; what depends on the device is completed later. Raises UserError naming the flag."""
    options = flags.given(args, Options)
    wanted = (
        tuple(COLLECTIVES) if options.collective == "all" else tuple(options.collective.split(","))
    )
    if unknown := [name for name in wanted if name not in COLLECTIVES]:
        raise errors.UserError(
            f"--collective {unknown[0]}: must be one of {', '.join(COLLECTIVES)}, or all"
        )
    low, high = (
        parse_bytes("--min-bytes", options.min_bytes),
        parse_bytes("--max-bytes", options.max_bytes),
    )
    return dataclasses.replace(options, collective=wanted, min_bytes=low, max_bytes=high)


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
    with world.together():
        if world.is_main:
            files.need_outputs(options.run_dir, {"--json": options.json})
    bench = Bench(options, world)
    results = [bench.measure(name) for name in options.collective]
    wrong = sum(result["out_of_bounds"]["count"] for result in results)
    if world.is_main and options.json is not None:
        about = {"ranks": world.members, "iface": world.interface, "collectives": results}
        created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        files.write_json(options.json, {**distributed.describe(world), **about, "created": created})
    if wrong:
        fault = "a link, a GPU or its memory is at fault: drain the nodes and test them one by one"
        raise errors.SharedError(f"{wrong} elements arrived wrong; {fault}")
    log.emit(
        "DONE", workload="collectives", ranks=world.size, elapsed_s=time.perf_counter() - began
    )
    if world.is_main:
        attempt.write_outcome(options.run_dir, attempt.DONE, step=0)


def _completed(options: Options, device: str) -> Options:
    on_cpu = {
        "min_bytes": 1 << 10,
        "max_bytes": 64 << 20,
        "step_factor": 4,
        "iters": 10,
        "warmup_iters": 2,
    }
    on_gpu = {
        "min_bytes": 8 << 20,
        "max_bytes": 8 << 30,
        "step_factor": 2,
        "iters": 50,
        "warmup_iters": 5,
    }
    defaults = on_cpu if device == "cpu" else on_gpu
    return dataclasses.replace(
        options, **{k: v for k, v in defaults.items() if getattr(options, k) is None}
    )


def sizes(options: Options) -> list[int]:
    """Return the sizes in bytes, smallest first."""
    found = [options.min_bytes]
    while (after := found[-1] * options.step_factor) <= options.max_bytes:
        found.append(after)
    return found


class Bench:
    """Measures collectives between the ranks, and prints their tables on rank 0."""

    def __init__(self, options: Options, world: distributed.World) -> None:
        self.options, self.world = options, world
        self.coder = Coder(options.datatype, world.size, world.device)

    def measure(self, name: str) -> dict[str, typing.Any]:
        """Measure a collective in each size, and return its figures."""
        collective, options, n = COLLECTIVES[name], self.options, self.world.size
        self._print_header()
        rows: list[dict[str, typing.Any]] = []
        for wanted in sizes(options):
            part_bytes = self.coder.dtype.itemsize * (n if collective.total else 1)
            count = max(1, wanted // part_bytes)
            row: dict[str, typing.Any] = {
                "size": count * part_bytes,
                "count": count,
                "type": options.datatype,
                "redop": "sum" if collective.reduces else "none",
                "root": 0 if collective.rooted else -1,
            }
            with self.world.together():  # a size that does not fit is rejected by all
                send, recv = (
                    self._buffer(count * (parts or n))
                    for parts in (collective.sends, collective.receives)
                )
            buffers = Buffers(send, recv, count, self.world.rank, n)
            for placement, call in (
                ("out_of_place", collective.out_of_place),
                ("in_place", collective.in_place),
            ):
                row[placement] = None
                if call is not None:
                    found = self._time(call, collective, buffers, inside=placement == "in_place")
                    found["alg_bw"] = row["size"] / found["time"] / 1e3
                    found["bus_bw"] = found["alg_bw"] * collective.bus_factor(n)
                    row[placement] = found
            rows.append(row)
            self._print(_row_text(row))
        measured = [
            row[placement]
            for row in rows
            for placement in ("out_of_place", "in_place")
            if row[placement]
        ]
        wrong = sum(m["nwrong"] for m in measured)
        average, most = (
            sum(m["bus_bw"] for m in measured) / len(measured),
            max(m["bus_bw"] for m in measured),
        )
        self._print(f"# Out of bounds values : {wrong} {'FAILED' if wrong else 'OK'}")
        self._print(
            f"# Avg bus bandwidth    : {average:g}\n#\n# Collective test concluded: {name}_perf"
        )
        log.emit("RESULT", collective=name, ranks=n, avg_busbw=average, max_busbw=most, wrong=wrong)
        return {
            "collective": name,
            "config": {"iters": options.iters, "warmup_iters": options.warmup_iters},
            "results": rows,
            "out_of_bounds": {"count": wrong, "okay": not wrong},
            "average_bus_bandwidth": {"bandwidth": average},
        }

    def _buffer(self, count: int) -> Tensor:
        try:
            return torch.empty(count, dtype=self.coder.dtype, device=self.world.device)
        except RuntimeError as e:
            size = count * self.coder.dtype.itemsize
            raise errors.UserError(
                f"no memory for a buffer of {size} bytes; lower --max-bytes"
            ) from e

    def _fill(self, collective: Collective, b: Buffers, *, inside: bool) -> None:
        """Give both buffers their values before a checked call; what must be overwritten holds something else."""
        if collective.reduces:
            values = self.coder.reducible(b.rank, b.send.numel())
        elif collective.sends == 0:
            values = torch.cat(
                [self.coder.coded(b.rank, target, b.count) for target in range(b.size)]
            )
        else:
            values = self.coder.coded(b.rank, 0, b.count)
        b.send.copy_(values)
        b.recv.fill_(1)
        if inside and collective.receives == 0:
            _part(b.recv, b).copy_(values)
        elif inside and collective.sends == 1:
            b.recv.copy_(values)

    def _time(
        self,
        call: typing.Callable[[Buffers], object],
        collective: Collective,
        b: Buffers,
        *,
        inside: bool,
    ) -> dict[str, typing.Any]:
        """Return the time in microseconds, and the number of wrong elements over all ranks."""
        self._fill(collective, b, inside=inside)
        call(b)
        found = _part(b.send, b) if inside and collective.sends == 0 else b.recv
        (wrong,) = self.world.sum([float((found != collective.expected(self.coder, b)).sum())])
        for _ in range(self.options.warmup_iters):
            call(b)
        self._synchronize()
        self.world.barrier()
        began = time.perf_counter()
        for _ in range(self.options.iters):
            call(b)
        self._synchronize()
        mean = (time.perf_counter() - began) * 1e6 / self.options.iters
        (total_us,) = self.world.sum([mean])
        return {"time": total_us / self.world.size, "nwrong": int(wrong)}

    def _synchronize(self) -> None:
        if self.world.device.type == "cuda":
            torch.cuda.synchronize()

    def _print(self, text: str) -> None:
        if self.world.is_main:
            print(text, flush=True)

    def _print_header(self) -> None:
        options, world = self.options, self.world
        lines = [
            f"# nThread 1 nGpus 1 minBytes {options.min_bytes} maxBytes {options.max_bytes} "
            f"step: {options.step_factor}(factor) warmup iters: {options.warmup_iters} iters: {options.iters} "
            "agg iters: 1 validation: 1 graph: 0\n#\n# Using devices"
        ]
        places = world.collect((os.getpid(), world.device.index or 0))
        for member, (pid, index) in zip(world.members, places, strict=True):
            place = f"on {member['host']:>10s} device {index:2d} [0x00] {member['device']}"
            lines.append(f"#  Rank {member['rank']:2d} Group  0 Pid {pid:6d} {place}")
        left, half = "{:>12s}  {:>12s}  {:>8s}  {:>6s}  {:>6s}", "  {:>7s}  {:>6s}  {:>6s}  {:>6s}"
        titles = left.format("size", "count", "type", "redop", "root")
        titles += 2 * half.format("time", "algbw", "busbw", "#wrong")
        units = left.format("(B)", "(elements)", "", "", "") + 2 * half.format(
            "(us)", "(GB/s)", "(GB/s)", ""
        )
        over = (
            "#"
            + " " * 51
            + "{:>31s}  {:>31s}".format("out-of-place".center(31), "in-place".center(31))
        )
        self._print("\n".join([*lines, "#", over, f"#{titles[1:]}", f"#{units[1:]}"]))


def _row_text(row: dict[str, typing.Any]) -> str:
    text = f"{row['size']:12d}  {row['count']:12d}  {row['type']:>8s}  {row['redop']:>6s}  {row['root']:6d}"
    for placement in ("out_of_place", "in_place"):
        found = row[placement]
        if found is None:
            text += "  {:>7s}  {:>6s}  {:>6s}  {:>6s}".format(*["N/A"] * 4)
            continue
        rates = "  ".join(
            f"{x:6.1f}" if x >= 1000 else f"{x:6.2f}" for x in (found["alg_bw"], found["bus_bw"])
        )
        digits = 0 if found["time"] >= 10_000 else 1 if found["time"] >= 100 else 2
        text += f"  {found['time']:7.{digits}f}  {rates}  {found['nwrong']:6g}"
    return text
