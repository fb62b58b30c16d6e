"""Tables as text: columns aligned by blanks."""

import collections.abc


def aligned(rows: collections.abc.Sequence[collections.abc.Sequence[str]]) -> str:
    """Return the rows as lines, each column as wide as its longest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines: list[str] = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
