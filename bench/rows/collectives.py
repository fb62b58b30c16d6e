"""all_reduce on two gloo ranks as the bench of collectives times it, against a bare loop in the same processes."""

# pyright: basic, reportPrivateImportUsage=false
import argparse
import dataclasses
import multiprocessing
import os
import pathlib
import socket
import time
import typing

import torch
import torch.distributed as dist

from bench import row
from ddptrain import collectives, distributed

SIZES = {1 << 20: 300, 16 << 20: 30, 64 << 20: 12}  # turns of each: more of what is over before a neighbour is
ITERS = 8


def run(_: pathlib.Path) -> list[row.Row]:
    """Measure both in turns on two forked ranks."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    box: typing.Any = context.Queue()
    ranks = [context.Process(target=_rank, args=(rank, port, box)) for rank in range(2)]
    for process in ranks:
        process.start()
    found: list[tuple[int, float, float, int]] = box.get(timeout=200)
    for process in ranks:
        process.join()
    return [
        row.Row(
            f"all_reduce {size >> 20} MiB, two gloo ranks", size / ours / 1e9, size / bare / 1e9, "GB/s",
            "a bare loop of dist.all_reduce",
            goal=0.95, note=f"#wrong {wrong}",
        )
        for size, ours, bare, wrong in found
    ]  # fmt: skip


def _rank(rank: int, port: int, box: typing.Any) -> None:
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE="2",
        LOCAL_RANK=str(rank),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        OMP_NUM_THREADS="1",
    )
    torch.set_num_threads(1)
    found: list[tuple[int, float, float, int]] = []
    with distributed.joined("cpu") as world:
        options = collectives._completed(collectives.check(_arguments()), "cpu")
        coder = collectives.Coder("float", 2, world.device)
        collective = collectives.COLLECTIVES["all_reduce"]
        call = collective.in_place
        assert call is not None
        quiet = dataclasses.replace(options, check=0)
        for size, turns in SIZES.items():
            buffers = collectives._allocate(collective, size // 4, world, coder)

            def timed(options: collectives.Options, buffers: collectives.Buffers = buffers) -> dict[str, typing.Any]:
                return collectives._time(
                    call, collective, buffers, options=options, world=world, coder=coder, inside=True
                )

            def bare(tensor: torch.Tensor = buffers.recv) -> float:
                tensor.zero_()
                for _ in range(options.warmup_iters):
                    dist.all_reduce(tensor)
                world.barrier()
                began = time.perf_counter()
                for _ in range(ITERS):
                    dist.all_reduce(tensor)
                return world.sum([(time.perf_counter() - began) / ITERS])[0] / 2

            wrong = timed(options)["nwrong"]
            ours: list[float] = []
            plain: list[float] = []
            for turn in range(turns):  # each goes first as often as the other
                if turn % 2:
                    plain.append(bare())
                ours.append(timed(quiet)["time"] / 1e6)
                if not turn % 2:
                    plain.append(bare())
            found.append((size, row.median(ours), row.median(plain), wrong))
        if rank == 0:
            box.put(found)


def _arguments() -> typing.Any:
    parser = argparse.ArgumentParser()
    collectives.add_arguments(parser)
    return parser.parse_args(["-n", str(ITERS)])
