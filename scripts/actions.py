"""Write the actions of charms/ddp-trainer/charmcraft.yaml from the options that lib/ddp declares.

tox -e reference                 write them, and the reference pages
python scripts/actions.py --check        say whether they are out of date, and exit 1 if they are
"""

import pathlib
import sys
import textwrap

import yaml

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "lib"))

from ddp import verbs  # noqa: E402
from ddp.options import declared  # noqa: E402

CHARM = ROOT / "charms" / "ddp-trainer" / "charmcraft.yaml"
_BEGIN, _END = "actions:", "\nparts:\n"


def render() -> str:
    """Return the section `actions`."""
    section = {
        name: {
            "parallel": True,  # each waits or only reads, or asks Slurm: none needs the machine for itself
            "description": verb.description,
            "params": {option.name: option.schema() for option in declared.options(verb.params)},
            "additionalProperties": False,
        }
        for name, verb in verbs.ACTIONS.items()
    }
    lines = yaml.safe_dump(section, sort_keys=False, width=118)
    return f"{_BEGIN}  # written by scripts/actions.py from lib/ddp/options: change those\n" + textwrap.indent(
        lines, "  "
    )


def replaced(text: str) -> str:
    """Return charmcraft.yaml with its actions as they should be."""
    begin, end = text.index(f"\n{_BEGIN}") + 1, text.index(_END)
    return text[:begin] + render() + text[end:]


def main() -> int:
    """Run the command line."""
    text = CHARM.read_text()
    wanted = replaced(text)
    if "--check" in sys.argv[1:]:
        if text != wanted:
            print(f"{CHARM.relative_to(ROOT)}: its actions are out of date; run: tox -e reference")
        return int(text != wanted)
    CHARM.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
