"""A process that does nothing but save, for the tests that kill it."""

# pyright: basic, reportPrivateImportUsage=false
import os
import pathlib

import torch

from ddptrain import checkpoint

SHAPES = ((64, 256), (256,), (512, 64))


def state(step: int) -> dict[str, torch.Tensor]:
    """Return tensors that hold their step's number in every element."""
    return {f"weight{i}": torch.full(shape, float(step)) for i, shape in enumerate(SHAPES)}


def meta(step: int) -> dict[str, object]:
    return {"step": step, "epoch": step, "format": "torch", "world_size": 1}


def save_forever(run_dir: pathlib.Path, first: int, acknowledge: int) -> None:
    """Save step after step, telling each that is on disk through the pipe."""
    torch.set_num_threads(1)
    saver = checkpoint.Saver(run_dir, keep=2, attempt="test")
    os.write(acknowledge, b"0\n")
    step = first
    while True:
        name = checkpoint.name_of(step, step, ends_epoch=True)
        saver.save(
            name, state(step), {"moments": state(step)}, meta(step), [checkpoint.random_states()], is_best=step % 7 == 0
        )
        saver.wait()
        os.write(acknowledge, f"{step}\n".encode())
        step += 1
