"""Seconds from starting torchrun to the first step on two ranks, against importing torch twice in a row."""

# pyright: basic, reportPrivateImportUsage=false
import pathlib
import subprocess
import sys
import time

from bench import commands, data, row

TURNS = 5


def run(scratch: pathlib.Path) -> list[row.Row]:
    """Measure starts of each, in turns."""
    dataset = data.dataset(scratch / "data", 400_000, 256)
    ours: list[float] = []
    floor: list[float] = []
    for turn in range(TURNS):
        began = time.perf_counter()
        process = commands.start(2, *commands.tiny(dataset.root, scratch / f"run{turn}"), "--steps", 2)
        commands.wait_for(process, "step=1/")
        ours.append(time.perf_counter() - began)
        process.communicate()
        began = time.perf_counter()
        for _ in range(2):  # the launcher imports it, then each rank does
            subprocess.run([sys.executable, "-c", "import torch, torch.distributed.run"], check=True)
        floor.append(time.perf_counter() - began)
    note = f"{row.spread(ours, 's')}, peer {row.spread(floor, 's')}; launcher and two ranks on these cores"
    medians = (row.median(ours), row.median(floor))
    return [row.Row("start to first step", *medians, "s", "importing torch twice", more_is_better=False, note=note)]
