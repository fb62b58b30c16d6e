"""The layout of a run's folder: its files as a Run, its job.json, the runs in a folder.

With `creation` and `logs` the only code that knows it. Call it in `Workspace.do`.
"""

import collections.abc
import contextlib
import errno
import json
import math
import os
import pathlib
import time

from ddp.host.files import MAX_LISTED, replace
from ddp.node import checkpoints, mirror, rank_connections, small_files, unpacking
from ddp.node.diagnosis import attempt_files
from ddp.run import code_paths, metrics, state, untrusted
from ddp.run.model import Attempt, Checkpoint, Failure, Run
from ddp.run.untrusted import Json
from ddp.slurm import jobs

RECORD, METRICS = "job.json", "metrics.jsonl"
_BRIEF_BYTES = 1 << 16  # of a metrics.jsonl that is looked at briefly
_LOG_BYTES = 256 * 1024
_MAX_ROWS = 200  # attempts or failures
_MAX_CHECKPOINTS = 20
_MAX_RATES = 100
_LIVE_S = 60.0  # clocks of nodes differ
_SUBMISSION_S = 600.0  # an intent this old belongs to no submission that is still under way


# -- job.json --------------------------------------------------------------------------------------


def write_record(path: pathlib.Path, record: collections.abc.Mapping[str, object]) -> None:
    """Write a run's job.json."""
    replace(path / RECORD, dump(record))


def is_intent(record: Json) -> bool:
    """Return whether a job.json was written before sbatch, and lacks sbatch's answer."""
    return record.get("job_id") is None and "submission" in record


def is_under_way(record: Json, written: float) -> bool:
    """Return whether a submission of this run, whose job.json is of that time, may be under way."""
    return is_intent(record) and time.time() - written <= _SUBMISSION_S


def settle(path: pathlib.Path, job_id: int | None) -> None:
    """Complete an intent with its job. If Slurm has none for it, restore the record before.

    A young intent without a job stays: its submission may still be under way.
    """
    record = read_record(path)
    if not is_intent(record):
        return
    if job_id is not None:
        write_record(path, {**without_previous(record), "job_id": job_id})
        return
    age_s = time.time() - (path / RECORD).stat().st_mtime
    if age_s > _SUBMISSION_S:
        del record["submission"]
        write_record(path, untrusted.as_object(record.get("previous")) or record)


def without_previous(record: Json) -> Json:
    """Return a record without the one that it replaced."""
    return {name: value for name, value in record.items() if name != "previous"}


def dump(record: collections.abc.Mapping[str, object]) -> str:
    """Format a job.json."""
    return json.dumps(record, indent=1, sort_keys=True) + "\n"


# -- reading ---------------------------------------------------------------------------------------


def read_record(path: pathlib.Path) -> Json:
    """Read a run's job.json, or {}."""
    return untrusted.json_object(path / RECORD)


def read_code_paths(path: pathlib.Path) -> code_paths.CodePaths:
    """Read the folder that a run's code came from, and the copy that it ran."""
    record = read_record(path)
    code = untrusted.as_object(record.get("code"))
    owner = path.with_name(str(record.get("sweep") or path.name))  # a sweep's runs share one copy
    program = untrusted.json_object(owner / "program" / RECORD)
    own = str(program.get("origin") or code.get("origin") or "")
    copy = owner / str(code.get("folder") or "code")
    return code_paths.CodePaths(own.rstrip("/"), str(copy))


def summarised(path: pathlib.Path) -> float:
    """Return when a run's summary was written, in seconds since 1970; 0 if it has none."""
    return untrusted.written(path / "summary.json") or 0.0


