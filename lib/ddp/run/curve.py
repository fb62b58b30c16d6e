"""A curve drawn for a terminal, by plotext."""

import collections.abc
import importlib
import typing

Points = collections.abc.Sequence[tuple[float, float]]


def draw(points: Points, marks: Points = (), *, columns: int = 76, rows: int = 12) -> str:
    """Draw points, sorted by step, as a line in a frame, with `marks` as `o`; "" without points."""
    if not points:
        return ""
    # It takes as long to import as the rest of the program
    plot: typing.Any = importlib.import_module("plotext")
    plot.clear_figure()
    plot.theme("clear")
    plot.limit_size(False, False)  # this process's own terminal may be another, or none
    plot.plotsize(columns, rows)
    plot.plot(*map(list, zip(*points, strict=True)), marker="braille")
    if marks:
        plot.scatter(*map(list, zip(*marks, strict=True)), marker="o")
    ends = sorted({points[0][0], points[-1][0]})
    plot.xticks(ends, [f"{end:g}" for end in ends])
    return "\n".join(line.rstrip() for line in plot.uncolorize(plot.build()).splitlines())
