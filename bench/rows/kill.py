"""SIGKILL at 50 random moments of saving: how often nothing can be loaded afterwards."""

# pyright: basic, reportPrivateImportUsage=false
import os
import pathlib
import random
import signal
import time

import torch

from bench import row
from ddptrain import checkpoint

KILLS = 50
SHAPE = (1024, 1024)  # 4 MiB, so that a save takes some milliseconds


def run(scratch: pathlib.Path) -> list[row.Row]:
    """Measure ours, and torch.save over the same file, the usual way."""
    torch.set_num_threads(1)
    chance = random.Random(5)
    lost = {"ours": 0, "peer": 0}
    for name, save in (("ours", _save_ours), ("peer", _save_over)):
        folder = scratch / name
        folder.mkdir()
        for _ in range(KILLS):
            read, write = os.pipe()
            victim = os.fork()
            if not victim:
                save(folder, write)
            os.close(write)
            os.read(read, 1)  # one save is done
            time.sleep(chance.uniform(0.0, 0.05))
            os.kill(victim, signal.SIGKILL)
            os.waitpid(victim, 0)
            os.close(read)
            lost[name] += not _readable(folder, name)
    return [
        row.Row(
            "SIGKILL amid saving: still loadable",
            KILLS - lost["ours"],
            KILLS - lost["peer"],
            "of 50",
            "torch.save over the same file",
        )
    ]


def _save_ours(folder: pathlib.Path, tell: int) -> None:
    saver = checkpoint.Saver(folder, keep=2, attempt="kill")
    step = 0
    while True:
        step += 1
        meta = {"step": step, "epoch": step, "format": "torch", "world_size": 1}
        saver.save(f"epoch-{step:04d}", {"w": torch.full(SHAPE, float(step))}, {}, meta, [])
        saver.wait()
        os.write(tell, b"." if step == 1 else b"")


def _save_over(folder: pathlib.Path, tell: int) -> None:
    step = 0
    while True:
        step += 1
        torch.save({"w": torch.full(SHAPE, float(step))}, folder / "ckpt.pt")
        os.write(tell, b"." if step == 1 else b"")


def _readable(folder: pathlib.Path, name: str) -> bool:
    try:
        if name == "ours":
            found = checkpoint.choose(folder, "auto")
            assert found is not None
            tensor = checkpoint.load(found.path, "model")["w"]
        else:
            tensor = torch.load(folder / "ckpt.pt")["w"]
    except Exception:  # whatever it is, it cannot be loaded
        return False
    return bool((tensor == tensor[0, 0]).all())
