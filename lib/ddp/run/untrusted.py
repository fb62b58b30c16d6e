"""Files and values that may be anything: absent, truncated, huge, a pipe, of another type."""

import contextlib
import math
import os
import pathlib
import typing

from ddp.node import small_files

Json = dict[str, typing.Any]


def tail(path: pathlib.Path, limit_bytes: int) -> list[str]:
    """Read the whole lines in the last bytes of a file; [] if it is unreadable."""
    with contextlib.suppress(OSError):
        return small_files.tail(path, limit_bytes)
    return []


def json_object(path: pathlib.Path, notes: list[str] | None = None) -> Json:
    """Read the JSON object in a file, or {}; add to `notes` why a file is unreadable."""
    try:
        return small_files.read_object(path)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as e:
        if notes is not None:
            why = getattr(e, "strerror", None) or e
            notes.append(f"{path.name} cannot be read: {why}")
        return {}


def written(path: pathlib.Path) -> float | None:
    """Return when a file changed last, in seconds since 1970; None if it does not exist."""
    with contextlib.suppress(OSError):
        return path.lstat().st_mtime
    return None


def names(folder: pathlib.Path) -> list[str]:
    """List the names in a folder, sorted; [] if it is unreadable."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries)
    return []


def number(text: str, default: int) -> int:
    """Parse a short decimal number; return the default for anything else."""
    is_number = text.isascii() and text.isdecimal() and len(text) < 19
    return int(text) if is_number else default


def real(value: object) -> float | None:
    """Return a number as a float, infinite if it is too large; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def whole(value: object) -> int | None:
    """Return a number as an integer; None for anything else, and from 2**53 on."""
    number = real(value)
    if number is None or not abs(number) < 1 << 53:
        return None
    return int(number)


def printable(value: object, limit: int = 4000) -> str:
    """Return a text as one line of at most `limit` characters that a terminal does not obey.

    Control characters, escape sequences and changes of direction become `?`.
    """
    letters = str(value)[: 4 * limit]
    text = "".join(c if c.isprintable() or c == "\t" else "?" for c in letters)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def as_object(value: object) -> Json:
    """Return the value if it is a JSON object, or {}."""
    return typing.cast(Json, value) if isinstance(value, dict) else {}


def as_list(value: object) -> list[typing.Any]:
    """Return the value if it is a JSON array, or []."""
    return typing.cast(list[typing.Any], value) if isinstance(value, list) else []