def read(
    path: pathlib.Path,
    *,
    is_brief: bool = False,
    reader: metrics.Reader | None = None,
    user: str = "",
) -> Run:
    """Read a run; its notes name the files that are damaged. Raises FileNotFoundError.

    With `is_brief`, only the end of metrics.jsonl and no checkpoints; `reader` has read its
    metrics.jsonl before.
    """
    if not path.is_dir():
        raise FileNotFoundError(errno.ENOENT, "no such run", str(path))
    notes: list[str] = []
    record = untrusted.json_object(path / RECORD, notes)
    summary = _summary(path, record, notes)
    measured = _metrics(path, reader, notes, is_brief=is_brief)
    number = _job_id(path, record)
    failures = read_failures(path)
    attempts = _attempts(path, failures)
    curve = path / "loss.png"
    found = Run(
        name=path.absolute().name,
        folder=path.absolute(),
        record=record,
        config=untrusted.json_object(path / "config.json", notes),
        summary=summary,
        metrics=measured,
        job_id=number,
        attempts=tuple(attempts[-_MAX_ROWS:]),
        failures=tuple(failures[-_MAX_ROWS:]),
        checkpoints=() if is_brief else tuple(_checkpoints(path)),
        hosts=_hosts(path, number, summary),
        tracking_url=str(untrusted.json_object(path / "tracking.json").get("url") or ""),
        curve_png=str(curve) if curve.is_file() else "",
        written=_written(path, attempts),
        checkpointed=_checkpointed(path),
        notes=tuple(notes),
        unpacked_percent=tuple(_unpacked_percent(path / "control")),
        remark=_remark(path / "control", attempts),
        mirror=_mirror(path / "control"),
        user=user,
    )
    return state.with_job(found, jobs.NOT_ASKED)


def _summary(path: pathlib.Path, record: Json, notes: list[str]) -> Json:
    """Read a run's summary, unless an earlier job wrote it."""
    summary = untrusted.json_object(path / "summary.json", notes)
    earlier = record.get("summary_before")
    if earlier and untrusted.written(path / "summary.json") == earlier:
        return {}
    return summary


def _metrics(
    path: pathlib.Path, reader: metrics.Reader | None, notes: list[str], *, is_brief: bool
) -> metrics.Metrics:
    if reader is None:
        tail_bytes = _BRIEF_BYTES if is_brief else None
        reader = metrics.Reader(path / METRICS, tail_bytes=tail_bytes)
    measured = reader.read()
    if measured.bad_lines > 0:
        notes.append(f"{METRICS}: {measured.bad_lines} lines are not records and were skipped")
    return measured


def _hosts(path: pathlib.Path, job_id: int | None, summary: Json) -> tuple[str, ...]:
    """Return the hosts of a job: from its own list, or from the summary's ranks."""
    if job_id:
        lines = untrusted.tail(path / "control" / f"{job_id}.hosts", 1 << 20)
        hosts = " ".join(lines).split()
        if hosts:
            return tuple(hosts)
    ranks = map(untrusted.as_object, untrusted.as_list(summary.get("ranks")))
    return tuple(dict.fromkeys(str(rank["host"]) for rank in ranks if rank.get("host")))


def _written(path: pathlib.Path, attempts: list[Attempt]) -> float:
    """Return when a run's files changed last."""
    files = [path / name for name in (RECORD, "summary.json", METRICS)]
    times = [untrusted.written(file) or 0.0 for file in files]
    times += [attempt.ended or 0.0 for attempt in attempts]
    return max(times)


def _unpacked_percent(control: pathlib.Path) -> collections.abc.Iterator[int]:
    """Yield the percentages that nodes write every second; an older file is a failed node's."""
    for name in untrusted.names(control):
        path = control / name
        if not name.endswith(unpacking.UNPACKING):
            continue
        age_s = time.time() - (untrusted.written(path) or 0.0)
        if age_s < _LIVE_S:
            yield untrusted.number("".join(untrusted.tail(path, 16)), 0)


def _remark(control: pathlib.Path, attempts: list[Attempt]) -> str:
    """Read the remark of the last attempt's first node: that its ranks never connected."""
    own = [one.name for one in attempts if one.order[0] >= 0]  # a failure's name may be anything
    if not own:
        return ""
    lines = untrusted.tail(control / f"{own[-1]}{rank_connections.SUFFIX}", 2000)
    return " ".join(lines).strip()


def _mirror(control: pathlib.Path) -> str:
    """Describe the copies of the checkpoints in a bucket, or return ""."""
    state = untrusted.json_object(control / mirror.FILE)
    parts: list[str] = []
    if state.get("url"):
        parts.append(f"{state['url']} is verified")
    if state.get("copying"):
        parts.append(f"copying {state['copying']}")
    if state.get("error"):
        parts.append(f"it tries again: {state['error']}")
    return untrusted.printable("; ".join(parts), 400)


