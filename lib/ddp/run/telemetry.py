"""The runs of all users for the exporter. They are read as the submit user; no file is trusted."""

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
from ddp.run import catalog, folder, state, untrusted
from ddp.run.model import Run, State
from ddp.run.untrusted import Json
from ddp.slurm import jobs
from ddp.workspace import operations
from ddp.workspace.folders import Workspace

MAX_RUNS = 200  # the newest of all users
# Of failures, as in node/diagnosis/verdicts.py
KINDS = ("program", "parameters", "node", "filesystem", "network", "unknown")
STATES = ("pending", "running", "requeued", "completed", "failed", "cancelled")
DOCTOR = ".doctor.json"  # in the folder of baselines
_SHOWN_S = 3600.0  # for how long a run that ended is shown
_WITHOUT_LOSS = ("sweep", "prepare", "collectives")
_STATES = {State.PREEMPTED: "cancelled", State.UNKNOWN: None, State.CONFIGURING: "pending"}
_GPUS = re.compile(r"(?:^|,)gres/gpu=(\d+)(?:,|$)")
_GPU_COLUMNS: tuple[str, ...] = (
    "UserName",
    "NumNodes",
    "NumTasks",
    "tres-alloc",
    "tres-per-job",
    "tres-per-node",
    "tres-per-task",
)
# Such as gres/gpu:h100:8
_REQUESTED = re.compile(r"(?:^|,)gres[/:]gpu(?:[:=][A-Za-z_][^:=,]*)?(?:[:=](\d+))?(?=,|$)")


def collect(workspace: Workspace) -> Json:
    """Read the newest runs of all users, the GPUs that jobs hold, and doctor's last findings.

    Raises SlurmError or Problem if the controller or the workspace does not respond.
    """
    known = jobs.jobs(user=None)

    def read() -> tuple[list[Json], Json]:
        runs = [_record(run, known) for run in _newest(workspace)]
        return runs, untrusted.json_object(workspace.path / "baselines" / DOCTOR)

    runs, doctor = workspace.do(read, timeout_s=15)
    return {"runs": runs, "gpus": _gpus_held(), "doctor": doctor or None}


def note_findings(folder: str, counts: dict[str, int]) -> None:
    """Store the number of doctor's findings of each level."""
    files.replace(pathlib.Path(folder, DOCTOR), json.dumps({"time": time.time(), **counts}) + "\n")


def _newest(workspace: Workspace) -> collections.abc.Iterator[Run]:
    """Read the newest trainings of all users, each with its user."""
    found: list[tuple[float, str, pathlib.Path]] = []
    for user, place in _users(workspace):
        for name in untrusted.names(place / "runs"):
            path = place / "runs" / name
            submitted = untrusted.written(path / folder.RECORD)
            if submitted:
                found.append((submitted, user, path))

    found.sort(key=lambda one: -one[0])
    for _, user, path in found[:MAX_RUNS]:
        with contextlib.suppress(OSError):
            run = folder.read(path, is_brief=True, user=user)
            if run.kind not in _WITHOUT_LOSS:
                yield run


def _users(workspace: Workspace) -> list[tuple[str, pathlib.Path]]:
    """List the accounts that have a folder in the workspace, with it."""
    places = [(workspace.user, workspace.path)]
    for path in sorted((workspace.path / operations.USERS).glob("*")):
        with contextlib.suppress(OSError, KeyError):
            owner = pwd.getpwuid(path.lstat().st_uid)
            places.append((owner.pw_name, path))
    return places


def _record(run: Run, known: collections.abc.Sequence[jobs.Job]) -> Json:
    """Return a run for the exporter."""
    job = catalog.job_among(run, [job for job in known if job.user == run.user])
    run = state.with_job(run, job)
    is_active = job is not None and job.is_active
    requeues, restarts = _starts(run, job)
    failures = collections.Counter(one.fault for one in run.failures if one.fault in KINDS)
    return {
        "run": untrusted.printable(run.name, 64),
        "user": run.user,
        "state": _state(run, is_active=is_active),
        "requeues": requeues,
        "restarts": restarts,
        "slowest": _slowest(run),
        "sites": run.metrics.site_of_hosts,
        "failures": failures,
        "is_shown": is_active or time.time() - run.written < _SHOWN_S,
        "values": _values(run),
    }


