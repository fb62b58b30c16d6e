"""What the exporter shows of the workspace's runs, read with the submit user's rights; no file of a run is trusted."""

import collections
import contextlib
import json
import os
import pathlib
import pwd
import re
import time
import typing

from ddp.base import USERS, Settings
from ddp.report import files
from ddp.runs import run_files
from ddp.slurm import jobs
from ddp.workspace import folders
from slurm_ddp.slurm import commands

MAX_RUNS = 200  # the newest of all users
KINDS = ("mistake", "program", "node", "filesystem", "network")  # of failures, as in node/explain.py
STATES = ("pending", "running", "requeued", "completed", "failed", "cancelled")
DOCTOR = ".doctor.json"  # in the folder of baselines
_SHOWN_S = 3600.0  # so long a run that ended is shown
_LOG_BYTES = 1 << 16
_WITHOUT_LOSS = ("sweep", "prepare", "collectives")
_OUTCOMES = {"done": "completed", "failed": "failed", "cancelled": "cancelled", "preempted": "cancelled"}
_JOBS = {"COMPLETED": "completed", "CANCELLED": "cancelled"}  # of a job that wrote no outcome; all others failed
_TRAIN = re.compile(r"\[TRAIN\].*?\bstep=(\d{1,15})/(\d{1,15})")
_MFU = re.compile(r"\[TRAIN\].*?\bmfu=(\S+)")
_STALL = re.compile(r"\[CKPT\].*?\bstall_s=(\S+)")
_GPUS = re.compile(r"(?:^|,)gres/gpu=(\d+)(?:,|$)")
_REQUESTED = re.compile(r"(?:^|,)gres[/:]gpu(?:[:=][A-Za-z_][^:=,]*)?(?:[:=](\d+))?(?=,|$)")  # gres/gpu:h100:8
# An event in the log; srun's label, torchrun's prefix and that of Python's logging may stand before its marker
_EVENT = re.compile(
    r"(?:(\d+): )?(?:\[rank(\d+)\]: ?)?(?:[A-Z]+:\w+:)?"
    r"\[(CKPT|DONE|FAILED|FATAL|PREEMPT|REQUEUE|RESTART)\] ?(.*)"
)
_SECRETS = re.compile(r"(?<=://)[^/\s@]+(?=@)|\bhf_\w{8,}")  # of URLs; a token of Hugging Face
_EVENTS_BYTES = 1 << 20  # of a log, in one look; where it grew by more, what is older is skipped
_MAX_EVENTS = 50  # of a run, in one look
_MAX_WORDS = 400
_MOST = 1e300  # what is greater may be no float

Json = dict[str, typing.Any]


def collect(settings: Settings, seen: Json | None = None) -> Json:
    """Read the newest runs of all users, the GPUs that jobs hold, and doctor's last findings.

    Args:
        settings: the program's.
        seen: how far each run's log was read for events, as the last answer's runs have it: [name, bytes] by USER/RUN.

    Raises:
        SlurmError: the controller did not answer.
        TrainerError: the workspace did not.
    """
    known = jobs.jobs(user=None)
    runs = folders.call(settings, gather, timeout_s=15, workspace=str(settings.workspace), account=settings.user,
                        seen=seen or {})  # fmt: skip
    active = {(one.user, one.run_name): one for one in known if one.is_active}
    ended = {one.job_id: one for one in known if not one.is_active}
    for run in runs["runs"]:
        job = active.get((run["user"], run["run"]))
        run["state"] = _state(run, job or ended.get(run["job_id"]))
        if job is not None:
            run["requeues"][str(job.job_id)] = max(run["requeues"].get(str(job.job_id), 0), job.restarts)
        run["requeues"] = sum(run["requeues"].values())
        run["is_shown"] = job is not None or time.time() - run["written"] < _SHOWN_S
    return {"runs": runs["runs"], "gpus": _gpus_held(), "doctor": runs["doctor"]}


def gather(workspace: str, account: str, seen: Json) -> Json:
    """Read the newest runs' files, and doctor's."""
    top = pathlib.Path(workspace)
    places = [(account, top)]
    for folder in sorted((top / USERS).glob("*")):
        with contextlib.suppress(OSError, KeyError):
            places.append((pwd.getpwuid(folder.lstat().st_uid).pw_name, folder))
    found: list[tuple[float, str, pathlib.Path]] = []
    for user, place in places:
        for name in files.names(place / "runs"):
            path = place / "runs" / name
            if at := files.written(path / "job.json"):
                found.append((at, user, path))
    found.sort(key=lambda one: one[0], reverse=True)
    runs = [one for _, user, path in found[:MAX_RUNS] if (one := _read(user, path, seen)) is not None]
    return {"runs": runs, "doctor": _object(top / "baselines" / DOCTOR)}


def note_findings(folder: str, counts: dict[str, int]) -> None:
    """Keep how many findings of each level doctor had."""
    text = json.dumps({"time": time.time(), **counts}) + "\n"
    run_files.replace(pathlib.Path(folder, DOCTOR), text)


