"""The files of a run: metrics.jsonl, summary.json, loss.png, and the outcome for the batch script."""

import collections.abc
import dataclasses
import itertools
import json
import os
import pathlib
import tempfile
import threading
import time
import typing

from ddptrain import files, tracking

METRICS = "metrics.jsonl"
SUMMARY = "summary.json"
CURVE = "loss.png"

Record = dict[str, typing.Any]


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
    tokens_per_second: float | None = None  # of training alone: no evaluation, no stall, not the first step
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


class Metrics:
    """metrics.jsonl, one object per line, as docs/reference/run-directory.md describes it.

    `start` is the first record of this attempt; `step` in it is the one to continue from: the records of later steps
    are dropped, those of earlier attempts' starts stay.
    """

    def __init__(
        self, run_dir: pathlib.Path, *, start: Record, sinks: collections.abc.Sequence[tracking.Background] = ()
    ) -> None:
        self.path, self.sinks = run_dir / METRICS, sinks
        self._last_flush = time.monotonic()
        self._lock = threading.Lock()  # checkpoints are recorded from another thread
        attempt = os.environ.get("RUN_ATTEMPT_ID")
        own = {"kind": "start", "time": time.time(), **start} | ({"attempt": attempt} if attempt else {})
        before = files.read_records(self.path)
        kept = [r for r in before if r.get("kind") == "start" or int(r.get("step", 0)) <= start["step"]]
        with files.replacing(self.path) as file:
            file.writelines(json.dumps(record).encode() + b"\n" for record in [*kept, own])
        self._file = self.path.open("a", encoding="utf-8")

    def add(self, record: Record) -> None:
        """Append a record. Readers elsewhere see it within some seconds."""
        with self._lock:
            self._file.write(json.dumps(record) + "\n")
        if time.monotonic() - self._last_flush > 2:
            self.flush()
        for sink in self.sinks:
            sink.record(record)

    def flush(self) -> None:
        """Hand the records to the filesystem."""
        with self._lock, files.naming(self.path):
            self._file.flush()
        self._last_flush = time.monotonic()

    def close(self) -> None:
        """Make everything durable."""
        with files.naming(self.path):
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()


def draw_curve(records: collections.abc.Sequence[Record], path: pathlib.Path, title: str) -> None:
    """Write the loss curve as a PNG: training loss per step, its running mean, validation loss if there is one."""
    steps = [(r["step"], r["loss"]) for r in records if r.get("kind") == "step" and r.get("loss") is not None]
    evals = [(int(r["step"]), float(r["val_loss"])) for r in records if r.get("kind") == "eval"]
    # No display is needed, and the caches are in a folder that can be written
    os.environ.setdefault("MPLCONFIGDIR", os.path.join(tempfile.gettempdir(), f"ddptrain-matplotlib-{os.getuid()}"))  # noqa: PTH118
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import figure

    drawing: typing.Any = figure.Figure(figsize=(8, 4.5), dpi=110, layout="constrained")
    axes = drawing.subplots()
    if steps:
        x, y = zip(*steps, strict=True)
        axes.plot(x, y, color="#9ecae1", linewidth=0.9, label="training loss")
        axes.plot(x, _running_mean(y, max(1, len(y) // 40)), color="#08519c", linewidth=1.8, label="running mean")
    if evals:
        x, y = zip(*evals, strict=True)
        axes.plot(x, y, color="#d94801", marker="o", linewidth=1.4, label="validation loss")
    axes.set(xlabel="step", ylabel="cross-entropy (nats)", title=title)
    axes.grid(alpha=0.3)
    if axes.has_data():
        axes.legend(fontsize=8)
    with files.replacing(path) as file:
        drawing.savefig(file, format="png")


def write_report(path: pathlib.Path, summary: Summary) -> None:
    """Write the file of --report-json: the figures of the Kubernetes guide's trainer, and the summary."""
    rate = summary.tokens_per_second or summary.samples_per_second
    figures = {"world_size": summary.world_size, "tokens": summary.tokens or summary.samples, "tokens/s": rate}
    files.write_json(path, {**figures, "elapsed": summary.elapsed_s, **summary.as_record()})


def write_failure(run_dir: pathlib.Path, workload: str, error: str, *, world_size: int) -> None:
    """Record in summary.json that the run failed, why, and how far it had come. A finished run stays finished.

    Whatever rank fails may call it: the facts come from the run's files, the last attempt's summary among them.
    """
    path = run_dir / SUMMARY
    try:
        before = files.read_json(path)
    except (OSError, ValueError):
        before = {}
    records = files.read_records(run_dir / METRICS)
    steps: list[Record] = [r for r in records if r.get("kind") == "step"]
    evals = [float(r["val_loss"]) for r in records if r.get("kind") == "eval" and r.get("val_loss") is not None]
    first, last = (steps[0], steps[-1]) if steps else ({}, {})
    reached = int(last.get("step") or 0)
    if before.get("state") == "done" and reached <= int(before.get("steps") or 0):
        return  # it was done, and nothing came after: a mistake on the command line does not change that
    latest = run_dir / "latest"
    summary = Summary(
        workload=workload,
        state="failed",
        nodes=int(before.get("nodes") or 1),
        world_size=world_size,
        ranks=[],
        steps=reached,
        first_loss=first.get("loss"),
        last_loss=last.get("loss"),
        best_loss=min(evals, default=None),
        tokens=last.get("tokens"),
        tokens_per_second=last.get("tokens_per_second"),
        checkpoint=str(run_dir / latest.readlink()) if latest.is_symlink() else None,
        extra={"error": error, "run_dir": str(run_dir)},
    )
    files.write_json(path, summary.as_record())


def has_failed(run_dir: pathlib.Path, *, since: float) -> bool:
    """Return whether a rank has recorded since a time why the run failed."""
    path = run_dir / SUMMARY
    try:
        return path.stat().st_mtime >= since and files.read_json(path).get("state") == "failed"
    except (OSError, ValueError):
        return False


def write_outcome(run_dir: pathlib.Path | None, outcome: str, **facts: object) -> None:
    """Report to the batch script how the attempt ended, in control/<attempt>.outcome. Rank 0 only.

    The exit code cannot: torchrun turns every worker's code into 1.
    """
    attempt = os.environ.get("RUN_ATTEMPT_ID")
    if run_dir is None or not attempt:
        return
    files.write_json(run_dir / "control" / f"{attempt}.outcome", {"outcome": outcome, **facts}, indent=None)


def _running_mean(values: collections.abc.Sequence[float], window: int) -> list[float]:
    sums = [0.0, *itertools.accumulate(values)]
    return [(sums[i] - sums[max(0, i - window)]) / min(i, window) for i in range(1, len(sums))]
