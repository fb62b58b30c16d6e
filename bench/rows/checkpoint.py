"""How long the training loop stands still for a checkpoint of GPT-2 124M with AdamW's moments (1.49 GB)."""

# pyright: basic, reportPrivateImportUsage=false
import os
import pathlib
import shutil
import time
import typing

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from bench import row
from ddptrain import checkpoint, engine, model, shapes

SAVES = 3


def run(scratch: pathlib.Path) -> list[row.Row]:
    """Measure torch.save, torch's distributed checkpoint and ours, three saves each, the first one cold."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    core = model.GPT(shapes.Shape(12, 12, 768, 1024, 50304))
    optimizer = torch.optim.AdamW(core.parameters(), fused=True)
    engine.fill_optimizer(optimizer)
    state = {"model": core.state_dict(), "optimizer": optimizer.state_dict()}
    meta = {"step": 1, "epoch": 1, "format": "torch", "world_size": 1}

    plain: list[float] = []
    for _ in range(SAVES):
        began = time.perf_counter()
        with (scratch / "plain.tmp").open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        (scratch / "plain.tmp").replace(scratch / "plain.pt")
        plain.append(time.perf_counter() - began)
    (scratch / "plain.pt").unlink()

    distributed: list[float] = []
    for number in range(SAVES):
        began = time.perf_counter()
        dcp.save(state, checkpoint_id=str(scratch / f"dcp{number}"))
        distributed.append(time.perf_counter() - began)
        shutil.rmtree(scratch / f"dcp{number}")

    asynchronous: list[float] = []
    for number in range(SAVES):
        began = time.perf_counter()
        future: typing.Any = dcp.async_save(state, checkpoint_id=str(scratch / f"dcp{number}"))
        asynchronous.append(time.perf_counter() - began)
        future.result()
        shutil.rmtree(scratch / f"dcp{number}")

    (scratch / "run").mkdir()
    saver = checkpoint.Saver(scratch / "run", keep=2, attempt="bench")
    saver.prepare(state["model"], state["optimizer"])  # as the trainer does after its first step
    tokens = torch.randint(50257, (1, 129))
    written: list[float] = []
    for step in range(1, SAVES + 1):
        began = time.perf_counter()
        saver.save(f"epoch-{step:04d}", state["model"], state["optimizer"], meta, [checkpoint.random_states()])
        core(tokens[:, :-1], tokens[:, 1:]).backward()  # training goes on ...
        saver.before_update()  # ... up to the next update, which waits for the copy
        core.zero_grad()
        saver.wait()
        written.append(time.perf_counter() - began)
    saver.close()
    dist.destroy_process_group()
    ours, warm = row.median(saver.stall_s), row.median(asynchronous[1:])
    size = sum(t.numel() * t.element_size() for t in checkpoint._distinct(state).values()) / 1e9
    note = f"{size:.2f} GB; all stalls: {', '.join(f'{s:.3f}' for s in saver.stall_s)} s; a pass of 128 tokens between"
    return [
        row.Row(
            "checkpoint stall",
            ours,
            row.median(plain),
            "s",
            "torch.save + fsync + rename",
            more_is_better=False,
            goal=40.0,
            note=note,
        ),
        row.Row("checkpoint stall", ours, row.median(distributed), "s", "dcp.save", more_is_better=False),
        row.Row("checkpoint stall", ours, warm, "s", "dcp.async_save, warm", more_is_better=False, goal=3.0),
        row.Row(
            "checkpoint on disk after",
            row.median(written),
            row.median(plain),
            "s",
            "torch.save + fsync + rename",
            more_is_better=False,
        ),
    ]
