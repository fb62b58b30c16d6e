"""The networks between GPU nodes, as fabrics.toml describes them."""

import pathlib
import typing

from ddp import backports
from ddp.node import spec

_HERE = pathlib.Path(__file__)


def _fabric(name: str, entry: dict[str, typing.Any]) -> spec.Fabric:
    def pairs(key: str) -> tuple[tuple[str, str], ...]:
        return tuple((name, value) for name, value in entry.get(key, ()))

    return spec.Fabric(
        name=name,
        variables=pairs("variables"),
        interface=entry.get("interface", ""),
        found_by=tuple(entry.get("found-by", ())),
        needs=tuple(entry.get("needs", ())),
        hint=entry.get("hint", ""),
        library_path=entry.get("library-path", ""),
        profile=entry.get("profile", ""),
        afterwards=pairs("afterwards"),
        mounts=tuple(entry.get("mounts", ())),
    )


_DECLARED = typing.cast(
    "dict[str, dict[str, typing.Any]]", backports.parse_toml(_HERE.with_suffix(".toml").read_text())
)
FABRICS = tuple(_fabric(name, entry) for name, entry in _DECLARED.items())
NAMES = ("auto", *sorted(_DECLARED))


def root_scripts(name: str) -> dict[str, str]:
    """Read the Prolog and Epilog that root must install on the nodes for this fabric; most need none."""
    paths = {part: _HERE.with_name("templates") / f"{name}-{part}.sh" for part in ("prolog", "epilog")}
    return {part: path.read_text() for part, path in paths.items() if path.is_file()}
