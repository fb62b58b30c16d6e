"""The runs of all users for the exporter, read with the submit user's rights; no file of a run is trusted."""

import collections
import collections.abc
import contextlib
import json
import math
import pathlib
import pwd
import re
import time

from ddp.host import files
from ddp.run import catalog, folder, reading, state
from ddp.run.model import Run, State
from ddp.run.reading import Json
from ddp.slurm import jobs
from ddp.workspace import operations
from ddp.workspace.folders import Workspace

MAX_RUNS = 200  # the newest of all users
KINDS = (
    "program",
    "parameters",
    "node",
    "filesystem",
    "network",
    "unknown",
)  # of failures, the kinds of node/diagnosis/verdicts.py
STATES = ("pending", "running", "requeued", "completed", "failed", "cancelled")
DOCTOR = ".doctor.json"  # in the folder of baselines
_SHOWN_S = 3600.0  # for how long a run that ended is shown
_WITHOUT_LOSS = ("sweep", "prepare", "collectives")
_STATES = {State.PREEMPTED: "cancelled", State.UNKNOWN: None, State.CONFIGURING: "pending"}
_GPUS = re.compile(r"(?:^|,)gres/gpu=(\d+)(?:,|$)")
_REQUESTED = re.compile(
    r"(?:^|,)gres[/:]gpu(?:[:=][A-Za-z_][^:=,]*)?(?:[:=](\d+))?(?=,|$)"
)  # gres/gpu:h100:8


def collect(workspace: Workspace) -> Json:
    """Read the newest runs of all users, the GPUs that jobs hold, and doctor's last findings.

    Raises SlurmError or Problem if the controller or the workspace does not respond.
    """
    known = jobs.jobs(user=None)

    def read() -> tuple[list[Json], Json]:
        runs = [_record(run, known) for run in _newest(workspace)]
        return runs, reading.json_object(workspace.path / "baselines" / DOCTOR)

    runs, doctor = workspace.do(read, timeout_s=15)
    return {"runs": runs, "gpus": _gpus_held(), "doctor": doctor or None}


def note_findings(folder: str, counts: dict[str, int]) -> None:
    """Store the number of doctor's findings of each level."""
    files.replace(pathlib.Path(folder, DOCTOR), json.dumps({"time": time.time(), **counts}) + "\n")


def _newest(workspace: Workspace) -> collections.abc.Iterator[Run]:
    """Read the newest trainings of all users, each with its user."""
    places = [(workspace.user, workspace.path)]
    for path in sorted((workspace.path / operations.USERS).glob("*")):
        with contextlib.suppress(OSError, KeyError):
            places.append((pwd.getpwuid(path.lstat().st_uid).pw_name, path))
    found: list[tuple[float, str, pathlib.Path]] = []
    for user, place in places:
        for path in (place / "runs" / name for name in reading.names(place / "runs")):
            if at := reading.written(path / folder.RECORD):
                found.append((at, user, path))
    for _, user, path in sorted(found, key=lambda one: -one[0])[:MAX_RUNS]:
        with contextlib.suppress(OSError):
            run = folder.read(path, is_brief=True, user=user)
            if run.kind not in _WITHOUT_LOSS:
                yield run


def _record(run: Run, known: collections.abc.Sequence[jobs.Job]) -> Json:
    job = catalog.job_among(run, [job for job in known if job.user == run.user])
    run = state.with_job(run, job)
    is_active = job is not None and job.is_active
    orders = sorted(attempt.order for attempt in run.attempts if attempt.order[0] >= 0)
    requeues = {
        number: requeue for number, requeue, _ in orders
    }  # the last ones, as they are sorted
    restarts = {(number, requeue): restart for number, requeue, restart in orders}
    if job is not None and is_active:
        requeues[job.job_id] = max(requeues.get(job.job_id, 0), job.restarts)
    rate = run.rate
    values = {
        "step": run.step,
        "max_steps": run.total_steps,
        "loss": run.loss if run.metrics.lost_step is None else math.nan,
        "best_loss": run.best_loss,
        "steps_per_second": run.metrics.steps_per_second,
        "tokens_per_second": rate[0] if rate and rate[1] == "tokens" else None,
        "mfu_ratio": run.metrics.last("mfu") if "mfu" in run.metrics.series else run.figure("mfu"),
        "progress_timestamp_seconds": run.metrics.time
        or (run.written if run.metrics.num_records else None),
        "checkpoint_timestamp_seconds": run.checkpointed,
        "checkpoint_stall_seconds": run.metrics.checkpoint.get("stall_s"),
    }
    word = _STATES.get(run.state, str(run.state).lower())
    return {
        "run": reading.printable(run.name, 64),
        "user": run.user,
        "state": word if word in (*STATES, None) else "running" if is_active else "failed",
        "requeues": sum(requeues.values()),
        "restarts": sum(restarts.values()),
        "slowest": _slowest(run),
        "failures": collections.Counter(one.fault for one in run.failures if one.fault in KINDS),
        "is_shown": is_active or time.time() - run.written < _SHOWN_S,
        "values": {key: value for key, value in values.items() if isinstance(value, int | float)},
    }


def _slowest(run: Run) -> list[object]:
    """Return rank, host and times the median of the slowest rank; empty if that was not measured."""
    found = run.metrics.slowest
    rank, host, times = (
        reading.whole(found.get("rank")),
        found.get("host"),
        reading.real(found.get("times")),
    )
    return [] if rank is None or times is None else [rank, reading.printable(str(host), 64), times]


def _gpus_held() -> dict[str, int]:
    """Count the GPUs that running jobs hold, by user. Raises SlurmError."""
    fields = (
        "UserName",
        "NumNodes",
        "NumTasks",
        "tres-alloc",
        "tres-per-job",
        "tres-per-node",
        "tres-per-task",
    )
    columns = ",".join(f"{name}:|" for name in fields)
    held: collections.Counter[str] = collections.Counter()
    for line in jobs.ask(
        "squeue", "--noheader", "--states=RUNNING", f"--Format={columns}", timeout=10
    ).splitlines():
        words = [word.strip() for word in line.split("|")]
        if len(words) >= len(fields):
            held[words[0]] += _gpus(*words[1 : len(fields)])
    return {user: count for user, count in held.items() if count}


def _gpus(nodes: str, tasks: str, held: str, *asked: str) -> int:
    """Count a job's GPUs: those it holds, or if Slurm tracks none (AccountingStorageTRES), those it asked for."""
    if found := _GPUS.search(held):
        return int(found[1])
    per_job, per_node, per_task = (
        sum(int(one[1] or 1) for one in _REQUESTED.finditer(text)) for text in asked
    )
    return per_job or max(per_node * reading.number(nodes, 0), per_task * reading.number(tasks, 0))
