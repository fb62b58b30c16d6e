"""The facts about a run in its folder: settings, curves, attempts, failures, the cluster, the final figures."""

import collections
import collections.abc
import contextlib
import dataclasses
import datetime
import json
import math
import pathlib
import re

from ddp.report import curves, files

UTC = datetime.timezone.utc  # noqa: UP017 - datetime.UTC came with Python 3.11
COMPLETED, PREEMPTED, FAILED, CANCELLED, UNKNOWN = "COMPLETED", "PREEMPTED", "FAILED", "CANCELLED", "UNKNOWN"
STATES = {"done": COMPLETED, "preempted": PREEMPTED, "failed": FAILED, "cancelled": CANCELLED}
_NOT_SETTINGS = {
    "run_dir", "report_json", "job_id", "run", "submitted", "summary_before", "format", "choice", "started", "sweep",
    "count", "array_job_id",
}  # fmt: skip
_OF_CLUSTER = {"torch", "environment", "container", "fabric", "launcher"}  # shown with the cluster
_FIGURES = (
    "steps", "first_loss", "last_loss", "val_loss", "best_loss", "best_step", "tokens", "tokens_per_second", "samples",
    "samples_per_second", "mfu", "elapsed_s", "parameters", "precision", "world_size", "nodes", "checkpoint",
)  # fmt: skip
_NOT_FIGURES = {"workload", "state", "ranks", "error", "run_dir", "loss_png"}
_MAX_SETTINGS = 300
_MAX_ROWS = 200  # attempts or failures
_LOG_BYTES = 256 * 1024
_LOG_LINES = 40
# `report_world` of the payload; before it torchrun and srun may have put the rank.
_ENV = re.compile(r"\[ENV\] python=(\S+) torch=(\S+) cuda=(\S+) device=(\S+)")
_DDP = re.compile(r"\[DDP\] world_size=(\d+) nodes=(\d+) backend=(\S+)")


@dataclasses.dataclass(frozen=True)
class Attempt:
    """One start of the ranks."""

    name: str  # <job>.r<requeues>[t<restarts>]
    began: datetime.datetime | None
    ended: datetime.datetime | None
    outcome: str  # done, preempted, failed, cancelled; empty while it runs, or if it was killed
    step: str
    why: str  # it ended


@dataclasses.dataclass(frozen=True)
class Failure:
    """A line of control/<job>.failures."""

    time: str
    attempt: str
    fault: str  # mistake, node, program ...
    node: str
    reason: str


@dataclasses.dataclass(frozen=True)
class RunFacts:
    """The facts of a report on a run. Texts are those of the run's files, hostile ones included."""

    name: str
    folder: str
    kind: str = ""
    job_id: str = ""
    submitted: str = ""
    state: str = UNKNOWN  # in Slurm's words
    why: str = ""
    settings: collections.abc.Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])
    cluster: collections.abc.Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])
    figures: collections.abc.Mapping[str, object] = dataclasses.field(default_factory=dict[str, object])
    series: collections.abc.Mapping[str, curves.Series] = dataclasses.field(default_factory=dict[str, curves.Series])
    attempts: tuple[Attempt, ...] = ()
    failures: tuple[Failure, ...] = ()
    log: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()  # what is missing or damaged


def read_run(folder: pathlib.Path) -> RunFacts:
    """Read a run's folder. Absent and damaged files are named in `notes`; nothing is raised."""
    notes: list[str] = []
    job = _object(folder / "job.json", notes)
    config = _object(folder / "config.json", notes)
    summary = _object(folder / "summary.json", notes)
    metrics = curves.Metrics(folder / curves.NAME)
    metrics.read()
    if metrics.bad_lines:
        notes.append(f"{curves.NAME}: {metrics.bad_lines} lines are not records and were skipped")
    job_id = job_number(folder, job)
    attempts = read_attempts(folder)
    log_path = folder / "logs" / f"{job_id}.out"
    state, why = state_of(attempts, summary)
    return RunFacts(
        name=folder.absolute().name,
        folder=str(folder.absolute()),
        kind=str(job.get("kind") or summary.get("workload") or ""),
        job_id=job_id,
        submitted=str(job.get("submitted") or ""),
        state=state,
        why=why,
        settings={name: shown(value) for name, value in settings(job, config, _OF_CLUSTER).items()},
        cluster=_cluster(folder, job_id, job, summary, files.head(log_path, _LOG_BYTES) if job_id else ""),
        figures=_figures(summary),
        series=metrics.series,
        attempts=tuple(attempts[-_MAX_ROWS:]),
        failures=tuple(read_failures(folder)[-_MAX_ROWS:]),
        log=tuple(files.tail(log_path, _LOG_BYTES)[-_LOG_LINES:]) if job_id else (),
        notes=tuple(notes),
    )


