"""Seconds from a preemption warning (the stop file) to saved and ended, on two ranks."""

# pyright: basic, reportPrivateImportUsage=false
import json
import pathlib
import time

from bench import commands, data, row

LIMIT_S = 30.0  # Slurm's default KillWait: what a job has between TERM and KILL
TURNS = 5


def run(scratch: pathlib.Path) -> list[row.Row]:
    """Measure the drill against Slurm's KillWait; the row `requeue` has it beside submitit's, in a Slurm."""
    dataset = data.dataset(scratch / "data", 400_000, 256)
    turns = [_drill(dataset.root, scratch / str(turn)) for turn in range(TURNS)]
    return [
        row.Row(
            measure, row.median(seconds), LIMIT_S, "s", "Slurm's KillWait (a limit)", more_is_better=False, goal=3.0,
            note=row.spread(seconds, "s"),
        )
        for measure, seconds in zip(
            ("warning to saved", "warning to all processes ended"), zip(*turns, strict=True), strict=True
        )
    ]  # fmt: skip


def _drill(data_root: pathlib.Path, folder: pathlib.Path) -> tuple[float, float]:
    """Return the seconds from the warning to saved, and to the end of all processes."""
    folder.mkdir()
    stop = folder / "stop"
    process = commands.start(
        2, *commands.tiny(data_root, folder / "run"), "--steps", 100_000, "--epoch-steps", 100_000,
        STOP_FILE=str(stop), RUN_ATTEMPT_ID="1.r0"
    )  # fmt: skip
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
