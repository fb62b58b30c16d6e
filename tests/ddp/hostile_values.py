"""Values that a shell, Slurm, jinja2, a terminal, JSON, YAML or a path misreads; text options."""

import json
import pathlib

from harness import META

TEXTS = [
    (action, name)
    for action, about in META["actions"].items()
    for name, schema in about["params"].items()
    if "string" in schema["type"]
]
FREE = ("args", "env", "again")  # words for the user's program, of any characters
# Words for Slurm, of any that cannot end or split a directive
SLURMS = (
    "account",
    "constraint",
    "dependency",
    "exclude",
    "gpus-per-node",
    "nodelist",
    "partition",
    "qos",
    "reservation",
)
_HELD = json.loads((pathlib.Path(__file__).parent / "data" / "hostile_values.json").read_text())
_LONG = ["a" * 5000, "a" * (1 << 20), "$(" * 2000, "\n" * 3000, "'" * 4096, "\x00" * 5000]
NASTY: list[str] = [*_HELD["nasty"], *_LONG]
ROAMING: list[str] = [*_HELD["roaming"], "/" + "a/" * 600]


def is_slurms(action: str, name: str) -> bool:
    """Return whether an option's value is Slurm's to judge."""
    return name in SLURMS or (action, name) == ("doctor", "nodes")
