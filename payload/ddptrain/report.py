"""What a run leaves: metrics.jsonl, summary.json, loss.png, and the outcome for the batch script."""

import collections.abc
import dataclasses
import json
import os
import pathlib
import tempfile
import time
import typing

from ddptrain import files, markers, tracking

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
    """Return the trackers that this run feeds beside its own files, as the environment asks for them."""
    return [tracking.Background(target) for target in tracking.targets(run_dir, os.environ)]


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
            except Exception as e:  # whatever a sink may raise: tracking never stops a training
                markers.warn("TRACK", f"{type(sink).__name__}: {e}")

    def flush(self) -> None:
        """Hand what was written to the filesystem."""
        with files.naming(self.path):
            self._file.flush()
        self._last_flush = time.monotonic()

    def close(self) -> None:
        """Make everything durable."""
        with files.naming(self.path):
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
    figure = _figure()
    steps = [
        (int(r["step"]), float(r["loss"])) for r in records if r.get("kind") == "step" and r.get("loss") is not None
    ]
    evals = [(int(r["step"]), float(r["val_loss"])) for r in records if r.get("kind") == "eval"]
    axes = figure.subplots()
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
        figure.savefig(file, format="png")


def draw_bandwidth(measured: collections.abc.Sequence[Record], path: pathlib.Path, title: str) -> None:
    """Write the bus bandwidth of each collective by size as a PNG; `measured` is what collectives.json holds."""
    figure = _figure()
    axes = figure.subplots()
    for one in measured:
        rows = one["results"]
        for placement, style in (("out_of_place", "--"), ("in_place", "-")):
            points = [(row["size"], row[placement]["bus_bw"]) for row in rows if row[placement]]
            if points:
                x, y = zip(*points, strict=True)
                label = f"{one['collective']} {placement.replace('_', ' ')}"
                axes.plot(x, y, style, marker="o", markersize=3.5, label=label)
    axes.set(xlabel="size (bytes)", ylabel="bus bandwidth (GB/s)", title=title)
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    with files.replacing(path) as file:
        figure.savefig(file, format="png")


def _figure() -> typing.Any:
    """Return an empty figure that needs no display, and whose caches are in a folder that can be written."""
    os.environ.setdefault("MPLCONFIGDIR", os.path.join(tempfile.gettempdir(), f"ddptrain-matplotlib-{os.getuid()}"))  # noqa: PTH118
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import figure

    return figure.Figure(figsize=(8, 4.5), dpi=110, layout="constrained")


def write_summary(run_dir: pathlib.Path, summary: Summary) -> None:
    """Replace summary.json."""
    files.write_json(run_dir / SUMMARY, summary.as_record())


def write_failure(run_dir: pathlib.Path, workload: str, error: str, *, world_size: int) -> None:
    """Tell in summary.json that the run failed, why, and how far it had come. A finished run stays finished.

    Whatever rank fails may call it: the facts come from the run's files, the last attempt's summary among them.
    """
    path = run_dir / SUMMARY
    try:
        before = files.read_json(path)
    except (OSError, ValueError):
        before = {}
    records = read_metrics(run_dir / METRICS)
    steps = [r for r in records if r.get("kind") == "step"]
    evals = [float(r["val_loss"]) for r in records if r.get("kind") == "eval" and r.get("val_loss") is not None]
    reached = int(steps[-1]["step"]) if steps else 0
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
        first_loss=steps[0].get("loss") if steps else None,
        last_loss=steps[-1].get("loss") if steps else None,
        best_loss=min(evals, default=None),
        tokens=steps[-1].get("tokens") if steps else None,
        tokens_per_second=steps[-1].get("tokens_per_second") if steps else None,
        checkpoint=str(run_dir / latest.readlink()) if latest.is_symlink() else None,
        extra={"error": error, "run_dir": str(run_dir)},
    )
    write_summary(run_dir, summary)


def has_failed(run_dir: pathlib.Path, *, since: float) -> bool:
    """Tell whether a rank has recorded since a time why the run failed."""
    path = run_dir / SUMMARY
    try:
        return path.stat().st_mtime >= since and files.read_json(path).get("state") == "failed"
    except (OSError, ValueError):
        return False


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
