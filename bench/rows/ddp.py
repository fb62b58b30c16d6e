"""Tokens per second of two gloo ranks: our arguments of DDP against its defaults, same model, in turns."""

# pyright: basic, reportPrivateImportUsage=false
import multiprocessing
import os
import pathlib
import socket
import time
import typing

import torch
from torch.nn import parallel

from bench import row
from ddptrain import config, distributed, engine, model, shapes

STEPS, TURNS, BATCH, SEQ_LEN = 3, 5, 4, 128


def run(_: pathlib.Path) -> list[row.Row]:
    """Measure in two spawned ranks."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    box: typing.Any = context.Queue()
    ranks = [context.Process(target=_rank, args=(rank, port, box)) for rank in range(2)]
    for process in ranks:
        process.start()
    ours, plain = box.get(timeout=250)
    for process in ranks:
        process.join()
    tokens = STEPS * 2 * BATCH * SEQ_LEN
    return [
        row.Row(
            "DDP, 10.7 M parameters, two gloo ranks",
            tokens / ours,
            tokens / plain,
            "tok/s",
            "DDP's defaults, AdamW not fused",
            goal=1.0,
        )
    ]


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
    tokens = torch.randint(300, (BATCH, SEQ_LEN + 1))
    with distributed.joined("cpu") as world:
        settings = config.complete(config.Config(model="small", precision="fp32"), "cpu", {})
        shape = shapes.Shape(6, 6, 384, SEQ_LEN, 320)
        pairs = []
        for mine in (True, False):
            core = model.GPT(shape)
            wrapped = engine.wrap(core, settings, world) if mine else parallel.DistributedDataParallel(core)
            pairs.append(
                (
                    wrapped,
                    engine.make_optimizer(core, settings, world.device)
                    if mine
                    else torch.optim.AdamW(core.parameters()),
                )
            )
        taken: list[list[float]] = [[], []]
        for turn in range(TURNS + 1):
            for times, (wrapped, optimizer) in zip(taken, pairs, strict=True):
                world.barrier()
                began = time.perf_counter()
                for _ in range(STEPS):
                    wrapped(tokens[:, :-1], tokens[:, 1:]).backward()
                    torch.nn.utils.clip_grad_norm_(wrapped.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=True)
                if turn:
                    times.append(time.perf_counter() - began)
        if rank == 0:
            box.put([row.median(times) for times in taken])