def read_failures(path: pathlib.Path) -> list[Failure]:
    """Read control/<job>.failures: time, attempt, fault, node and reason, tab-separated."""
    found: list[Failure] = []
    own = read_code_paths(path)
    for name in untrusted.names(path / "control"):
        if not name.endswith(".failures"):
            continue
        for line in untrusted.tail(path / "control" / name, _LOG_BYTES):
            words = own.translate(line).split("\t", 4)
            if len(words) == 5:
                found.append(Failure(*words))
    return sorted(found, key=lambda failure: failure.time)


def _job_id(path: pathlib.Path, record: Json) -> int | None:
    """Return the id of the run's last job, or of a sweep's task; None if it is unknown."""
    # An element's job, or a task's, notes its id once it starts
    started = untrusted.tail(path / "control" / "job", 100)
    if started:
        number = untrusted.number(started[-1].strip(), 0)
        if number:
            return number
    if "sweep" in record:
        return None
    if record and not is_intent(record):
        number = record.get("job_id")
        return number if type(number) is int else None
    return _job_of_newest_log(path, record)


def _job_of_newest_log(path: pathlib.Path, record: Json) -> int | None:
    """Return the job of the newest log, unless job.json is newer."""
    logs = [
        path / "logs" / name for name in untrusted.names(path / "logs") if name.endswith(".out")
    ]
    if not logs:
        return None
    log = max(logs, key=lambda one: untrusted.written(one) or 0.0)
    recorded = untrusted.written(path / RECORD) or 0.0
    if record and (untrusted.written(log) or 0.0) < recorded:
        return None
    return untrusted.number(log.stem, 0) or None


def _attempts(path: pathlib.Path, failed: list[Failure]) -> list[Attempt]:
    """Read the attempts that left an outcome, a failure or logs, in the order of their start."""
    outcomes: set[str] = set()
    for name in untrusted.names(path / "control"):
        if name.endswith(".outcome"):
            outcomes.add(name.removesuffix(".outcome"))
    logs = set(untrusted.names(path / "logs"))
    with_logs = {name for name in logs if attempt_files.attempt_order(name)[0] >= 0}
    failures = {failure.attempt: failure for failure in failed}

    found: list[Attempt] = []
    for name in outcomes | with_logs | failures.keys():
        # A failure's name may be anything: only a name that a listing gave becomes a path
        outcome = path / "control" / f"{name}.outcome" if name in outcomes else None
        folder = path / "logs" / name if name in logs else None
        found.append(_attempt(name, outcome, folder, failures.get(name)))
    return sorted(found, key=lambda one: (one.began or one.ended or math.inf, one.order))


def _attempt(
    name: str, outcome: pathlib.Path | None, logs: pathlib.Path | None, failure: Failure | None
) -> Attempt:
    """Read one attempt. The launcher makes the folder of its logs when it starts the ranks."""
    record: Json = {}
    ended: float | None = None
    if outcome is not None:
        record = untrusted.json_object(outcome)
        ended = untrusted.written(outcome)
    step = record.get("step")
    code = record.get("exit_code")
    ending = "" if failure is None else "failed"
    return Attempt(
        name=name,
        began=untrusted.written(logs) if logs is not None else None,
        ended=ended,
        outcome=str(record.get("outcome") or ending),
        step="" if step is None else str(step),
        why=_why(record, failure),
        exit_code=code if type(code) is int else None,
        loss=untrusted.real(record.get("loss")),
    )


def _why(record: Json, failure: Failure | None) -> str:
    """Return why an attempt ended: its own error, the supervisor's reason, or its exit code."""
    error = str(record.get("error") or "")
    if error:
        return error
    if failure is not None and failure.reason:
        return failure.reason
    code = record.get("exit_code")
    return "" if code is None else f"exit code {code}"


def _checkpoints(path: pathlib.Path) -> collections.abc.Iterator[Checkpoint]:
    latest = _found(checkpoints.newest, path)
    best = _found(checkpoints.best, path)
    for place in sorted(path.glob("epoch-*"))[-_MAX_CHECKPOINTS:]:
        manifest = untrusted.json_object(place / "manifest.json")
        if manifest:
            meta = untrusted.as_object(manifest.get("meta")) or manifest
            yield Checkpoint(place.name, meta.get("step"), place == latest, place == best)


