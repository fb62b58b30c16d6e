"""How long the training loop stands still for a checkpoint of GPT-2 124M with AdamW's moments (1.49 GB)."""

# pyright: basic, reportPrivateImportUsage=false
import os
import pathlib
import shutil
import typing

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from bench import row
from ddptrain import checkpoint, engine, model, saver, shapes

SAVES = 5


def run(scratch: pathlib.Path) -> list[row.Row]:
    """Measure torch.save, torch's distributed checkpoint and ours, in turns."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    core = model.GPT(shapes.Shape(12, 12, 768, 1024, 50304))
    optimizer = torch.optim.AdamW(core.parameters(), fused=True)
    engine.fill_optimizer(optimizer)
    state = {"model": core.state_dict(), "optimizer": optimizer.state_dict()}
    meta = {"step": 1, "epoch": 1, "format": checkpoint.DCP, "world_size": 1}

    (scratch / "run").mkdir()
    own = checkpoint.state_of(core, optimizer)
    writer = saver.Saver(scratch / "run", keep=2, attempt="bench")
    writer.prepare(own)  # as the trainer does after its first step
    tokens = torch.randint(50257, (1, 129))

    def ours(step: int) -> None:
        writer.save(f"epoch-{step:04d}", own, meta, [checkpoint.random_states()])
        core(tokens[:, :-1], tokens[:, 1:]).backward()  # training goes on ...
        writer.before_update()  # ... up to the next update, which waits for the copy
        core.zero_grad()
        writer.wait()

    plain, distributed, asynchronous, written = (row.Laps() for _ in range(4))
    for step in range(1, SAVES + 1):
        plain.measure(lambda: _save(state, scratch / "plain.pt"))
        distributed.measure(lambda: dcp.save(state, checkpoint_id=str(scratch / "dcp")))
        shutil.rmtree(scratch / "dcp")
        future: typing.Any = asynchronous.measure(lambda: dcp.async_save(state, checkpoint_id=str(scratch / "dcp")))
        future.result()
        shutil.rmtree(scratch / "dcp")
        written.measure(lambda step=step: ours(step))
    writer.close()
    dist.destroy_process_group()
    stall, warm = row.median(writer.stall_s), asynchronous.wall_s[1:]
    size = sum(t.numel() * t.element_size() for t in saver.tensors(own)) / 1e9
    note = f"{size:.2f} GB; {row.spread(writer.stall_s, 's')}, a pass of 128 tokens between; peer "
    peers = (
        ("torch.save + fsync + rename", plain.wall_s, 40.0),
        ("dcp.save", distributed.wall_s, None),
        ("dcp.async_save, warm", warm, 3.0),
    )
    return [
        *(
            row.Row(
                "checkpoint stall", stall, row.median(seconds), "s", peer, more_is_better=False, goal=goal,
                note=f"{note}{row.spread(seconds, 's')}",
            )
            for peer, seconds, goal in peers
        ),
        row.Row(
            "checkpoint on disk after", row.median(written.wall_s), row.median(plain.wall_s), "s", peers[0][0],
            more_is_better=False, note=f"{written.beside(plain)}; ours contains the pass",
        ),
    ]  # fmt: skip


def _save(state: dict[str, typing.Any], path: pathlib.Path) -> None:
    """Save as is usual: durably, beside the file that is then replaced."""
    partial = path.with_suffix(".tmp")
    with partial.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
