"""What a run leaves: metrics.jsonl, summary.json, loss.png, and the outcome for the batch script."""

import collections.abc
import dataclasses
import json
import os
import pathlib
import tempfile
import time
import typing

from ddptrain import files, markers

METRICS = "metrics.jsonl"
SUMMARY = "summary.json"
CURVE = "loss.png"

Record = dict[str, typing.Any]


class Sink(typing.Protocol):
    """Something that wants the metrics too: a tracking server, event files. It must never stop a training."""

    def record(self, record: Record) -> None:
        """Take one metrics record, as in metrics.jsonl."""
        ...

    def close(self, summary: Record) -> None:
        """Take the run's summary and finish."""
        ...


@dataclasses.dataclass
class Summary:
    """summary.json. Losses are in nats, times in seconds; rates are over all ranks."""

    workload: str  # gpt, finetune or smoke
    state: str  # done, preempted or failed
    nodes: int
    world_size: int
    ranks: list[dict[str, object]]  # rank, host, device
    steps: int
    first_loss: float | None = None
    last_loss: float | None = None
    best_loss: float | None = None  # the lowest validation loss; of smoke: the lowest of an epoch
    tokens: int | None = None
    tokens_per_second: float | None = (
        None  # training steps only: no evaluation, no checkpoint stall, not the first step
    )
    samples: int | None = None
    samples_per_second: float | None = None
    elapsed_s: float = 0.0  # of this attempt
    checkpoint: str | None = None
    loss_png: str | None = None
    extra: Record = dataclasses.field(default_factory=dict[str, typing.Any])  # merged in: mfu, precision, ...

    def as_record(self) -> Record:
        """Return the JSON object."""
        record = dataclasses.asdict(self)
        extra = record.pop("extra")
        return {**record, **extra}


def open_sinks(run_dir: pathlib.Path) -> list[Sink]:
    """Return the trackers that this run feeds beside its own files. None yet: this is where they come in."""
    del run_dir
    return []


class Metrics:
    """metrics.jsonl, one object per line: `kind` is step or eval. A resumed run goes on behind its checkpoint."""

    def __init__(self, run_dir: pathlib.Path, *, from_step: int, sinks: collections.abc.Sequence[Sink] = ()) -> None:
        self.path = run_dir / METRICS
        self.sinks = sinks
        self._last_flush = time.monotonic()
        kept = [r for r in read_metrics(self.path) if int(r.get("step", 0)) <= from_step] if from_step else []
        with files.replacing(self.path) as file:
            file.writelines(json.dumps(record).encode() + b"\n" for record in kept)
        self._file = self.path.open("a", encoding="utf-8")

    def add(self, record: Record) -> None:
        """Append a record. Readers elsewhere see it within some seconds."""
        self._file.write(json.dumps(record) + "\n")
        if time.monotonic() - self._last_flush > 2:
            self.flush()
        for sink in self.sinks:
            try:
                sink.record(record)
            except Exception as e:
                markers.warn("TRACK", f"{type(sink).__name__}: {e}")

    def flush(self) -> None:
        """Hand what was written to the filesystem."""
        self._file.flush()
        self._last_flush = time.monotonic()

    def close(self) -> None:
        """Make everything durable."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()


def read_metrics(path: pathlib.Path) -> list[Record]:
    """Return the records of a metrics file; a line cut short by a crash is skipped, no file is an empty list."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return []
    records: list[Record] = []
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            records.append(typing.cast(Record, record))
    return records


def draw_curve(records: collections.abc.Sequence[Record], path: pathlib.Path, title: str) -> None:
    """Write the loss curve as a PNG: training loss per step, its running mean, validation loss where there is one."""
    os.environ.setdefault("MPLCONFIGDIR", os.path.join(tempfile.gettempdir(), f"ddptrain-matplotlib-{os.getuid()}"))  # noqa: PTH118
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import figure

    steps = [
        (int(r["step"]), float(r["loss"])) for r in records if r.get("kind") == "step" and r.get("loss") is not None
    ]
    evals = [(int(r["step"]), float(r["val_loss"])) for r in records if r.get("kind") == "eval"]
    fig = figure.Figure(figsize=(8, 4.5), dpi=110, layout="constrained")
    axes: typing.Any = fig.subplots()
    if steps:
        x, y = zip(*steps, strict=True)
        axes.plot(x, y, color="#9ecae1", linewidth=0.9, label="training loss")
        axes.plot(x, _running_mean(y, max(1, len(y) // 40)), color="#08519c", linewidth=1.8, label="running mean")
    if evals:
        x, y = zip(*evals, strict=True)
        axes.plot(x, y, color="#d94801", marker="o", linewidth=1.4, label="validation loss")
    axes.set(xlabel="step", ylabel="cross-entropy (nats)", title=title)
    axes.grid(alpha=0.3)
    if steps or evals:
        axes.legend()
    with files.replacing(path) as file:
        typing.cast(typing.Any, fig).savefig(file, format="png")


def write_summary(run_dir: pathlib.Path, summary: Summary) -> None:
    """Replace summary.json."""
    files.write_json(run_dir / SUMMARY, summary.as_record())


def write_outcome(run_dir: pathlib.Path | None, outcome: str, **facts: object) -> None:
    """Tell the batch script how the attempt ended: one line of JSON in control/<attempt>.outcome. Rank 0 only.

    The exit code cannot say it: torchrun turns every worker's code into 1.
    """
    attempt = os.environ.get("RUN_ATTEMPT_ID")
    if run_dir is None or not attempt:
        return
    files.write_json(run_dir / "control" / f"{attempt}.outcome", {"outcome": outcome, **facts}, indent=None)


def _running_mean(values: collections.abc.Sequence[float], window: int) -> list[float]:
    out: list[float] = []
    total = 0.0
    for i, value in enumerate(values):
        total += value
        if i >= window:
            total -= values[i - window]
        out.append(total / min(i + 1, window))
    return out
