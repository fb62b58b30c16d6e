"""Seconds from a preemption warning (the stop file) to saved and ended, on two ranks."""

# pyright: basic, reportPrivateImportUsage=false
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
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
    ended_s = time.perf_counter() - began
    outcome = json.loads((scratch / "run" / "control" / "1.r0.outcome").read_text())
    assert outcome["outcome"] == "preempted"
    submitit = _submitit(scratch / "submitit")
    return [
        row.Row("warning to saved", saved, LIMIT_S, "s", "Slurm's KillWait (a limit)", more_is_better=False, goal=3.0),
        row.Row(
            "warning to all processes ended",
            ended_s,
            LIMIT_S,
            "s",
            "Slurm's KillWait (a limit)",
            more_is_better=False,
            goal=3.0,
        ),
        row.Row(
            "warning to saved",
            saved,
            submitit,
            "s",
            "submitit's handler",
            more_is_better=False,
            note="it saves amid a step, rank 0 alone; ours at a step that both ranks agree on, both with their states",
        ),
    ]


def _submitit(folder: pathlib.Path) -> float:
    """Return the seconds from the signal to saved, the handler's way; torchx documents no way to save at a warning."""
    folder.mkdir()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    meeting = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "bench.peers.submitit", str(folder)],
            env={**os.environ, **meeting, "RANK": str(rank)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    commands.wait_for(ranks[0], "ready")
    began = time.perf_counter()
    for rank in ranks:
        rank.send_signal(signal.SIGUSR2)
    commands.wait_for(ranks[0], "saved")
    seconds = time.perf_counter() - began
    for rank in ranks:
        rank.communicate(timeout=30)
    return seconds
