"""A run at one moment, as `ddp watch` shows it: gathered from its files and from Slurm's record of its job."""

import collections.abc
import contextlib
import dataclasses
import datetime
import pathlib
import re

from ddp.report import curves, facts, files
from ddp.slurm import jobs

_LOG_LINES = 12
_LOG_BYTES = 64 * 1024
_CURVE_POINTS = 600
_TOTAL = re.compile(r"\[TRAIN\] (?:step=\d+/(\d+)|steps=(\d+))\b")
_SMOKE_TOTAL = re.compile(r"\[TRAIN\] epochs=(\d+) steps_per_epoch=(\d+)\b")
_NOISE = re.compile(r"^(?:\d+: )?(?:\[(?:default|rank)\d+\]: ?)?(?:INFO:ddptrain:)?")


@dataclasses.dataclass(frozen=True)
class JobView:
    """Slurm's record of a run's job."""

    state: str  # as in squeue: PENDING, RUNNING ...
    reason: str = ""  # why it is pending
    start: datetime.datetime | None = None  # with a time zone; of a pending job the expected one
    time_limit_s: float | None = None  # None: no limit
    nodes: str = ""  # a hostlist


@dataclasses.dataclass(frozen=True)
class Frame:
    """A run at one moment. Unknown numbers are None."""

    run: str
    now: datetime.datetime
    state: str
    why: str
    has_ended: bool
    job_id: str
    nodes: str
    step: int
    steps: int | None  # in all
    loss: float | None
    val_loss: float | None
    losses: tuple[curves.Point, ...]
    lost_step: float | None  # from which on the loss is not finite
    tokens_per_second: float | None
    memory_mib: float | None
    gpu_percent: float | None
    lr: float | None
    elapsed_s: float | None
    left_s: float | None  # to the last step, at the rate of the last steps
    limit_left_s: float | None  # to Slurm's time limit
    attempts: int
    failures: tuple[facts.Failure, ...]
    log: tuple[str, ...]


class Memory:
    """The state between two gatherings, so that each reads only what is new."""

    def __init__(self) -> None:
        self.metrics: curves.Metrics | None = None
        self.steps: int | None = None
        self.log_path: pathlib.Path | None = None
        self.seen: list[
            tuple[float, int]
        ] = []  # time and step of the gatherings, for the rate of a script without times


def gather(
    run_folder: pathlib.Path, job: JobView | None, now: datetime.datetime, memory: Memory | None = None
) -> Frame:
    """Gather a frame. If Slurm does not know the run's job, `job` is None, and the run's files decide.

    With the same `memory` each time, metrics.jsonl is read once, and afterwards only what was appended.
    """
    memory = memory or Memory()
    if memory.metrics is None or memory.metrics.path.parent != run_folder:
        memory.metrics, memory.steps, memory.seen = curves.Metrics(run_folder / curves.NAME), None, []
    metrics = memory.metrics
    metrics.read()
    about = _read(run_folder / "job.json")
    number = facts.job_number(run_folder, about)
    log_path = run_folder / "logs" / f"{number}.out"
    log = files.tail(log_path, _LOG_BYTES) if number else []
    if memory.log_path != log_path:  # a job that resumed the run may have other steps
        memory.log_path, memory.steps = log_path, None
    memory.steps = _total(log, files.head(log_path, _LOG_BYTES) if number and not memory.steps else "") or memory.steps
    steps = memory.steps or _configured(run_folder)
    attempts = facts.read_attempts(run_folder)
    state, why = facts.state_of(attempts, _read(run_folder / "summary.json"))
    has_ended = state != facts.UNKNOWN
    if job is not None:
        has_ended = job.state not in jobs.ACTIVE
        if not has_ended or state == facts.UNKNOWN:
            state, why = job.state, job.reason if job.reason != "None" else ""
    step = _whole(metrics.last.get("step"))
    loss = metrics.series.get("loss")
    elapsed_s = limit_s = None
    if job is not None and job.start is not None and job.state != "PENDING" and not has_ended:
        elapsed_s, limit_s = (now - job.start).total_seconds(), job.time_limit_s
    return Frame(
        run=files.printable(run_folder.absolute().name, 120),
        now=now,
        state=files.printable(state, 40),
        why=files.printable(why),
        has_ended=has_ended,
        job_id=files.printable(number, 20),
        nodes=files.printable(job.nodes if job else "", 200),
        step=step,
        steps=steps,
        loss=_last(metrics, "loss"),
        val_loss=_last(metrics, "val_loss"),
        losses=tuple(loss.points(_CURVE_POINTS)) if loss else (),
        lost_step=loss.lost if loss is not None else None,
        tokens_per_second=_last(metrics, "tokens_per_second"),
        memory_mib=_last(metrics, "memory_mib"),
        gpu_percent=_last(metrics, "gpu_percent"),
        lr=_last(metrics, "lr"),
        elapsed_s=None if elapsed_s is None else max(0.0, elapsed_s),
        left_s=None if has_ended else _left(metrics, memory, now, step, steps),
        limit_left_s=None if limit_s is None or elapsed_s is None else max(0.0, limit_s - elapsed_s),
        attempts=len(attempts),
        failures=tuple(facts.read_failures(run_folder)),
        log=tuple(_clean(log)),
    )


def _read(path: pathlib.Path) -> files.Json:
    with contextlib.suppress(OSError, ValueError):
        return files.read_object(path)
    return {}


def _total(tail: collections.abc.Sequence[str], head: str) -> int | None:
    """Find the number of steps that the payload announced last."""
    for line in (*reversed(tail), *reversed(head.split("\n"))):
        if found := _TOTAL.search(line):
            return files.number(found[1] or found[2], 0) or None
        if found := _SMOKE_TOTAL.search(line):
            return files.number(found[1], 0) * files.number(found[2], 0) or None
    return None


def _configured(folder: pathlib.Path) -> int | None:
    steps = _read(folder / "config.json").get("steps")
    return steps if isinstance(steps, int) and 0 < steps < 1 << 53 else None


def _whole(value: object) -> int:
    return int(value) if isinstance(value, int | float) and abs(value) < 1 << 53 else 0


def _last(metrics: curves.Metrics, name: str) -> float | None:
    return metrics.series[name].last if name in metrics.series else None


def _left(
    metrics: curves.Metrics, memory: Memory, now: datetime.datetime, step: int, steps: int | None
) -> float | None:
    seen = memory.seen
    if seen and seen[-1][1] > step:
        seen.clear()
    if not seen or seen[-1][1] != step:
        seen.append((now.timestamp(), step))
        del seen[:-32]
    rate = metrics.steps_per_second
    if rate is None and len(seen) > 1 and seen[-1][0] > seen[0][0]:
        rate = (seen[-1][1] - seen[0][1]) / (seen[-1][0] - seen[0][0])
    return max(0, steps - step) / rate if steps and rate else None


def _clean(log: collections.abc.Sequence[str]) -> collections.abc.Iterator[str]:
    lines = [_NOISE.sub("", line.rsplit("\r", 1)[-1] if not line.endswith("\r") else line) for line in log]
    lines = [files.printable(line, 500).rstrip() for line in lines]
    yield from [line for line in lines if line][-_LOG_LINES:]
