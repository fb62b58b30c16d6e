"""Seconds from Slurm's warning to saved and queued again, and from there to the next step, on a Slurm of this host."""

# pyright: basic, reportPrivateImportUsage=false
import collections.abc
import json
import pathlib
import re
import shlex
import subprocess
import time

from bench import commands, data, row, slurm

KILL_WAIT_S = 30.0  # Slurm's default: what a job has between TERM and KILL
PATIENCE_S = 100
# As the trainer's own job script does it: the warning becomes a file, and only a saved training is queued again.
SCRIPT = """\
#!/bin/bash
export RUN_ATTEMPT_ID=$SLURM_JOB_ID.r${{SLURM_RESTART_COUNT:-0}} STOP_FILE={folder}/stop OMP_NUM_THREADS=1
rm -f "$STOP_FILE"
trap ': > "$STOP_FILE"' USR1
{command} &
pid=$!
while :; do wait $pid; kill -0 $pid 2>/dev/null || break; done
grep -q preempted {folder}/run/control/$RUN_ATTEMPT_ID.outcome || exit 1
scontrol requeue "$SLURM_JOB_ID"
sleep 60
"""


def run(scratch: pathlib.Path) -> list[row.Row]:
    """Measure the drill of two ranks, once: the warning, the save, the queue, the next attempt."""
    if reason := slurm.absent():
        raise row.NotHere(reason)
    dataset = data.dataset(scratch / "data", 400_000, 256)
    endless = ("--steps", 100_000, "--epoch-steps", 100_000)
    command = commands.argv(2, *commands.tiny(dataset.root, scratch / "run"), *endless)
    script = scratch / "job.sbatch"
    script.write_text(SCRIPT.format(folder=scratch, command=shlex.join(command)))
    log = scratch / "job.out"
    with slurm.running(scratch / "slurm") as env:

        def call(*argv: str) -> str:
            return subprocess.run(argv, env=env, check=True, capture_output=True, text=True, timeout=60).stdout

        flags = ("--requeue", "--open-mode=append", f"--output={log}", "--ntasks=1", "--cpus-per-task=2")
        job = call("sbatch", "--parsable", *flags, str(script)).strip()
        try:
            _await(lambda: "step=30/" in _text(log), log)
            began = time.perf_counter()
            call("scancel", "--signal=USR1", "--batch", job)
            outcome = scratch / "run" / "control" / f"{job}.r0.outcome"
            _await(outcome.exists, log)
            saved = time.perf_counter() - began
            assert json.loads(outcome.read_text())["outcome"] == "preempted"
            _await(lambda: {"JobState=PENDING", "Restarts=1"} <= set(call("scontrol", "show", "job", job).split()), log)
            queued = time.perf_counter() - began
            time.sleep(2)  # as resume-now does: slurmd refuses an attempt within the second in which the last one ended
            began = time.perf_counter()
            call("scontrol", "update", f"jobid={job}", "StartTime=now")  # or Slurm waits two minutes
            _await(lambda: re.search(r"\[CKPT\] resumed=.*\n(?:.*\n)*?.*\[TRAIN\] step=", _text(log)) is not None, log)
            resumed = time.perf_counter() - began
        finally:
            call("scancel", job)
    note = f"saved after {saved:.2f} s; the next attempt's first step {resumed:.1f} s after its start was asked for"
    return [
        row.Row(
            "warning to queued again", queued, KILL_WAIT_S, "s", "Slurm's KillWait (a limit)", more_is_better=False,
            goal=3.0, note=note,
        )
    ]  # fmt: skip


def _text(path: pathlib.Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _await(happened: collections.abc.Callable[[], bool], log: pathlib.Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not happened():
        if time.monotonic() > deadline:
            raise RuntimeError(f"not within {PATIENCE_S} s; the log's end: {_text(log)[-1000:]}")
        time.sleep(0.02)
