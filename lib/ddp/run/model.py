"""A run as its folder and Slurm know it: the frozen types that every command and the exporter share."""

import collections
import collections.abc
import contextlib
import dataclasses
import datetime
import enum
import json
import pathlib

from ddp.node.diagnosis import attempt_files
from ddp.run import reading
from ddp.run.metrics import Metrics
from ddp.run.reading import Json
from ddp.slurm import jobs

UTC = datetime.timezone.utc  # noqa: UP017 - datetime.UTC came with Python 3.11
PREPARATION = "prepare-"  # prefix of the runs that prepare datasets
WITHOUT_LOSS = {"collectives": "a benchmark", "prepare": "the preparation of a dataset"}
_MAX_SETTINGS = 300
_NOT_SETTINGS = frozenset(
    "run_dir report_json job_id run submitted summary_before format choice started sweep count array_job_id submission "
    "previous automatic changes".split()
)
_OF_CLUSTER = ("torch", "python", "environment", "container", "fabric")  # shown with the cluster
_NOT_FIGURES = {"workload", "state", "ranks", "error", "run_dir", "loss_png"}


class State(str, enum.Enum):  # noqa: UP042 - enum.StrEnum came with Python 3.11
    """The state of a run, in Slurm's words; PREEMPTED has saved and stopped, UNKNOWN is known to nobody."""

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
    """A run. Texts are those of its files, hostile ones included."""

    name: str
    folder: pathlib.Path
    record: Json = dataclasses.field(default_factory=Json)  # job.json
    config: Json = dataclasses.field(default_factory=Json)
    summary: Json = dataclasses.field(default_factory=Json)
    metrics: Metrics = dataclasses.field(default_factory=Metrics)
    job_id: int | None = (
        None  # of the last job; None: none, or an element of a sweep that has not started
    )
    attempts: tuple[Attempt, ...] = ()
    failures: tuple[Failure, ...] = ()
    checkpoints: tuple[Checkpoint, ...] = ()
    hosts: tuple[str, ...] = ()
    tracking_url: str = ""
    curve_png: str = ""
    written: float = 0.0  # when its files changed last, in seconds since 1970
    checkpointed: float | None = None
    notes: tuple[str, ...] = ()  # what is missing or damaged
    unpacked_percent: tuple[int, ...] = ()  # on each node that is unpacking the environment
    remark: str = ""  # on the last attempt, which need not have failed
    user: str = ""
    job: jobs.Job | None = None
    state: State = State.UNKNOWN
    why: str = ""
    silence: str = ""  # why Slurm's word on its job is missing; empty: Slurm was asked and answered

    @property
    def kind(self) -> str:
        """The kind: gpt, smoke, script, collectives, prepare, sweep; empty if it is unknown."""
        return str(self.record.get("kind") or self.summary.get("workload") or "")

    @property
    def beginning(self) -> str:
        """What the nodes do before the ranks start, and how far the last one is; empty if nothing is known of it."""
        nodes = f" on {len(self.unpacked_percent)} nodes" if len(self.unpacked_percent) > 1 else ""
        return (
            f"unpacking the environment{nodes}: {min(self.unpacked_percent)}%"
            if self.unpacked_percent
            else ""
        )

    @property
    def log_path(self) -> pathlib.Path:
        """The log of the last job."""
        return self.folder / "logs" / f"{self.job_id}.out"

    @property
    def last_attempt(self) -> Attempt | None:
        """The last attempt of the last job."""
        own = [one for one in self.attempts if self.job_id is None or one.order[0] == self.job_id]
        return own[-1] if own else None

    @property
    def step(self) -> int | None:
        """The last step."""
        last = self.last_attempt
        reported = reading.number(last.step, -1) if last is not None else -1
        known = (
            self.metrics.step,
            reading.whole(self.summary.get("steps")),
            reported if reported >= 0 else None,
        )
        return next((step for step in known if step is not None), None)

    @property
    def total_steps(self) -> int | None:
        """The number of steps in all. Runs of earlier releases have it in their settings only."""
        found = self.metrics.total_steps or reading.whole(self.config.get("steps"))
        return found if found and found > 0 else None

    @property
    def loss(self) -> float | None:
        """The last training loss; of a script the one that it ended with."""
        last = self.last_attempt if self.kind == "script" else None
        known = (last.loss if last else None, self.metrics.last("loss"), self.figure("last_loss"))
        return next((loss for loss in known if loss is not None), None)

    @property
    def validated(self) -> float | None:
        """The lowest validation loss."""
        known = self.figure("best_loss")
        return known if known is not None or self.metrics.best is None else self.metrics.best[1]

    @property
    def best_loss(self) -> float | None:
        """The lowest validation loss; of a script that measures none, the lowest loss."""
        lowest = (
            self.metrics.lowest("loss")
            if self.kind == "script" and self.validated is None
            else None
        )
        return lowest[1] if lowest else self.validated

    @property
    def score(self) -> float | None:
        """The loss that runs are compared by: the lowest of validation, or without one the last of training."""
        return self.validated if self.validated is not None else self.loss

    @property
    def rate(self) -> tuple[float, str] | None:
        """Tokens, samples or steps per second, and which: of the summary, of an active run the last ones."""
        for unit in ("tokens", "samples"):
            whole, last = self.figure(f"{unit}_per_second"), self.metrics.last(f"{unit}_per_second")
            if value := (last or whole if self.state.is_active else whole or last):
                return value, unit
        steps = self.metrics.steps_per_second if self.kind == "script" else None
        return (steps, "steps") if steps else None

    @property
    def choice(self) -> Json:
        """The options in which an element of a sweep differs from the others."""
        with contextlib.suppress(ValueError, RecursionError):
            return reading.as_object(json.loads(str(self.record.get("choice") or "{}")))
        return {}

    @property
    def options(self) -> str:
        """The options of `choice` in words."""
        return " ".join(f"{name}={value}" for name, value in sorted(self.choice.items()))

    @property
    def settings(self) -> dict[str, str]:
        """The options of the job, and what the payload made of them; nested names are joined by dots."""
        found: dict[str, str] = {}
        for source in (self.record, self.choice, self.config):
            for name, value in _flat(source):
                is_setting = name.rsplit(".", maxsplit=1)[-1] not in {*_NOT_SETTINGS, *_OF_CLUSTER}
                if is_setting and value not in (None, [], {}, "") and len(found) < _MAX_SETTINGS:
                    found[reading.printable(name.removeprefix("request."), 80)] = text(value)
        return found

    @property
    def changes(self) -> list[Json]:
        """What changed in its settings while it was trained: setting, before, after, step."""
        listed = [reading.as_object(line) for line in reading.as_list(self.config.get("changes"))]
        return [
            line
            for line in listed
            if line.get("setting") and reading.whole(line.get("step")) is not None
        ]

    @property
    def recipe(self) -> dict[str, str]:
        """The settings; of one that changed each value, and from which step it holds."""
        found = self.settings
        for name in dict.fromkeys(
            reading.printable(change["setting"], 80) for change in self.changes
        ):
            own = [change for change in self.changes if change["setting"] == name]
            values = [text(own[0].get("before"))]
            values += [f"{text(change.get('after'))} from step {change['step']}" for change in own]
            found[name] = ", ".join(values)
        return found

    @property
    def figures(self) -> dict[str, object]:
        """The numbers and texts of the summary; of a script, which writes none, what it logged."""
        logged: Json = {}
        if self.kind == "script":
            logged = {"steps": self.step, "last_loss": self.loss, "best_loss": self.best_loss}
            logged |= {f"{unit}_per_second": value for value, unit in filter(None, [self.rate])}
        known = [one for one in (logged | self.summary).items() if one[0] not in _NOT_FIGURES][
            :_MAX_SETTINGS
        ]
        return {name: value for name, value in known if isinstance(value, str | int | float)}

    def figure(self, name: str) -> float | None:
        """Return a finite number of the summary."""
        number = reading.real(self.summary.get(name))
        return number if number is not None and abs(number) < 1e300 else None

    @property
    def devices(self) -> collections.Counter[str]:
        """How many ranks ran on which device."""
        ranks = [reading.as_object(rank) for rank in reading.as_list(self.summary.get("ranks"))]
        return collections.Counter(str(rank["device"]) for rank in ranks if rank.get("device"))

    @property
    def cluster(self) -> dict[str, str]:
        """The hardware and software that the run ran on."""
        found = {name: self.record.get(name) for name in _OF_CLUSTER} | self.metrics.start
        devices = ", ".join(f"{count} x {device}" for device, count in self.devices.items())
        found |= {
            "nodes": ", ".join(self.hosts),
            "devices": devices,
            **dict.fromkeys(("kind", "step", "time")),
        }
        return {name: text(value) for name, value in found.items() if value}


def change_text(change: Json) -> str:
    """Describe a change of a setting in words."""
    values = f"{text(change.get('before'))} -> {text(change.get('after'))}"
    name = str(change["setting"]).replace("_", "-")
    return reading.printable(f"{name} {values} from step {change['step']}", 200)


def text(value: object) -> str:
    """Format a value of a run's file."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    if items := reading.as_list(value):
        return " ".join(text(item) for item in items[:1000])
    return str(value)


def _flat(record: Json, prefix: str = "") -> collections.abc.Iterator[tuple[str, object]]:
    for key, value in record.items():
        inner = reading.as_object(value)
        if inner and prefix.count(".") < 4:
            yield from _flat(inner, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
