"""loss.png: the losses of a run over its steps."""

import collections.abc
import itertools
import os
import pathlib
import tempfile
import typing

from ddptrain.ground import files

FILE = "loss.png"

Record = dict[str, typing.Any]


def draw(records: collections.abc.Sequence[Record], path: pathlib.Path, title: str) -> None:
    """Write the loss curve as a PNG: training loss, its running mean, validation loss if any."""
    steps = _points(records, "step", "loss")
    evals = _points(records, "eval", "val_loss")
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
        mean = _running_mean(y, max(1, len(y) // 40))
        axes.plot(x, mean, color="#08519c", linewidth=1.8, label="running mean")
    if evals:
        x, y = zip(*evals, strict=True)
        axes.plot(x, y, color="#d94801", marker="o", linewidth=1.4, label="validation loss")
    axes.set(xlabel="step", ylabel="cross-entropy (nats)", title=title)
    axes.grid(alpha=0.3)
    if axes.has_data():
        axes.legend(fontsize=8)
    with files.replacing(path) as file:
        drawing.savefig(file, format="png")


def _points(
    records: collections.abc.Sequence[Record], kind: str, name: str
) -> list[tuple[int, float]]:
    """Return the step and a figure of each record of a kind that has it."""
    found: list[tuple[int, float]] = []
    for record in records:
        if record.get("kind") == kind and record.get(name) is not None:
            found.append((int(record["step"]), float(record[name])))
    return found


def _running_mean(values: collections.abc.Sequence[float], window: int) -> list[float]:
    sums = [0.0, *itertools.accumulate(values)]
    means: list[float] = []
    for end in range(1, len(sums)):
        begin = max(0, end - window)
        means.append((sums[end] - sums[begin]) / (end - begin))
    return means
