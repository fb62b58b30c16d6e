"""The ranks' network measured as nccl-tests does, in its table, with every result checked.

Sizes, counts, algbw and busbw have the same meaning (nccl-tests' doc/PERFORMANCE.md): GB is 1e9
bytes, the time of a size is the mean of its iterations, then over the ranks. `#wrong` counts the
elements whose bits differ (exchanges.py).
"""

# pyright: basic, reportPrivateImportUsage=false
# ruff: noqa: RUF009 - flags.option returns a dataclasses.field
import argparse
import dataclasses
import functools
import os
import pathlib
import re
import time
import typing

import torch
from torch import Tensor

from ddptrain.ground import attempt, errors, files, log
from ddptrain.options import flags
from ddptrain.world import distributed, exchanges, round_trips

Figures = dict[str, typing.Any]

_PLACEMENTS = ("out_of_place", "in_place")
# Columns of nccl-tests: on the left, and for each placement
_LEFT = "{:>12s}  {:>12s}  {:>8s}  {:>6s}  {:>6s}"
_RIGHT = "  {:>7s}  {:>6s}  {:>6s}  {:>6s}"


@dataclasses.dataclass(frozen=True)
class Options:
    """The command line; the short flags are nccl-tests'."""

    collective: tuple[str, ...] = flags.option(
        "all_reduce", f"comma-separated, or all: {', '.join(exchanges.COLLECTIVES)}", str
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
        "float", "type of the elements", choices=tuple(exchanges.EXACT_BITS), short="-d"
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
    """Return the options; those that depend on the device are completed later.

    Raises UserError, which names the flag.
    """
    options = flags.given(args, Options)
    known = tuple(exchanges.COLLECTIVES)
    wanted = known if options.collective == "all" else tuple(options.collective.split(","))
    for name in wanted:
        if name not in known:
            remedy = f"must be one of {', '.join(known)}, or all"
            raise errors.UserError(f"--collective {name}: {remedy}")
    low = parse_bytes("--min-bytes", options.min_bytes)
    high = parse_bytes("--max-bytes", options.max_bytes)
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
    trips_ms = round_trips.measure(world)
    wrong = sum(result["out_of_bounds"]["count"] for result in results)
    if world.is_main and options.json is not None:
        found = distributed.describe(world)
        found["ranks"] = world.members
        found["iface"] = world.interface
        found["collectives"] = results
        found["trips_ms"] = trips_ms
        found["created"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        files.write_json(options.json, found)
    if wrong:
        fault = "a link, a GPU or its memory is at fault: drain the nodes and test them one by one"
        raise errors.SharedError(f"{wrong} elements arrived wrong; {fault}")
    log.emit(
        "DONE", workload="collectives", ranks=world.size, elapsed_s=time.perf_counter() - began
    )
    if world.is_main:
        attempt.write_outcome(options.run_dir, attempt.DONE, step=0)


_DEFAULTS = {
    "cpu": {
        "min_bytes": 1 << 10,
        "max_bytes": 64 << 20,
        "step_factor": 4,
        "iters": 10,
        "warmup_iters": 2,
    },
    "cuda": {
        "min_bytes": 8 << 20,
        "max_bytes": 8 << 30,
        "step_factor": 2,
        "iters": 50,
        "warmup_iters": 5,
    },
}


def _completed(options: Options, device: str) -> Options:
    missing: Figures = {}
    for name, value in _DEFAULTS[device].items():
        if getattr(options, name) is None:
            missing[name] = value
    return dataclasses.replace(options, **missing)


def sizes(options: Options) -> list[int]:
    """Return the sizes in bytes, smallest first."""
    found = [options.min_bytes]
    while (after := found[-1] * options.step_factor) <= options.max_bytes:
        found.append(after)
    return found


class Bench:
    """Measures collectives between the ranks, and prints their tables on rank 0."""

    def __init__(self, options: Options, world: distributed.World) -> None:
        self.options = options
        self.world = world
        self.coder = exchanges.Coder(options.datatype, world.size, world.device)

    def measure(self, name: str) -> Figures:
        """Measure a collective in each size, and return its figures."""
        self._print_header()
        rows: list[Figures] = []
        for wanted in sizes(self.options):
            row = self._row(exchanges.COLLECTIVES[name], wanted)
            rows.append(row)
            self._print(_row_text(row))

        measured = [row[place] for row in rows for place in _PLACEMENTS if row[place]]
        rates = [found["bus_bw"] for found in measured]
        average = sum(rates) / len(rates)
        wrong = sum(found["nwrong"] for found in measured)
        self._print(f"# Out of bounds values : {wrong} {'FAILED' if wrong else 'OK'}")
        self._print(f"# Avg bus bandwidth    : {average:g}\n#")
        self._print(f"# Collective test concluded: {name}_perf")
        log.emit(
            "RESULT",
            collective=name,
            ranks=self.world.size,
            avg_busbw=average,
            max_busbw=max(rates),
            wrong=wrong,
        )
        return {
            "collective": name,
            "config": {"iters": self.options.iters, "warmup_iters": self.options.warmup_iters},
            "results": rows,
            "out_of_bounds": {"count": wrong, "okay": not wrong},
            "average_bus_bandwidth": {"bandwidth": average},
        }

    def _row(self, collective: exchanges.Collective, wanted: int) -> Figures:
        """Measure a collective with messages of about so many bytes, in both placements."""
        parts = self.world.size if collective.total else 1
        part_bytes = self.coder.dtype.itemsize * parts
        count = max(1, wanted // part_bytes)
        row: Figures = {
            "size": count * part_bytes,
            "count": count,
            "type": self.options.datatype,
            "redop": "sum" if collective.reduces else "none",
            "root": 0 if collective.rooted else -1,
            "out_of_place": None,
            "in_place": None,
        }
        with self.world.together():  # a size that does not fit is rejected by all
            send = self._buffer(count * (collective.sends or self.world.size))
            recv = self._buffer(count * (collective.receives or self.world.size))
        buffers = exchanges.Buffers(send, recv, count, self.world.rank, self.world.size)
        for place in _PLACEMENTS:
            call = getattr(collective, place)
            if call is None:
                continue
            found = self._time(call, collective, buffers, inside=place == "in_place")
            found["alg_bw"] = row["size"] / found["time"] / 1e3
            found["bus_bw"] = found["alg_bw"] * collective.bus_factor(self.world.size)
            row[place] = found
        return row

    def _buffer(self, count: int) -> Tensor:
        try:
            return torch.empty(count, dtype=self.coder.dtype, device=self.world.device)
        except RuntimeError as e:
            what = f"no memory for a buffer of {count * self.coder.dtype.itemsize} bytes"
            raise errors.UserError(f"{what}; lower --max-bytes") from e

    def _fill(
        self, collective: exchanges.Collective, b: exchanges.Buffers, *, inside: bool
    ) -> None:
        """Fill both buffers before a checked call, with other values where results will go."""
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
            exchanges.part(b.recv, b).copy_(values)
        elif inside and collective.sends == 1:
            b.recv.copy_(values)

    def _time(
        self,
        call: typing.Callable[[exchanges.Buffers], object],
        collective: exchanges.Collective,
        b: exchanges.Buffers,
        *,
        inside: bool,
    ) -> dict[str, typing.Any]:
        """Return the time in microseconds, and the number of wrong elements over all ranks."""
        self._fill(collective, b, inside=inside)
        call(b)
        found = exchanges.part(b.send, b) if inside and collective.sends == 0 else b.recv
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
        options = self.options
        places = self.world.collect((os.getpid(), self.world.device.index or 0))
        lines = [
            f"# nThread 1 nGpus 1 minBytes {options.min_bytes} maxBytes {options.max_bytes} "
            f"step: {options.step_factor}(factor) warmup iters: {options.warmup_iters} "
            f"iters: {options.iters} agg iters: 1 validation: 1 graph: 0",
            "#",
            "# Using devices",
        ]
        for member, (pid, index) in zip(self.world.members, places, strict=True):
            place = f"on {member['host']:>10s} device {index:2d} [0x00] {member['device']}"
            lines.append(f"#  Rank {member['rank']:2d} Group  0 Pid {pid:6d} {place}")

        titles = _LEFT.format("size", "count", "type", "redop", "root")
        titles += 2 * _RIGHT.format("time", "algbw", "busbw", "#wrong")
        units = _LEFT.format("(B)", "(elements)", "", "", "")
        units += 2 * _RIGHT.format("(us)", "(GB/s)", "(GB/s)", "")
        over = "{:>31s}  {:>31s}".format("out-of-place".center(31), "in-place".center(31))
        lines += ["#", f"#{' ' * 51}{over}", f"#{titles[1:]}", f"#{units[1:]}"]
        self._print("\n".join(lines))


def _row_text(row: Figures) -> str:
    text = _LEFT.format(
        str(row["size"]), str(row["count"]), row["type"], row["redop"], str(row["root"])
    )
    return text + "".join(_placement_text(row[place]) for place in _PLACEMENTS)


def _placement_text(found: Figures | None) -> str:
    if found is None:
        return _RIGHT.format("N/A", "N/A", "N/A", "N/A")
    digits = 2
    if found["time"] >= 100:
        digits = 1
    if found["time"] >= 10_000:
        digits = 0
    time_us = f"{found['time']:.{digits}f}"
    alg_bw = _rate(found["alg_bw"])
    return _RIGHT.format(time_us, alg_bw, _rate(found["bus_bw"]), f"{found['nwrong']:g}")


def _rate(value: float) -> str:
    return f"{value:.1f}" if value >= 1000 else f"{value:.2f}"
