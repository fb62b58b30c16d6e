"""Write docs/reference/programs.md from tests/programs; `tox -e reference` runs it."""

import pathlib
from typing import Any

import yaml

ROOT = pathlib.Path(__file__).resolve().parent.parent
PROGRAMS = ROOT / "tests" / "programs"
PAGE = ROOT / "docs" / "reference" / "programs.md"
HEAD = """<!-- Written by scripts/programs.py from tests/programs: change rows.yaml, or run its tests. -->
# Programs of others

The commands of common trainers, with `ddp submit` before them. What ddp does not understand it passes on.

## Tried on two nodes

Each program ran on two nodes with a tiny model. It was requeued, lost a rank, and reached its time limit,
and continued from its own checkpoint each time. The seconds are from the submission to the first loss in
`ddp list`, on two shared cores that had other work.

"""
DRY = """
## Not run

The last column says why.

"""


def render() -> str:
    """Return the page."""
    rows: dict[str, dict[str, Any]] = yaml.safe_load((PROGRAMS / "rows.yaml").read_text())
    results: dict[str, dict[str, int]] = yaml.safe_load((PROGRAMS / "results.yaml").read_text())
    lines = [
        "| program | `ddp submit ...` | `--again` | needs | first loss |",
        "|---|---|---|---|---|",
    ]
    untried: list[tuple[str, str, str, str]] = []
    for name, row in rows["ran"].items():
        options = f"{row['options']} " if "options" in row else ""
        command = f"`{options}{row['command']}`"
        again = f"`'{row['again']}'`" if "again" in row else "by itself"
        if name in results:
            seconds = f"{results[name]['seconds']} s"
            cells = (row["program"], command, again, row["needs"], seconds)
            lines.append(f"| {' | '.join(cells)} |")
        else:
            continues = again.replace("`'", "`--again '", 1)
            untried.append((row["program"], command, continues, "its test did not run"))
    for name, row in rows["dry"].items():
        untried.append((name, f"`{row['command']}`", row["continues"], row["why"]))

    dry = ["| program | `ddp submit ...` | continues | not run because |", "|---|---|---|---|"]
    dry += [f"| {' | '.join(cells)} |" for cells in untried]
    return HEAD + "\n".join(lines) + "\n" + DRY + "\n".join(dry) + "\n"


if __name__ == "__main__":
    PAGE.write_text(render())
