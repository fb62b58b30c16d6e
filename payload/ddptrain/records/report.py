"""The files of a run: metrics.jsonl, summary.json, loss.png, and the outcome for the batch script."""

import collections.abc
import itertools
import json
import os
import pathlib
import tempfile
import threading
import time
import typing

from ddptrain.ground import files
from ddptrain.records import trackers

if typing.TYPE_CHECKING:
    from ddptrain.world import distributed

METRICS = "metrics.jsonl"
SUMMARY = "summary.json"
CURVE = "loss.png"

Record = dict[str, typing.Any]


class Metrics:
    """metrics.jsonl, one object per line, as docs/reference/run-directory.md describes it.

    `start` is the first record of this attempt; `step` in it is the one to continue from: the records of later steps
    are dropped, those of earlier attempts' starts stay.
    """

    def __init__(
        self,
        run_dir: pathlib.Path,
        *,
        start: Record,
        sinks: collections.abc.Sequence[trackers.Background] = (),
    ) -> None:
        self.path, self.sinks = run_dir / METRICS, sinks
        self._last_flush = time.monotonic()
        self._lock = threading.Lock()  # checkpoints are recorded from another thread
        attempt = os.environ.get("RUN_ATTEMPT_ID")
        own = {"kind": "start", "time": time.time(), **start} | (
            {"attempt": attempt} if attempt else {}
        )
        before = files.read_records(self.path)
        kept = [
            r for r in before if r.get("kind") == "start" or int(r.get("step", 0)) <= start["step"]
        ]
        with files.replacing(self.path) as file:
            file.writelines(json.dumps(record).encode() + b"\n" for record in [*kept, own])
        self._file = self.path.open("a", encoding="utf-8")

    def add(self, record: Record) -> None:
        """Append a record. Readers elsewhere see it within some seconds."""
        with self._lock, files.naming(self.path):
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
    steps = [
        (r["step"], r["loss"])
        for r in records
        if r.get("kind") == "step" and r.get("loss") is not None
    ]
    evals = [(int(r["step"]), float(r["val_loss"])) for r in records if r.get("kind") == "eval"]
    # No display is needed, and the caches are in a folder that can be written
    cache = pathlib.Path(tempfile.gettempdir(), f"ddptrain-matplotlib-{os.getuid()}")
    os.environ.setdefault("MPLCONFIGDIR", str(cache))
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import figure

    drawing: typing.Any = figure.Figure(figsize=(8, 4.5), dpi=110, layout="constrained")
    axes = drawing.subplots()
    if steps:
        x, y = zip(*steps, strict=True)
        axes.plot(x, y, color="#9ecae1", linewidth=0.9, label="training loss")
        axes.plot(
            x,
            _running_mean(y, max(1, len(y) // 40)),
            color="#08519c",
            linewidth=1.8,
            label="running mean",
        )
    if evals:
        x, y = zip(*evals, strict=True)
        axes.plot(x, y, color="#d94801", marker="o", linewidth=1.4, label="validation loss")
    axes.set(xlabel="step", ylabel="cross-entropy (nats)", title=title)
    axes.grid(alpha=0.3)
    if axes.has_data():
        axes.legend(fontsize=8)
    with files.replacing(path) as file:
        drawing.savefig(file, format="png")


def write_summary(
    world: "distributed.World",
    run_dir: pathlib.Path | None,
    report_json: pathlib.Path | None,
    **figures: typing.Any,
) -> Record:
    """Write the summary of a run that has ended well, on rank 0, and return it.

    It is summary.json, as docs/reference/run-directory.md describes it, and behind the figures of the Kubernetes
    guide's trainer the file of --report-json. Losses are in nats, times in seconds; rates are over all ranks.
    """
    summary = {
        "nodes": world.num_nodes,
        "world_size": world.size,
        "ranks": world.members,
        **figures,
    }
    if run_dir is not None:
        files.write_json(run_dir / SUMMARY, summary)
    if report_json is not None:
        tokens, rate = (
            summary.get(f"tokens{per}") or summary.get(f"samples{per}")
            for per in ("", "_per_second")
        )
        guide = {
            "world_size": world.size,
            "tokens": tokens,
            "tokens/s": rate,
            "elapsed": summary["elapsed_s"],
        }
        files.write_json(report_json, {**guide, **summary})
    return summary


def has_outcome(run_dir: pathlib.Path | None) -> bool:
    """Return whether a rank of this attempt has reported how it ended."""
    path = _outcome(run_dir)
    return path is not None and path.exists()


def write_outcome(run_dir: pathlib.Path | None, outcome: str, **facts: object) -> None:
    """Report to the batch script how the attempt ended, in control/<attempt>.outcome. Rank 0 only.

    The exit code cannot: torchrun turns every worker's code into 1.
    """
    if path := _outcome(run_dir):
        files.write_json(path, {"outcome": outcome, **facts}, indent=None)


def _outcome(run_dir: pathlib.Path | None) -> pathlib.Path | None:
    attempt = os.environ.get("RUN_ATTEMPT_ID")
    return run_dir / "control" / f"{attempt}.outcome" if run_dir and attempt else None


def _running_mean(values: collections.abc.Sequence[float], window: int) -> list[float]:
    sums = [0.0, *itertools.accumulate(values)]
    return [(sums[i] - sums[max(0, i - window)]) / min(i, window) for i in range(1, len(sums))]