def read_attempts(folder: pathlib.Path) -> list[Attempt]:
    """Read the attempts that left an outcome, a failure or logs, in the order of their start.

    The launcher makes the folder of an attempt's logs when it starts the ranks, so its time is the attempt's start.
    """
    outcomes = {name.removesuffix(".outcome") for name in files.names(folder / "control") if name.endswith(".outcome")}
    failures = {failure.attempt: failure for failure in read_failures(folder)}
    logs = {name for name in files.names(folder / "logs") if (folder / "logs" / name).is_dir()}
    found: list[Attempt] = []
    for name in outcomes | failures.keys() | {name for name in logs if files.attempt_order(name)[0] >= 0}:
        outcome: files.Json = {}
        ended: float | None = None
        if name in outcomes:  # a name from a line of failures may be anything
            path = folder / "control" / f"{name}.outcome"
            ended = files.written(path)
            with contextlib.suppress(OSError, ValueError):
                outcome = files.read_object(path)
        failure = failures.get(name)
        why = str(outcome.get("error") or (failure.reason if failure else ""))
        if not why and outcome.get("exit_code") is not None:
            why = f"exit code {outcome['exit_code']}"
        found.append(
            Attempt(
                name=name,
                began=_moment(files.written(folder / "logs" / name) if name in logs else None),
                ended=_moment(ended) or (_parse_moment(failure.time) if failure else None),
                outcome=str(outcome.get("outcome") or ("failed" if failure else "")),
                step="" if outcome.get("step") is None else str(outcome["step"]),
                why=why,
            )
        )
    return sorted(found, key=lambda attempt: (_begin_of(attempt), files.attempt_order(attempt.name)))


def read_failures(folder: pathlib.Path) -> list[Failure]:
    """Read control/<job>.failures: time, attempt, fault, node and reason, tab-separated."""
    found: list[Failure] = []
    for name in files.names(folder / "control"):
        if name.endswith(".failures"):
            for line in files.tail(folder / "control" / name, _LOG_BYTES):
                words = line.split("\t", 4)
                if len(words) == 5:
                    found.append(Failure(*words))
    return sorted(found, key=lambda failure: failure.time)


def job_number(folder: pathlib.Path, job: files.Json) -> str:
    """Return the id of the run's last job; of a sweep's run that of its task; empty if there is none.

    Without job.json, the newest log names the job.
    """
    started = files.tail(folder / "control" / "job", 100)
    for found in (started[-1] if started else "", str(job.get("job_id") or "")):
        if files.number(found.strip(), 0):
            return found.strip()
    logs = [name for name in files.names(folder / "logs") if name.endswith(".out") and name[:-4].isdecimal()]
    newest = max(logs, key=lambda name: files.written(folder / "logs" / name) or 0.0, default="")
    return newest.removesuffix(".out")


def state_of(attempts: collections.abc.Sequence[Attempt], summary: files.Json) -> tuple[str, str]:
    """Return the state by a run's own files, in Slurm's words, and why; while it runs, Slurm's record is newer."""
    if attempts:
        last = attempts[-1]
        if not last.outcome:
            return UNKNOWN, f"attempt {last.name} has left no outcome: it is running, or it was killed"
        state = STATES.get(last.outcome, UNKNOWN)
        why = {PREEMPTED: f"saved at step {last.step}", COMPLETED: ""}
        return state, why.get(state, last.why)
    state = STATES.get(str(summary.get("state")), UNKNOWN)
    return state, str(summary.get("error") or "") if summary else "it has left no outcome"


