"""A process that does nothing but save, for the tests that kill it."""

# pyright: basic, reportPrivateImportUsage=false
import os
import pathlib

import torch

from ddptrain import checkpoint, saver

SHAPES = ((64, 256), (256,), (512, 64))


def state(step: int) -> dict[str, dict]:
    """Return a model and moments that hold their step's number in every element."""
    weights, moments = ({f"weight{i}": torch.full(shape, float(step)) for i, shape in enumerate(SHAPES)} for _ in "wm")
    return {"model": weights, "optimizer": {"moments": moments}}


def holds(path: pathlib.Path, step: int) -> bool:
    """Return whether the tensors of a checkpoint are all those of a step."""
    found = state(0)
    checkpoint.read_into(path, found)
    return all(bool((tensor == step).all()) for tensor in saver.tensors(found))


def meta(step: int) -> dict[str, object]:
    return {"step": step, "epoch": step, "format": checkpoint.DCP, "world_size": 1}


def save(writer: saver.Saver, step: int, *, is_best: bool = False) -> None:
    name = checkpoint.name_of(step, step, ends_epoch=True)
    writer.save(name, state(step), meta(step), is_best=is_best)


def save_forever(run_dir: pathlib.Path, first: int, acknowledge: int) -> None:
    """Save step after step, reporting each that is on disk through the pipe."""
    torch.set_num_threads(1)
    writer = saver.Saver(run_dir, keep=2, attempt="test")
    os.write(acknowledge, b"0\n")
    step = first
    while True:
        save(writer, step, is_best=step % 7 == 0)
        writer.wait()
        os.write(acknowledge, f"{step}\n".encode())
        step += 1
