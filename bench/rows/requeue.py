"""Seconds from Slurm's warning to saved and queued again, on a Slurm of this host, in turns with submitit's own job."""

# pyright: basic, reportPrivateImportUsage=false
import collections.abc
import dataclasses
import json
import os
import pathlib
import re
import shlex
import subprocess
import time

from bench import commands, data, row, slurm

KILL_WAIT_S = 30.0  # Slurm's default: what a job has between TERM and KILL
PATIENCE_S = 100
TURNS = 5
LIMIT = "Slurm's KillWait (a limit)"
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


@dataclasses.dataclass(frozen=True)
class Drill:
    """Seconds from the warning to saved and to queued again; ours also from there to the next attempt's first step."""

    saved_s: float
    queued_s: float
    resumed_s: float | None = None


def run(scratch: pathlib.Path) -> list[row.Row]:
    """Measure the drill of two ranks, in turns with a job of submitit's."""
    if reason := slurm.absent():
        raise row.NotHere(reason)
    dataset = data.dataset(scratch / "data", 400_000, 256)
    ours: list[Drill] = []
    theirs: list[Drill] = []
    with slurm.running(scratch / "slurm") as env:
        env["OMP_NUM_THREADS"] = "1"
        for turn in range(TURNS):
            ours.append(_ours(env, dataset.root, scratch / f"ours{turn}"))
            theirs.append(_submitit(env, scratch / f"submitit{turn}"))
    again_s = row.median([drill.resumed_s for drill in ours if drill.resumed_s is not None])
    note = f"the next attempt's first step {again_s:.1f} s after its start was asked for"
    how = "it saves amid a step, rank 0 alone; ours at a step that both ranks agree on, both with their states"
    ours_s, theirs_s = ([[d.saved_s for d in side], [d.queued_s for d in side]] for side in (ours, theirs))
    return [
        _row("warning to queued again", ours_s[1], [KILL_WAIT_S], LIMIT, note),
        _row("warning to saved, by Slurm", ours_s[0], theirs_s[0], "submitit", how),
        _row("warning to queued again", ours_s[1], theirs_s[1], "submitit", how),
    ]


def _row(measure: str, ours: list[float], theirs: list[float], peer: str, note: str) -> row.Row:
    is_limit = peer == LIMIT
    spread = row.spread(ours, "s") + ("" if is_limit else f", peer {row.spread(theirs, 's')}")
    return row.Row(
        measure, row.median(ours), row.median(theirs), "s", peer, more_is_better=False, goal=3.0 if is_limit else None,
        note=f"{spread}; {note}",
    )  # fmt: skip


def _ours(env: dict[str, str], data_root: pathlib.Path, folder: pathlib.Path) -> Drill:
    folder.mkdir()
    endless = ("--steps", 100_000, "--epoch-steps", 100_000)
    command = commands.argv(2, *commands.tiny(data_root, folder / "run"), *endless)
    script = folder / "job.sbatch"
    script.write_text(SCRIPT.format(folder=folder, command=shlex.join(command)))
    log = folder / "job.out"
    flags = ("--requeue", "--open-mode=append", f"--output={log}", "--ntasks=1", "--cpus-per-task=2")
    job = _call(env, "sbatch", "--parsable", *flags, str(script)).strip()
    outcome = folder / "run" / "control" / f"{job}.r0.outcome"
    try:
        _await(lambda: "step=30/" in _text(log), log)
        drill = _warned(env, job, outcome, log, "scancel", "--signal=USR1", "--batch", job)
        assert json.loads(outcome.read_text())["outcome"] == "preempted"
        time.sleep(2)  # as resume-run does: slurmd refuses an attempt within the second in which the last one ended
        began = time.perf_counter()
        _call(env, "scontrol", "update", f"jobid={job}", "StartTime=now")  # or Slurm waits two minutes
        _await(lambda: re.search(r"\[CKPT\] resumed=.*\n(?:.*\n)*?.*\[TRAIN\] step=", _text(log)) is not None, log)
        return dataclasses.replace(drill, resumed_s=time.perf_counter() - began)
    finally:
        _end(env, job)


def _submitit(env: dict[str, str], folder: pathlib.Path) -> Drill:
    from bench.peers import submitted

    folder.mkdir()
    job = submitted.submit(env, folder, submitted.Training(folder))
    log = folder / f"{job.job_id}_0_log.err"
    try:
        _await((folder / "ready").exists, log)
        return _warned(env, job.job_id, folder / "saved", log, "scancel", "--signal=USR2", job.job_id)
    finally:
        _end(env, job.job_id)


def _warned(env: dict[str, str], job: str, saved: pathlib.Path, log: pathlib.Path, *warning: str) -> Drill:
    """Send the warning and return what followed; a file appears once the training is saved."""
    began = time.perf_counter()
    _call(env, *warning)
    _await(saved.exists, log)
    saved_s = time.perf_counter() - began
    _await(lambda: {"JobState=PENDING", "Restarts=1"} <= set(_call(env, "scontrol", "show", "job", job).split()), log)
    return Drill(saved_s, time.perf_counter() - began)


def _end(env: dict[str, str], job: str) -> None:
    """Cancel a job, and wait until it has left the nodes to the next one."""
    _call(env, "scancel", job)
    _await(lambda: not _call(env, "squeue", "-h", "-o", "%i").strip(), pathlib.Path(os.devnull))


def _call(env: dict[str, str], *argv: str) -> str:
    return subprocess.run(argv, env=env, check=True, capture_output=True, text=True, timeout=60).stdout


def _text(path: pathlib.Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _await(happened: collections.abc.Callable[[], bool], log: pathlib.Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not happened():
        if time.monotonic() > deadline:
            raise RuntimeError(f"not within {PATIENCE_S} s; the log's end: {_text(log)[-1000:]}")
        time.sleep(0.02)