def _read(user: str, path: pathlib.Path, seen: Json) -> Json | None:
    """Read one run; None for what is no training."""
    read = run_files.read_run(str(path.parents[1]), path.name, None)
    job, summary, metric = (files.as_object(read[name]) for name in ("job", "summary", "metric"))
    if job.get("kind") in _WITHOUT_LOSS:
        return None
    control = path / "control"
    outcomes = [name for name in files.names(control) if name.endswith(".outcome")]
    failures = [line.split("\t") for name in files.names(control) if name.endswith(".failures")
                for line in files.tail(control / name, _LOG_BYTES)]  # fmt: skip
    failures = [words for words in failures if len(words) == 5]
    attempts = [*(name.removesuffix(".outcome") for name in outcomes), *(words[1] for words in failures)]
    requeues: dict[str, int] = {}
    restarts: dict[tuple[int, int], int] = {}
    for number, requeue, again in filter(lambda order: order[0] >= 0, map(files.attempt_order, attempts)):
        requeues[str(number)] = max(requeues.get(str(number), 0), requeue)
        restarts[number, requeue] = max(restarts.get((number, requeue), 0), again)
    last = max(outcomes, key=lambda name: files.written(control / name) or 0.0, default="")
    logs = [path / "logs" / name for name in files.names(path / "logs") if name.endswith(".out")]
    newest = max(logs, key=lambda one: files.written(one) or 0.0, default=path / "logs" / "none")
    log = "\n".join(files.tail(newest, _LOG_BYTES))
    name = files.printable(path.name, 64)
    events, read_until = _events(newest, seen.get(f"{user}/{name}"), is_labelled=job.get("launcher") == "srun")
    steps = _TRAIN.findall(log)
    written = [path / "job.json", path / "summary.json", path / "metrics.jsonl", *(control / n for n in outcomes)]
    values: Json = {
        "step": metric.get("step", summary.get("steps")),
        "max_steps": int(steps[-1][1]) if steps else None,
        "loss": metric.get("loss", summary.get("last_loss")),
        "tokens_per_second": metric.get("tokens_per_second", summary.get("tokens_per_second")),
        "mfu_ratio": _last(_MFU, log) if _MFU.search(log) else summary.get("mfu"),
        "progress_timestamp_seconds": metric.get("time", files.written(path / "metrics.jsonl")),
        "checkpoint_timestamp_seconds": files.written(path / "latest"),
        "checkpoint_stall_seconds": _last(_STALL, log),
    }
    return {
        "run": name,
        "user": user,
        "job_id": job.get("job_id") if type(job.get("job_id")) is int else None,
        "requeues": requeues,
        "restarts": sum(restarts.values()),
        "failures": collections.Counter(kind for _, _, kind, *_ in failures if kind in KINDS),
        "outcome": files.as_object(_object(control / last)).get("outcome") if last else None,
        "written": max(files.written(one) or 0.0 for one in written),
        "events": events,
        "log": read_until,
        "values": {key: value for key, value in values.items() if _is_figure(value)},
    }


def _is_figure(value: object) -> bool:
    return isinstance(value, (int, float)) and type(value) is not bool and not abs(value) > _MOST


def _events(log: pathlib.Path, seen: object, *, is_labelled: bool) -> tuple[list[Json], list[typing.Any]]:
    """Return the events in the whole lines that a log got since it was `seen`, and what is seen now.

    Args:
        log: of a job; appended to by its attempts.
        seen: [name, bytes] of the last look, if there was one.
        is_labelled: whether srun's label is the rank; it is the node under torchrun.
    """
    name, data = files.printable(log.name, 64), b""
    before, begin, *_ = [*files.as_list(seen), None, None]
    begin = begin if before == name and type(begin) is int else 0
    with contextlib.suppress(OSError), files.opened(log) as file:
        size = os.fstat(file.fileno()).st_size
        begin = max(begin if 0 <= begin <= size else 0, size - _EVENTS_BYTES)
        file.seek(begin)
        data = file.read(_EVENTS_BYTES)
        data = data[: data.rfind(b"\n") + 1]
    found: list[Json] = []
    for match in filter(None, map(_EVENT.match, data.decode(errors="replace").splitlines())):
        label, rank, event, words = match.groups()
        rank = rank or (label if is_labelled else None)
        found.append({"event": event, "rank": rank, "words": files.printable(_SECRETS.sub("***", words), _MAX_WORDS)})
    return found[-_MAX_EVENTS:], [name, begin + len(data)]


def _state(run: Json, job: jobs.Job | None) -> str | None:
    if job is not None and job.is_active:
        if job.state == "PENDING":
            return "requeued" if job.restarts else "pending"
        return "requeued" if job.state.startswith("REQUEUE") else "running"
    if outcome := _OUTCOMES.get(str(run["outcome"])):
        return outcome
    return _JOBS.get(job.state, "failed") if job is not None else None


def _gpus_held() -> dict[str, int]:
    """Count the GPUs that running jobs hold, by user. Raises SlurmError."""
    fields = ("UserName", "NumNodes", "NumTasks", "tres-alloc", "tres-per-job", "tres-per-node", "tres-per-task")
    argv = (commands.find("squeue"), "--noheader", "--states=RUNNING", f"--Format={','.join(f'{f}:|' for f in fields)}")
    held: collections.Counter[str] = collections.Counter()
    for line in jobs.ask(*argv, timeout=10).splitlines():
        words = [word.strip() for word in line.split("|")]
        if len(words) >= len(fields):
            held[words[0]] += _gpus(*words[1 : len(fields)])
    return {user: count for user, count in held.items() if count}


def _gpus(nodes: str, tasks: str, held: str, *asked: str) -> int:
    """Count a job's GPUs: those it holds, or where Slurm tracks none (AccountingStorageTRES), those it asked for."""
    if found := _GPUS.search(held):
        return int(found[1])
    per_job, per_node, per_task = (sum(int(one[1] or 1) for one in _REQUESTED.finditer(text)) for text in asked)
    return per_job or max(per_node * files.number(nodes, 0), per_task * files.number(tasks, 0))


def _last(pattern: re.Pattern[str], log: str) -> float | None:
    with contextlib.suppress(IndexError, ValueError):
        return float(pattern.findall(log)[-1])
    return None


def _object(path: pathlib.Path) -> Json | None:
    with contextlib.suppress(OSError, ValueError):
        return files.read_object(path)
    return None
