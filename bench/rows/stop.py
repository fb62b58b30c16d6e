"""Seconds from a preemption warning (the stop file) to saved and gone, on two ranks."""

# pyright: basic, reportPrivateImportUsage=false
import json
import pathlib
import time

from bench import commands, data, row

LIMIT_S = 30.0  # Slurm's default KillWait: what a job has between TERM and KILL


def run(scratch: pathlib.Path) -> list[row.Row]:
    """Measure the drill against Slurm's KillWait."""
    dataset = data.dataset(scratch / "data", 400_000, 256)
    stop = scratch / "stop"
    process = commands.start(
        2, *commands.tiny(dataset.root, scratch / "run"), "--steps", 100_000, "--epoch-steps", 100_000,
        STOP_FILE=str(stop), RUN_ATTEMPT_ID="1.r0"
    )  # fmt: skip
    commands.wait_for(process, "step=30/")
    began = time.perf_counter()
    stop.touch()
    commands.wait_for(process, "[PREEMPT]")
    saved = time.perf_counter() - began
    process.communicate()
    gone = time.perf_counter() - began
    outcome = json.loads((scratch / "run" / "control" / "1.r0.outcome").read_text())
    assert outcome["outcome"] == "preempted"
    return [
        row.Row("warning to saved", saved, LIMIT_S, "s", "Slurm's KillWait (a limit)", more_is_better=False, goal=3.0),
        row.Row(
            "warning to all processes gone",
            gone,
            LIMIT_S,
            "s",
            "Slurm's KillWait (a limit)",
            more_is_better=False,
            goal=3.0,
        ),
    ]
