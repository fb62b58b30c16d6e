"""SIGKILL at 50 random moments of saving: how often nothing can be loaded afterwards."""

# pyright: basic, reportPrivateImportUsage=false
import collections.abc
import os
import pathlib
import random
import signal
import time
import typing

import torch

from bench import data, row
from bench.peers import checkouts, nanogpt
from ddptrain import checkpoint, saver

KILLS = 50
SHAPE = (1024, 1024)  # 4 MiB, so that a save takes some milliseconds


def run(scratch: pathlib.Path) -> list[row.Row | row.NotHere]:
    """Measure ours, torch.save over the same file, the usual way, and nanoGPT's loop, which saves at each step."""
    torch.set_num_threads(1)
    ours = KILLS - _lost(scratch / "ours", _save_ours, _load_ours)
    plain = KILLS - _lost(scratch / "plain", _save_over, lambda folder: _is_whole(torch.load(folder / "ckpt.pt")["w"]))
    found: list[row.Row | row.NotHere] = [_row(ours, plain, "torch.save over the same file, in a loop")]
    checkout = checkouts.look("nanoGPT")
    if isinstance(checkout, row.NotHere):
        return [*found, checkout]
    folder = scratch / "theirs"
    nanogpt.lay_out(folder, checkout, data.dataset(scratch / "data", 200_000, 256))
    program = nanogpt.Program(
        checkout, folder, eval_interval=1, eval_iters=1, always_save_checkpoint=True, gradient_accumulation_steps=1,
        batch_size=1, block_size=64, n_layer=1, n_head=1, n_embd=256, max_iters=10**9,
    )  # fmt: skip
    program.run(2)  # the first save comes with the second step

    def train(_: pathlib.Path, tell: int) -> None:
        program.run(1)
        os.write(tell, b".")
        program.run(10**9)

    def load(folder: pathlib.Path) -> bool:
        return bool(torch.load(folder / "out" / "ckpt.pt")["model"])

    theirs = KILLS - _lost(folder, train, load)
    return [*found, _row(ours, theirs, "nanoGPT's train.py with always_save_checkpoint, at each step")]


def _row(ours: int, peer: int, name: str) -> row.Row:
    return row.Row("SIGKILL amid saving: still loadable", ours, peer, f"of {KILLS}", name)


def _lost(
    folder: pathlib.Path,
    save: collections.abc.Callable[[pathlib.Path, int], None],
    load: collections.abc.Callable[[pathlib.Path], bool],
) -> int:
    """Return how often nothing could be loaded after a process that saves over and over was killed."""
    chance = random.Random(5)
    folder.mkdir(exist_ok=True)
    lost = 0
    for _ in range(KILLS):
        read, write = os.pipe()
        victim = os.fork()
        if not victim:
            _end_in(save, folder, write)
        os.close(write)
        if os.read(read, 1) != b".":  # one save is done
            raise RuntimeError(f"{folder.name}: the process that saves ended by itself")
        time.sleep(chance.uniform(0.0, 0.05))
        os.kill(victim, signal.SIGKILL)
        os.waitpid(victim, 0)
        os.close(read)
        try:
            lost += not load(folder)
        except Exception:  # whatever it is, it cannot be loaded
            lost += 1
    return lost


def _end_in(
    save: collections.abc.Callable[[pathlib.Path, int], None], folder: pathlib.Path, tell: int
) -> typing.NoReturn:
    try:
        save(folder, tell)
    finally:
        os._exit(1)


def _save_ours(folder: pathlib.Path, tell: int) -> None:
    writer = saver.Saver(folder, keep=2, attempt="kill")
    step = 0
    while True:
        step += 1
        meta = {"step": step, "epoch": step, "format": checkpoint.DCP, "world_size": 1}
        writer.save(f"epoch-{step:04d}", {"w": torch.full(SHAPE, float(step))}, meta, [])
        writer.wait()
        os.write(tell, b"." if step == 1 else b"")


def _save_over(folder: pathlib.Path, tell: int) -> None:
    step = 0
    while True:
        step += 1
        torch.save({"w": torch.full(SHAPE, float(step))}, folder / "ckpt.pt")
        os.write(tell, b"." if step == 1 else b"")


def _load_ours(folder: pathlib.Path) -> bool:
    found = checkpoint.choose(folder, "auto")
    assert found is not None
    state = {"w": torch.empty(SHAPE)}
    checkpoint.read_into(found.path, state)
    return _is_whole(state["w"])


def _is_whole(tensor: torch.Tensor) -> bool:
    """Return whether all of it is of one save."""
    return bool((tensor == tensor[0, 0]).all())
