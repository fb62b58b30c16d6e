"""A curve in Braille characters: each holds two columns of four dots."""

import collections.abc

_FIRST = 0x2800  # the pattern without dots (Unicode, Braille Patterns)
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # by row from above, then by column


def draw(points: collections.abc.Sequence[tuple[float, float]], columns: int, rows: int) -> list[str]:
    """Draw points, sorted by step, as lines of characters.

    Each column of dots has a stroke from the lowest to the highest value in it; neighbours are joined by a line.
    """
    wide, tall = 2 * columns, 4 * rows
    cells = [[0] * columns for _ in range(rows)]
    before: tuple[int, int] | None = None
    for x, y in _placed(points, wide, tall):
        from_x, from_y = before or (x, y)
        for column in range(from_x, x + 1):
            top, bottom = sorted(_between(from_x, from_y, x, y, at) for at in (column - 0.5, column + 0.5))
            for row in range(top, bottom + 1):
                cells[row // 4][column // 2] |= _DOTS[row % 4][column % 2]
        before = x, y
    return ["".join(chr(_FIRST + cell) if cell else " " for cell in line) for line in cells]


def _placed(
    points: collections.abc.Sequence[tuple[float, float]], wide: int, tall: int
) -> collections.abc.Iterator[tuple[int, int]]:
    """Yield the column and row of dots of each point; the highest value is in row 0."""
    if not points:
        return
    first, last = points[0][0], points[-1][0]
    low, high = min(value for _, value in points), max(value for _, value in points)
    for step, value in points:
        x = min(wide - 1, int((step - first) / (last - first) * wide)) if last > first else 0
        yield x, round((high - value) / (high - low) * (tall - 1)) if high > low else tall // 2


def _between(from_x: int, from_y: int, x: int, y: int, at: float) -> int:
    """Return the row of the line between two dots at a place, which may be half a column beyond its ends."""
    share = (at - from_x) / (x - from_x) if x > from_x else (at > x) * 1.0
    return round(from_y + (y - from_y) * max(0.0, min(1.0, share)))