def _checkpointed(path: pathlib.Path) -> float | None:
    """Return when the newest checkpoint was complete: its link, or its manifest, is made last."""
    link = path / checkpoints.LATEST
    newest = _found(checkpoints.newest, path)
    if newest is None or link.is_symlink():
        return untrusted.written(link)
    return untrusted.written(newest / checkpoints.MANIFEST)


def _found(
    find: collections.abc.Callable[[pathlib.Path], pathlib.Path | None], path: pathlib.Path
) -> pathlib.Path | None:
    with contextlib.suppress(OSError):
        return find(path)
    return None


# -- all runs --------------------------------------------------------------------------------------


def names(runs: pathlib.Path) -> list[str]:
    """List the runs, the last submitted first; a folder without any of a run's files is not one."""
    if not runs.exists():  # this user has submitted nothing yet
        return []
    found: list[tuple[float, str]] = []
    with os.scandir(runs) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                submitted = _submitted(entry)
                if submitted:
                    found.append((submitted, entry.name))
    found.sort(reverse=True)
    return [name for _, name in found[:MAX_LISTED]]


def _submitted(entry: os.DirEntry[str]) -> float:
    """Return when a run was submitted, or wrote last if job.json is lost; 0 if it is not a run."""
    if entry.name.startswith(".") or not entry.is_dir(follow_symlinks=False):
        return 0.0
    times: list[float] = []
    for name in (RECORD, METRICS, "summary.json"):
        path = pathlib.Path(entry.path, name)
        times.append(untrusted.written(path) or 0.0 if path.is_file() else 0.0)
    return times[0] or max(times)


def newest(runs: pathlib.Path, *, is_started: bool) -> str | None:
    """Return the run submitted last, without a submission's own helpers and waiting elements.

    With `is_started` a sweep does not count either: it has no job to look into.
    """
    for name in names(runs):
        record = read_record(runs / name)
        is_element = "sweep" in record
        is_waiting = is_element and not untrusted.tail(runs / name / "control" / "job", 100)
        is_sweep = record.get("kind") == "sweep"
        if record.get("automatic") or is_waiting or (is_started and is_sweep):
            continue
        return name
    return None


def find_job(runs: pathlib.Path, job_id: int, element: int | None = None) -> str | None:
    """Find the run of a job, or of an element of a sweep's array.

    Among several the last written counts, since a new controller counts job ids from 1.
    """
    if element is None:
        logs = list(runs.glob(f"*/logs/{int(job_id)}.out"))
        if logs:
            newest_log = max(logs, key=lambda path: untrusted.written(path) or 0.0)
            return newest_log.parent.parent.name
    for name in names(runs):
        record = read_record(runs / name)
        is_of_job = job_id in (record.get("job_id"), record.get("array_job_id"))
        if not is_of_job or "sweep" in record:
            continue
        if element is None:
            return name
        if record.get("kind") == "sweep" and element < untrusted.number(
            str(record.get("count")), 0
        ):
            return f"{name}-{element}"
    return None


def measured_rates(runs: pathlib.Path) -> list[Json]:
    """Read the rates of the newest finished trainings, with the settings that they depend on."""
    rates: list[Json] = []
    for name in names(runs)[:_MAX_RATES]:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, IndexError):
            rate = _measured_rate(runs / name)
            if rate["tokens_per_second"] > 0 and rate["world_size"] > 0:
                rates.append(rate)
    return rates


def _measured_rate(path: pathlib.Path) -> Json:
    config = small_files.read_object(path / "config.json")
    summary = small_files.read_object(path / "summary.json")
    if any(config.get(name) for name in ("layers", "heads", "width", "model_local_dir")):
        raise ValueError("the model is not of the size that it is named after")
    names = ("model", "seq_len", "batch", "grad_accum", "precision", "sync_every")
    rate: Json = {name: config.get(name) for name in names}
    rate["nodes"] = summary.get("nodes")
    rate["run"] = path.name
    rate["tokens_per_second"] = float(summary["tokens_per_second"])
    rate["world_size"] = int(summary["world_size"])
    rate["on_gpu"] = str(summary["ranks"][0]["device"]) != "cpu"
    return rate