def _object(path: pathlib.Path, notes: list[str]) -> files.Json:
    try:
        return files.read_object(path)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as e:
        notes.append(f"{path.name} cannot be read: {getattr(e, 'strerror', None) or e}")
        return {}


def settings(job: files.Json, config: files.Json, omitted: collections.abc.Set[str] = frozenset()) -> files.Json:
    """Collect what was asked for (job.json, a sweep's choice) and what the payload made of it (config.json).

    Each stands under one name; nested names are joined by dots. Fields named in `omitted` are left out.
    """
    found: files.Json = {}
    for source in (job, choice(job), config):
        for name, value in _flat(source):
            is_setting = name.rsplit(".", maxsplit=1)[-1] not in _NOT_SETTINGS | omitted
            if is_setting and value not in (None, [], {}, "") and len(found) < _MAX_SETTINGS:
                found[name.removeprefix("request.")] = value
    return found


def choice(job: files.Json) -> files.Json:
    """Read the options in which a run of a sweep differs from the others; empty for other runs."""
    with contextlib.suppress(ValueError, RecursionError):
        return files.as_object(json.loads(str(job.get("choice") or "{}")))
    return {}


def _flat(record: files.Json, prefix: str = "") -> collections.abc.Iterator[tuple[str, object]]:
    for key, value in record.items():
        inner = files.as_object(value)
        if inner and prefix.count(".") < 4:
            yield from _flat(inner, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _cluster(folder: pathlib.Path, job_id: str, job: files.Json, summary: files.Json, log: str) -> dict[str, str]:
    ranks = [files.as_object(rank) for rank in files.as_list(summary.get("ranks"))]
    hosts = " ".join(files.tail(folder / "control" / f"{job_id}.hosts", 1 << 20)).split() if job_id else []
    hosts = hosts or list(dict.fromkeys(str(rank.get("host")) for rank in ranks if rank.get("host")))
    devices = collections.Counter(str(rank.get("device")) for rank in ranks if rank.get("device"))
    request = files.as_object(job.get("request"))
    env, ddp = _ENV.search(log), _DDP.search(log)
    found: dict[str, object] = {
        "nodes": f"{len(hosts)}: {', '.join(hosts)}" if hosts else request.get("num_nodes"),
        "ranks": summary.get("world_size") or (ddp[1] if ddp else None),
        "devices": ", ".join(f"{count} x {device}" for device, count in devices.items()) or (env[4] if env else None),
        "GPUs per node": request.get("gpus_per_node"),
        "CPUs per task": request.get("cpus_per_task"),
        "partition": request.get("partition"),
        "backend": ddp[3] if ddp else None,
        "torch": env[2] if env else job.get("torch"),
        "CUDA": env[3] if env else None,
        "Python": env[1] if env else None,
        **{key: job.get(key) for key in ("launcher", "fabric", "container", "environment")},
    }
    return {name: shown(value) for name, value in found.items() if value not in (None, "")}


def _figures(summary: files.Json) -> dict[str, object]:
    """Collect the numbers and texts of summary.json, the most interesting first."""
    order = [*_FIGURES, *(name for name in summary if name not in _FIGURES)]
    return {
        name: value
        for name in order[:_MAX_SETTINGS]
        if name not in _NOT_FIGURES
        and (value := summary.get(name)) is not None
        and isinstance(value, str | int | float)
    }


def shown(value: object) -> str:
    """Format a value."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    if items := files.as_list(value):
        return " ".join(shown(item) for item in items[:1000])
    return str(value)


def _begin_of(attempt: Attempt) -> float:
    known = attempt.began or attempt.ended
    return known.timestamp() if known else math.inf


def _moment(seconds: float | None) -> datetime.datetime | None:
    return None if seconds is None else datetime.datetime.fromtimestamp(seconds, UTC)


def _parse_moment(text: str) -> datetime.datetime | None:
    with contextlib.suppress(ValueError):
        return datetime.datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
    return None
