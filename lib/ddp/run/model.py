"""A run as its folder and Slurm know it: frozen types for every command and the exporter."""

import collections
import collections.abc
import contextlib
import dataclasses
import datetime
import enum
import json
import pathlib

from ddp.node.diagnosis import attempt_files
from ddp.run import untrusted
from ddp.run.metrics import Metrics
from ddp.run.untrusted import Json
from ddp.slurm import jobs

UTC = datetime.timezone.utc  # noqa: UP017 - datetime.UTC came with Python 3.11
PREPARATION = "prepare-"  # prefix of the runs that prepare datasets
WITHOUT_LOSS = {"collectives": "a benchmark", "prepare": "the preparation of a dataset"}
_MAX_SETTINGS = 300
_MAX_LINES = 10
_NOT_SETTINGS = frozenset(
    "run_dir report_json job_id run submitted summary_before format choice started sweep count array_job_id submission "
    "previous automatic changes".split()
)
_OF_CLUSTER = ("torch", "python", "environment", "container", "fabric")  # shown with the cluster
_NOT_FIGURES = {"workload", "state", "ranks", "error", "run_dir", "loss_png", "not_learned"}


class State(str, enum.Enum):  # noqa: UP042 - enum.StrEnum came with Python 3.11
    """The state of a run, in Slurm's words.

    PREEMPTED means that it saved and stopped; UNKNOWN that neither Slurm nor its files tell.
    """

    PENDING = "PENDING"
    REQUEUED = "REQUEUED"
    CONFIGURING = "CONFIGURING"
    RUNNING = "RUNNING"
    COMPLETING = "COMPLETING"
    SUSPENDED = "SUSPENDED"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    PREEMPTED = "PREEMPTED"
    TIMEOUT = "TIMEOUT"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    NODE_FAIL = "NODE_FAIL"
    DEADLINE = "DEADLINE"
    BOOT_FAIL = "BOOT_FAIL"
    UNKNOWN = "UNKNOWN"

    def __str__(self) -> str:
        return self.value

    @property
    def is_active(self) -> bool:
        """Whether the run may still change its state by itself."""
        return self in _ACTIVE


_ACTIVE = frozenset(list(State)[:6])


@dataclasses.dataclass(frozen=True)
class Attempt:
    """One start of the ranks."""

    name: str  # <job>.r<requeues>[t<restarts>]
    began: float | None  # in seconds since 1970
    ended: float | None
    outcome: str  # done, preempted, failed, cancelled; empty while it runs, or if it was killed
    step: str
    why: str  # it ended
    exit_code: int | None = None
    loss: float | None = None  # that the program reported with its outcome

    @property
    def order(self) -> tuple[int, int, int]:
        """The numbers of its job, its requeues and its restarts."""
        return attempt_files.attempt_order(self.name)


