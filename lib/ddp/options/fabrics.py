"""The networks between GPU nodes, as fabrics.toml describes them."""

import pathlib

from ddp.node import spec
from slurm_ddp import backports

_HERE = pathlib.Path(__file__)
_DECLARED = backports.read_toml(_HERE.with_suffix(".toml"))
FABRICS = tuple(
    spec.build(spec.Fabric, {**_DECLARED[about.get("alias-of", name)], "name": name})
    for name, about in _DECLARED.items()
)
NAMES = ("auto", *sorted(_DECLARED))


def root_scripts(name: str) -> dict[str, str]:
    """Read the Prolog and Epilog that root must install on the nodes for this fabric, if any."""
    found: dict[str, str] = {}
    for part in ("prolog", "epilog"):
        path = _HERE.with_name("templates") / f"{name}-{part}.sh"
        if path.is_file():
            found[part] = path.read_text()
    return found
