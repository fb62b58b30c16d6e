"""20 steps in one go, against 10 and a resumed 10: how many of the last ten losses are the same to the bit."""

# pyright: basic, reportPrivateImportUsage=false
import json
import pathlib

import numpy as np
import torch

from bench import commands, data, row
from bench.peers import nanogpt


def run(scratch: pathlib.Path) -> list[row.Row]:
    """Measure our command, and nanoGPT's resume: model and optimiser loaded, the seed set as at a start."""
    dataset = data.dataset(scratch / "data", 200_000, 256)
    arguments = commands.tiny(dataset.root, scratch / "whole")
    _finish(*arguments, "--steps", 20)
    arguments = commands.tiny(dataset.root, scratch / "parted")
    stop = scratch / "stop"
    stop.touch()
    first = commands.start(1, *arguments, "--steps", 20, STOP_FILE=str(stop))
    first.communicate()
    stop.unlink()
    _finish(*arguments, "--steps", 20)
    whole, parted = (_losses(scratch / name) for name in ("whole", "parted"))
    same = sum(whole[step] == parted.get(step) for step in range(11, 21))

    torch.set_num_threads(1)
    shard = dataset.splits["train"][0].path
    reference = _their_losses(shard, 20)
    start = _their_losses(shard, 10, keep=scratch / "ckpt.pt")
    rest = _their_losses(shard, 10, resume=scratch / "ckpt.pt")
    theirs = sum(a == b for a, b in zip(reference[10:], rest, strict=True))
    assert start == reference[:10]
    note = "a stop after the first step, then resumed; the peer reseeds, so it sees the first batches again"
    return [
        row.Row(
            "resume: equal losses of the last 10 steps", same, max(theirs, 0), "steps", "nanoGPT's resume", note=note
        )
    ]


def _finish(*args: object) -> None:
    process = commands.start(1, *args)
    output = process.communicate()[0]
    if process.returncode:
        raise RuntimeError(output[-1000:])


def _losses(run_dir: pathlib.Path) -> dict[int, float]:
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {r["step"]: r["loss"] for r in records if r["kind"] == "step"}


def _their_losses(
    shard: pathlib.Path, steps: int, *, keep: pathlib.Path | None = None, resume: pathlib.Path | None = None
) -> list[float]:
    torch.manual_seed(1337)
    np.random.seed(1337)
    loop = nanogpt.Loop(shard, batch=4, model=nanogpt.Model(2, 2, 64, 64, 256))
    if resume is not None:
        saved = torch.load(resume)
        loop.model.load_state_dict(saved["model"])
        loop.optimizer.load_state_dict(saved["optimizer"])
    found = [loop.step() for _ in range(steps)]
    if keep is not None:
        torch.save({"model": loop.model.state_dict(), "optimizer": loop.optimizer.state_dict()}, keep)
    return found
