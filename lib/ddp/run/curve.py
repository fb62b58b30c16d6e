"""A curve in the terminal, by plotext."""

import collections.abc
import importlib
import typing

Points = collections.abc.Sequence[tuple[float, float]]


def draw(points: Points, marks: Points = (), *, columns: int = 76, rows: int = 12) -> str:
    """Draw points, sorted by step, as a line in a frame; `marks` are drawn as `o`. Empty without points."""
    if not points:
        return ""
    plot: typing.Any = importlib.import_module(
        "plotext"
    )  # it takes as long to import as the rest of the program
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
