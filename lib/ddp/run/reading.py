"""Read files that nobody vouches for: any may be absent, truncated, huge, a link or a pipe."""

import contextlib
import math
import os
import pathlib
import typing

from ddp.node import small_files

Json = dict[str, typing.Any]


def tail(path: pathlib.Path, limit_bytes: int) -> list[str]:
    """Read the whole lines in the last bytes of a file; none if it is unreadable."""
    with contextlib.suppress(OSError):
        return small_files.tail(path, limit_bytes)
    return []


def json_object(path: pathlib.Path, notes: list[str] | None = None) -> Json:
    """Read the JSON object in a file; empty if there is none. What is unreadable is added to `notes`."""
    try:
        return small_files.read_object(path)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as e:
        if notes is not None:
            notes.append(f"{path.name} cannot be read: {getattr(e, 'strerror', None) or e}")
        return {}


def written(path: pathlib.Path) -> float | None:
    """Return the time of a file's last change, in seconds since 1970; None if the file does not exist."""
    with contextlib.suppress(OSError):
        return path.lstat().st_mtime
    return None


def names(folder: pathlib.Path) -> list[str]:
    """List the names in a folder, sorted; none if it is unreadable."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries)
    return []


def number(text: str, default: int) -> int:
    """Parse a short decimal number; return the default for other texts."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 19 else default


def real(value: object) -> float | None:
    """Return a number as a float, infinite if it is too large; None for other values."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def whole(value: object) -> int | None:
    """Return a number as an integer; None for other values and from where a float does not hold each integer."""
    number = real(value)
    return int(number) if number is not None and abs(number) < 1 << 53 else None


def printable(value: object, limit: int = 4000) -> str:
    """Shorten a text to one line without control characters, escape sequences or changes of direction."""
    text = "".join(c if c.isprintable() or c == "\t" else "?" for c in str(value)[: 4 * limit])
    return text if len(text) <= limit else text[: limit - 3] + "..."


def as_object(value: object) -> Json:
    """Return the value if it is a JSON object, else an empty one."""
    return typing.cast(Json, value) if isinstance(value, dict) else {}


def as_list(value: object) -> list[typing.Any]:
    """Return the value if it is a JSON array, else an empty one."""
    return typing.cast(list[typing.Any], value) if isinstance(value, list) else []