def _state(run: Run, *, is_active: bool) -> str | None:
    """Return one of STATES; None if the run's is unknown."""
    word = _STATES.get(run.state, str(run.state).lower())
    if word is None or word in STATES:
        return word
    return "running" if is_active else "failed"


def _starts(run: Run, job: jobs.Job | None) -> tuple[int, int]:
    """Count how often Slurm requeued a run, and how often its ranks were restarted within a job."""
    orders = sorted(attempt.order for attempt in run.attempts)
    requeues: dict[int, int] = {}  # the last number of each job
    restarts: dict[tuple[int, int], int] = {}  # the last number of each job and requeue
    for number, requeue, restart in orders:
        if number >= 0:  # a failure's name may be anything
            requeues[number] = requeue
            restarts[number, requeue] = restart
    if job is not None and job.is_active:
        requeues[job.job_id] = max(requeues.get(job.job_id, 0), job.restarts)
    return sum(requeues.values()), sum(restarts.values())


def _values(run: Run) -> dict[str, int | float]:
    """Return the numbers of a run that are known."""
    metrics = run.metrics
    progressed = run.written if metrics.num_records else None
    has_mfu = "mfu" in metrics.series
    values: dict[str, object] = {
        "step": run.step,
        "max_steps": run.total_steps,
        "loss": run.loss if metrics.lost_step is None else math.nan,
        "best_loss": run.best_loss,
        "steps_per_second": metrics.steps_per_second,
        "tokens_per_second": None,
        "sync_ratio": metrics.last("sync_share"),
        "sync_bytes_per_step": metrics.last("sync_bytes_per_step"),
        "mfu_ratio": metrics.last("mfu") if has_mfu else run.figure("mfu"),
        "progress_timestamp_seconds": metrics.time or progressed,
        "checkpoint_timestamp_seconds": run.checkpointed,
        "checkpoint_stall_seconds": metrics.checkpoint.get("stall_s"),
    }
    if run.rate is not None and run.rate[1] == "tokens":
        values["tokens_per_second"] = run.rate[0]
    return {name: value for name, value in values.items() if isinstance(value, int | float)}


def _slowest(run: Run) -> list[object]:
    """Return rank, host and times the median of the slowest rank; [] if that was not measured."""
    found = run.metrics.slowest
    rank = untrusted.whole(found.get("rank"))
    times = untrusted.real(found.get("times"))
    if rank is None or times is None:
        return []
    return [rank, untrusted.printable(str(found.get("host")), 64), times]


def _gpus_held() -> dict[str, int]:
    """Count the GPUs that running jobs hold, by user. Raises SlurmError."""
    columns = ",".join(f"{name}:|" for name in _GPU_COLUMNS)
    argv = ("--noheader", "--states=RUNNING", f"--Format={columns}")
    held: collections.Counter[str] = collections.Counter()
    for line in jobs.ask("squeue", *argv, timeout=10).splitlines():
        words = [word.strip() for word in line.split("|")][: len(_GPU_COLUMNS)]
        if len(words) == len(_GPU_COLUMNS):
            job = dict(zip(_GPU_COLUMNS, words, strict=True))
            held[job["UserName"]] += _gpus(job)
    return {user: count for user, count in held.items() if count}


def _gpus(job: dict[str, str]) -> int:
    """Count a job's GPUs: the ones that it holds, or asked for.

    A cluster may not track the ones that jobs hold (AccountingStorageTRES).
    """
    held = _GPUS.search(job["tres-alloc"])
    if held is not None:
        return int(held[1])
    of_job = _requested(job["tres-per-job"])
    if of_job:
        return of_job
    of_nodes = _requested(job["tres-per-node"]) * untrusted.number(job["NumNodes"], 0)
    of_tasks = _requested(job["tres-per-task"]) * untrusted.number(job["NumTasks"], 0)
    return max(of_nodes, of_tasks)


def _requested(text: str) -> int:
    return sum(int(found[1] or 1) for found in _REQUESTED.finditer(text))
