"""A curve in Braille characters, each of two columns of four dots, with its axes."""

import collections.abc

_FIRST = 0x2800  # the pattern without dots (Unicode, Braille Patterns)
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # by row from above, then by column
_LEFT = 11  # cells of the axis

Points = collections.abc.Sequence[tuple[float, float]]


def draw(points: Points, marks: Points = (), *, columns: int = 76, rows: int = 10) -> str:
    """Draw points, sorted by step, as one line from the first to the last column; `marks` are drawn as `o`.

    Each column of dots has a stroke from the lowest to the highest value in it. Empty without points.
    """
    if not points:
        return ""
    width = max(10, columns - _LEFT)
    wide, tall = 2 * width, 4 * rows
    first, last = points[0][0], points[-1][0]
    values = [value for _, value in (*points, *marks)]
    low, high = min(values), max(values)

    def place(step: float, value: float) -> tuple[int, int]:
        x = int((step - first) / (last - first) * (wide - 1)) if last > first else 0
        y = round((high - value) / (high - low) * (tall - 1)) if high > low else tall // 2
        return min(wide - 1, max(0, x)), y

    cells = [[0] * width for _ in range(rows)]
    before: tuple[int, int] | None = None
    for x, y in (place(*point) for point in points):
        from_x, from_y = before or (x, y)
        for column in range(from_x, x + 1):
            ends = (_between(from_x, from_y, x, y, at) for at in (column - 0.5, column + 0.5))
            top, bottom = sorted(ends)
            for row in range(top, bottom + 1):
                cells[row // 4][column // 2] |= _DOTS[row % 4][column % 2]
        before = x, y
    canvas = [[chr(_FIRST + cell) if cell else " " for cell in line] for line in cells]
    for x, y in (place(*mark) for mark in marks):
        canvas[y // 4][x // 2] = "o"
    labels = [f"{high:.4g}", *[""] * (rows - 2), f"{low:.4g}"]
    lines = [
        f"{label:>{_LEFT - 2}} \N{BOX DRAWINGS LIGHT VERTICAL}{''.join(cells)}"
        for label, cells in zip(labels, canvas, strict=True)
    ]
    ends = f"{first:g}".ljust(max(1, width - len(f"{last:g}"))) + f"{last:g}"
    return "\n".join([*(line.rstrip() for line in lines), " " * _LEFT + ends])


def _between(from_x: int, from_y: int, x: int, y: int, at: float) -> int:
    """Return the row of the line between two dots at a place, which may be half a column beyond its ends."""
    share = (at - from_x) / (x - from_x) if x > from_x else (at > x) * 1.0
    return round(from_y + (y - from_y) * max(0.0, min(1.0, share)))