@dataclasses.dataclass(frozen=True)
class Failure:
    """A failed attempt, as the job's supervisor judged it."""

    time: str
    attempt: str
    fault: str  # a kind of node/diagnosis/verdicts.py
    node: str
    reason: str


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that is complete."""

    name: str
    step: object
    is_latest: bool
    is_best: bool


@dataclasses.dataclass(frozen=True)
class Run:
    """A run. Its texts come from files that may hold anything."""

    name: str
    folder: pathlib.Path
    record: Json = dataclasses.field(default_factory=Json)  # job.json
    config: Json = dataclasses.field(default_factory=Json)
    summary: Json = dataclasses.field(default_factory=Json)
    metrics: Metrics = dataclasses.field(default_factory=Metrics)
    # Of the last job; None: none, or an element of a sweep that has not started
    job_id: int | None = None
    attempts: tuple[Attempt, ...] = ()
    failures: tuple[Failure, ...] = ()
    checkpoints: tuple[Checkpoint, ...] = ()
    hosts: tuple[str, ...] = ()
    tracking_url: str = ""
    curve_png: str = ""
    written: float = 0.0  # when its files changed last, in seconds since 1970
    checkpointed: float | None = None
    notes: tuple[str, ...] = ()  # missing and damaged files
    unpacked_percent: tuple[int, ...] = ()  # on each node that is unpacking the environment
    remark: str = ""  # on the last attempt, which need not have failed
    mirror: str = ""  # how far the copies of its checkpoints are, or why they are not made
    user: str = ""
    job: jobs.Job | None = None
    state: State = State.UNKNOWN
    why: str = ""
    silence: str = ""  # why Slurm's record of its job is missing; empty: Slurm answered

    @property
    def kind(self) -> str:
        """The kind: gpt, smoke, script, collectives, prepare or sweep; "" if it is unknown."""
        return str(self.record.get("kind") or self.summary.get("workload") or "")

    @property
    def beginning(self) -> str:
        """The nodes' work before the ranks start, with the progress of the slowest node, or ""."""
        if not self.unpacked_percent:
            return ""
        count = len(self.unpacked_percent)
        nodes = f" on {count} nodes" if count > 1 else ""
        return f"unpacking the environment{nodes}: {min(self.unpacked_percent)}%"

    @property
    def log_path(self) -> pathlib.Path:
        """The log of the last job."""
        return self.folder / "logs" / f"{self.job_id}.out"

    @property
    def last_attempt(self) -> Attempt | None:
        """The last attempt of the last job."""
        for attempt in reversed(self.attempts):
            if self.job_id is None or attempt.order[0] == self.job_id:
                return attempt
        return None

    @property
    def step(self) -> int | None:
        """The last step."""
        if self.metrics.step is not None:
            return self.metrics.step
        summarised = untrusted.whole(self.summary.get("steps"))
        if summarised is not None:
            return summarised
        last = self.last_attempt
        reported = untrusted.number(last.step, -1) if last is not None else -1
        return reported if reported >= 0 else None

    @property
    def step_unit(self) -> str:
        """The unit of `step`: steps, or lines if the output has no steps."""
        return "lines" if self.metrics.is_counted else "steps"

    @property
    def total_steps(self) -> int | None:
        """The number of steps in all. Runs of earlier releases have it in their settings only."""
        found = self.metrics.total_steps or untrusted.whole(self.config.get("steps")) or 0
        return found if found > 0 else None

    @property
    def loss(self) -> float | None:
        """The last training loss; for a script the one that it ended with."""
        last = self.last_attempt
        if self.kind == "script" and last is not None and last.loss is not None:
            return last.loss
        logged = self.metrics.last("loss")
        return self.figure("last_loss") if logged is None else logged

    @property
    def validated(self) -> float | None:
        """The lowest validation loss."""
        summarised = self.figure("best_loss")
        if summarised is not None:
            return summarised
        best = self.metrics.best
        return None if best is None else best[1]

    @property
    def best_loss(self) -> float | None:
        """The lowest validation loss; for a script that measures none, the lowest loss."""
        validated = self.validated
        if validated is None and self.kind == "script":
            lowest = self.metrics.lowest("loss")
            return None if lowest is None else lowest[1]
        return validated

    @property
    def score(self) -> float | None:
        """The loss to compare runs by: the lowest of validation, or else the last of training."""
        validated = self.validated
        return self.loss if validated is None else validated

    @property
    def rate(self) -> tuple[float, str] | None:
        """Tokens, samples or steps per second, and which: the last ones while the run is active."""
        for unit in ("tokens", "samples"):
            overall = self.figure(f"{unit}_per_second")
            last = self.metrics.last(f"{unit}_per_second")
            value = (last or overall) if self.state.is_active else (overall or last)
            if value:
                return value, unit
        if self.kind == "script" and self.metrics.steps_per_second:
            return self.metrics.steps_per_second, self.step_unit
        return None

    @property
    def choice(self) -> Json:
        """The options that a sweep chose for this run."""
        with contextlib.suppress(ValueError, RecursionError):
            return untrusted.as_object(json.loads(str(self.record.get("choice") or "{}")))
        return {}

    @property
    def options(self) -> str:
        """The options of `choice` in words."""
        return " ".join(f"{name}={value}" for name, value in sorted(self.choice.items()))

    @property
    def settings(self) -> dict[str, str]:
        """The options of the job and the payload's settings; nested names are joined by dots."""
        found: dict[str, str] = {}
        for source in (self.record, self.choice, self.config):
            for name, value in _flat(source):
                last_part = name.rsplit(".", maxsplit=1)[-1]
                is_setting = last_part not in _NOT_SETTINGS and last_part not in _OF_CLUSTER
                is_given = value not in (None, [], {}, "")
                if is_setting and is_given and len(found) < _MAX_SETTINGS:
                    shown_name = untrusted.printable(name.removeprefix("request."), 80)
                    found[shown_name] = text(value)
        return found

    @property
    def changes(self) -> list[Json]:
        """The changes of its settings while it trained: setting, before, after, step."""
        listed = map(untrusted.as_object, untrusted.as_list(self.config.get("changes")))
        return [
            change
            for change in listed
            if change.get("setting") and untrusted.whole(change.get("step")) is not None
        ]

    @property
    def not_learned(self) -> list[str]:
        """A line for each kind of thing in its data that it does not learn, with the numbers."""
        lines = untrusted.as_list(self.metrics.start.get("not_learned"))
        return [untrusted.printable(line, 400) for line in lines[:_MAX_LINES]]

    @property
    def recipe(self) -> dict[str, str]:
        """The settings; a changed one has all its values, each with the step that it holds from."""
        values: dict[str, list[str]] = {}
        for change in self.changes:
            name = untrusted.printable(change["setting"], 80)
            own = values.setdefault(name, [text(change.get("before"))])
            own.append(f"{text(change.get('after'))} from step {change['step']}")

        found = self.settings
        for name, own in values.items():
            found[name] = ", ".join(own)
        return found

    @property
    def figures(self) -> dict[str, object]:
        """The numbers and texts of the summary; a script writes none, but may log some."""
        known: Json = {}
        if self.kind == "script":
            known = {"steps": self.step, "last_loss": self.loss, "best_loss": self.best_loss}
            if self.rate is not None:
                value, unit = self.rate
                known[f"{unit}_per_second"] = value
        known |= self.summary

        names = [name for name in known if name not in _NOT_FIGURES][:_MAX_SETTINGS]
        return {name: known[name] for name in names if isinstance(known[name], str | int | float)}

    def figure(self, name: str) -> float | None:
        """Return a finite number of the summary, or None."""
        number = untrusted.real(self.summary.get(name))
        if number is None or not abs(number) < 1e300:
            return None
        return number

    @property
    def devices(self) -> collections.Counter[str]:
        """The number of ranks on each kind of device."""
        ranks = map(untrusted.as_object, untrusted.as_list(self.summary.get("ranks")))
        return collections.Counter(str(rank["device"]) for rank in ranks if rank.get("device"))

    @property
    def cluster(self) -> dict[str, str]:
        """The hardware and software that the run ran on."""
        found: Json = {name: self.record.get(name) for name in _OF_CLUSTER}
        found |= self.metrics.start
        found["nodes"] = ", ".join(self.hosts)
        found["devices"] = ", ".join(f"{count} x {one}" for one, count in self.devices.items())
        found["sites"] = self.metrics.sites_text
        for name in ("kind", "step", "time", "not_learned"):  # of the record
            found.pop(name, None)
        return {name: text(value) for name, value in found.items() if value}


def change_text(change: Json) -> str:
    """Describe a change of a setting in words."""
    values = f"{text(change.get('before'))} -> {text(change.get('after'))}"
    name = str(change["setting"]).replace("_", "-")
    return untrusted.printable(f"{name} {values} from step {change['step']}", 200)


def text(value: object) -> str:
    """Format a value of a run's file."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    if items := untrusted.as_list(value):
        return " ".join(text(item) for item in items[:1000])
    return str(value)


def _flat(record: Json, prefix: str = "") -> collections.abc.Iterator[tuple[str, object]]:
    for key, value in record.items():
        inner = untrusted.as_object(value)
        if inner and prefix.count(".") < 4:
            yield from _flat(inner, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
