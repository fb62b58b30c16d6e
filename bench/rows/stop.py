"""Seconds from a preemption warning (the stop file) to saved and ended, on two ranks, against Slurm's KillWait."""

# pyright: basic, reportPrivateImportUsage=false
import json
import pathlib
import time

from bench import commands, data, row

LIMIT_S = 30.0  # Slurm's default KillWait: the time of a job between TERM and KILL
TURNS = 5


def run(scratch: pathlib.Path) -> list[row.Row]:
    """Measure five warnings."""
    dataset = data.dataset(scratch / "data", 400_000, 256)
    turns = [_warn(dataset.root, scratch / str(turn)) for turn in range(TURNS)]
    found = zip(("saved", "all processes ended"), zip(*turns, strict=True), strict=True)
    about = (LIMIT_S, "s", "Slurm's KillWait (a limit)", False, 3.0)
    return [row.Row(f"warning to {what}", row.median(s), *about, note=row.spread(s, "s")) for what, s in found]


def _warn(data_root: pathlib.Path, folder: pathlib.Path) -> tuple[float, float]:
    """Return the seconds from the warning to saved, and to the end of all processes."""
    folder.mkdir()
    stop = folder / "stop"
    words = [*commands.tiny(data_root, folder / "run"), "--steps", 100_000, "--epoch-steps", 100_000]
    process = commands.start(2, *words, STOP_FILE=str(stop), RUN_ATTEMPT_ID="1.r0")
    commands.wait_for(process, "step=30/")
    began = time.perf_counter()
    stop.touch()
    commands.wait_for(process, "[PREEMPT]")
    saved_s = time.perf_counter() - began
    process.communicate()
    ended_s = time.perf_counter() - began
    outcome = json.loads((folder / "run" / "control" / "1.r0.outcome").read_text())
    assert outcome["outcome"] == "preempted"
    return saved_s, ended_s
