"""Marker lines of two tasks through srun: how many arrive whole, our way, with --unbuffered, and in submitit's logs."""

# pyright: basic, reportPrivateImportUsage=false
import collections.abc
import pathlib
import re
import subprocess
import sys
import time

from bench import row, slurm
from ddptrain import markers

LINES = 400  # of each of two tasks
LIMIT_S = 120
WHOLE = re.compile(r"^INFO:ddptrain:\[TRAIN\] step=(\d+) fill=(x+) end=yes$")


def run(scratch: pathlib.Path) -> list[row.Row]:
    """Measure on a Slurm of two nodes on this host."""
    if reason := slurm.absent():
        raise row.NotHere(reason)
    from bench.peers import submitted

    with slurm.running(scratch / "slurm") as env:
        env["PYTHONUNBUFFERED"] = "1"
        merged: list[int] = []
        for flags in ([], ["--unbuffered"]):
            log = scratch / f"merged{len(merged)}.log"
            argv = ["srun", "-N2", "-n2", "--label", *flags, "--output", str(log), sys.executable, "-m", __name__]
            subprocess.run(argv, env=env, check=True, timeout=LIMIT_S, capture_output=True)
            lines = log.read_text(errors="replace").splitlines()
            merged.append(sum(_whole(line[3:] for line in lines if line.startswith(f"{task}: ")) for task in (0, 1)))
        job = submitted.submit(env, scratch / "submitit", emit)
        logs = [scratch / "submitit" / f"{job.job_id}_{task}_log" for task in (0, 1)]
        _await(logs)
        # What it logs and what the tasks print to stderr are in files of their own
        apart = sum(
            max(_whole(log.with_suffix(kind).read_text(errors="replace").splitlines()) for kind in (".out", ".err"))
            for log in logs
        )
    note = "lines of 80 to 380 bytes, the same program on all sides"
    measure, unit = "marker lines whole in srun's log", f"of {2 * LINES}"
    return [
        row.Row(measure, merged[0], merged[1], unit, "srun --unbuffered --label", goal=1.0, note=note),
        row.Row(
            measure, merged[0], apart, unit, "submitit's job", goal=1.0,
            note="it gives each task a log of its own, where nothing can mix; ours is one log of all tasks",
        ),
    ]  # fmt: skip


def emit() -> None:
    """Print the lines, as a task."""
    markers.setup(rank=0)
    for step in range(LINES):
        markers.emit("TRAIN", step=step, fill="x" * (40 + step % 300), end=True)


def _whole(lines: collections.abc.Iterable[str]) -> int:
    """Return how many of a task's lines are there, whole."""
    found = (WHOLE.match(line) for line in lines)
    return len({m[1] for m in found if m and len(m[2]) == 40 + int(m[1]) % 300})


def _await(logs: list[pathlib.Path]) -> None:
    """Wait until submitit's tasks have left their results."""
    deadline = time.monotonic() + LIMIT_S
    while not all(log.with_name(log.name.replace("_log", "_result.pkl")).exists() for log in logs):
        if time.monotonic() > deadline:
            errors = [log.with_suffix(".err") for log in logs]
            raise RuntimeError("; ".join(path.read_text()[-500:] for path in errors if path.exists()) or "no log")
        time.sleep(0.1)


if __name__ == "__main__":
    emit()
