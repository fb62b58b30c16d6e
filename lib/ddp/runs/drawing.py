"""A loss curve in ASCII, for the results of actions."""

import collections.abc

_ROWS, _COLUMNS = 12, 64


def draw(
    steps: collections.abc.Sequence[tuple[int, float]], evals: collections.abc.Sequence[tuple[int, float]] = ()
) -> str:
    """Draw the training loss as `*` (the mean of each column), the validation loss as `o`; empty without steps."""
    if not steps:
        return ""
    first, last = steps[0][0], steps[-1][0]
    columns = min(_COLUMNS, len(steps))

    def column(step: int) -> int:
        return min(columns - 1, max(0, (step - first) * columns // max(1, last - first + 1)))

    sums = [[0.0, 0] for _ in range(columns)]
    for step, loss in steps:
        cell = sums[column(step)]
        cell[0], cell[1] = cell[0] + loss, cell[1] + 1
    means = {index: total / count for index, (total, count) in enumerate(sums) if count}
    marks = {column(step): loss for step, loss in evals}
    values = [*means.values(), *marks.values()]
    low, high = min(values), max(values)
    span = (high - low) or 1.0

    def row(value: float) -> int:
        return round((high - value) / span * (_ROWS - 1))

    canvas = [[" "] * columns for _ in range(_ROWS)]
    for index, value in means.items():
        canvas[row(value)][index] = "*"
    for index, value in marks.items():
        canvas[row(value)][index] = "o"
    lines = [
        f"{high - span * number / (_ROWS - 1):9.4f} |{''.join(cells)}".rstrip() for number, cells in enumerate(canvas)
    ]
    lines.append(" " * 10 + "+" + "-" * columns)
    lines.append(" " * 11 + str(first).ljust(max(1, columns - len(str(last)))) + f"{last}  step")
    return "\n".join(lines)
