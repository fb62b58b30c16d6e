"""What the standard library has since Python 3.11, for 3.10, too."""

import hashlib
import importlib
import sys
import typing

_toml = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")


def parse_toml(text: str) -> dict[str, object]:
    """Parse a TOML file. Raises ValueError."""
    return typing.cast("dict[str, object]", _toml.loads(text))


def sha256(file: typing.IO[bytes]) -> str:
    """Return the hash of what is left in an open file."""
    digest = hashlib.sha256()
    while block := file.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()
