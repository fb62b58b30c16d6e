"""Parts of Python 3.11's standard library, for 3.10."""

import importlib
import pathlib
import sys
import typing

_toml = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")


def parse_toml(text: str) -> dict[str, typing.Any]:
    """Parse a TOML file. Raises ValueError."""
    return _toml.loads(text)


def read_toml(path: pathlib.Path) -> dict[str, typing.Any]:
    """Read a TOML file of this program."""
    return parse_toml(path.read_text())
