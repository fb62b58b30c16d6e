"""How long training stands still for a checkpoint of GPT-2 124M with AdamW's moments (1.49 GB)."""

# pyright: basic, reportPrivateImportUsage=false
import os
import pathlib
import re
import shutil
import typing

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from bench import commands, data, row
from ddptrain import model, shapes

SAVES = 6  # the first one warms up
BETWEEN = 5  # steps between saves, during which the last save is written
LIMIT_S = 600
_STALL = re.compile(r"\[CKPT\] saved=.* stall_s=([0-9.]+)")


def run(scratch: pathlib.Path) -> list[row.Row]:
    """Measure a training that saves every few steps, and torch's ways on the same tensors."""
    peers = _peers(scratch)
    dataset = data.dataset(scratch / "data", 100_000, 50257)
    places = ("--data", dataset.root, "--run-dir", scratch / "run")
    size = "--layers 12 --heads 12 --width 768 --seq-len 128 --batch 1 --precision fp32".split()
    steps = ("--steps", SAVES * BETWEEN, "--epoch-steps", BETWEEN, "--warmup", 1, "--eval-rows", 1)
    output = commands.run_ddptrain(
        "train", *places, *size, *steps, timeout_s=LIMIT_S, num_threads=2
    )
    stalls_s = [float(stall) for stall in _STALL.findall(output)][1:]
    note = f"{row.spread(stalls_s, 's')}, steps of 128 tokens between; peer "
    goals = {"torch.save + fsync + rename": 40.0, "dcp.save": None, "dcp.async_save": 3.0}
    return [
        row.Row(
            "checkpoint stall, 1.49 GB",
            row.median(stalls_s),
            row.median(seconds),
            "s",
            peer,
            more_is_better=False,
            goal=goals[peer],
            note=note + row.spread(seconds, "s"),
        )
        for peer, seconds in peers.items()
    ]


def _peers(scratch: pathlib.Path) -> dict[str, list[float]]:
    """Return for how many seconds each of torch's ways blocks its caller, in turns."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    core = model.GPT(shapes.Shape(12, 12, 768, 1024, 50304))
    optimizer = torch.optim.AdamW(core.parameters(), fused=True)
    core(torch.zeros(1, 8, dtype=torch.long), torch.zeros(1, 8, dtype=torch.long)).backward()
    optimizer.step()
    state = {"model": core.state_dict(), "optimizer": optimizer.state_dict()}
    folder = scratch / "dcp"
    plain, distributed, asynchronous = row.Laps(), row.Laps(), row.Laps()
    for _ in range(SAVES):
        plain.measure(lambda: _save(state, scratch / "plain.pt"))
        distributed.measure(lambda: dcp.save(state, checkpoint_id=str(folder)))
        shutil.rmtree(folder)
        future: typing.Any = asynchronous.measure(
            lambda: dcp.async_save(state, checkpoint_id=str(folder))
        )
        future.result()
        shutil.rmtree(folder)
    dist.destroy_process_group()
    laps = {
        "torch.save + fsync + rename": plain,
        "dcp.save": distributed,
        "dcp.async_save": asynchronous,
    }
    return {peer: one.wall_s[1:] for peer, one in laps.items()}


def _save(state: dict[str, typing.Any], path: pathlib.Path) -> None:
    """Save in the usual durable way: to a temporary file that then replaces the target."""
    partial = path.with_suffix(".tmp")
    with partial.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
