"""Read the files of a run directory. None of them is trusted: any may be absent, cut short, huge, a link or a pipe."""

import contextlib
import os
import pathlib
import re
import typing

from ddp.node.explain import Json, opened, read_object

__all__ = [
    "Json", "as_list", "as_object", "attempt_order", "head", "names", "number", "opened", "printable", "read_object",
    "tail", "written",
]  # fmt: skip
_ATTEMPT = re.compile(r"(.*?)\.r(\d+)(?:t(\d+))?")


def head(path: pathlib.Path, limit_bytes: int) -> str:
    """Return the beginning of a file as text; empty where it cannot be read."""
    with contextlib.suppress(OSError), opened(path) as file:
        return file.read(limit_bytes).decode(errors="replace")
    return ""


def tail(path: pathlib.Path, limit_bytes: int) -> list[str]:
    """Return the whole lines in the last bytes of a file; none where it cannot be read."""
    with contextlib.suppress(OSError), opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(max(0, size - limit_bytes))
        lines = file.read(limit_bytes).decode(errors="replace").split("\n")
        if size > limit_bytes and len(lines) > 1:
            lines = lines[1:]
        return lines if lines[-1] else lines[:-1]
    return []


def written(path: pathlib.Path) -> float | None:
    """Return when a file or folder was last written, as a Unix time; None where there is none."""
    with contextlib.suppress(OSError):
        return path.lstat().st_mtime
    return None


def names(folder: pathlib.Path) -> list[str]:
    """Return the names in a folder, in order; none where it cannot be read."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries)
    return []


def attempt_order(name: str) -> tuple[int, int, int]:
    """Return the job, its requeues and its restarts of an attempt's name, such as 12.r1t2; -1 where it has none."""
    found = _ATTEMPT.fullmatch(name)
    if found is None:
        return (-1, -1, -1)
    return (number(found[1], -1), number(found[2], 0), number(found[3] or "0", 0))


def number(text: str, default: int) -> int:
    """Return the decimal number that a short text is, else the default."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 19 else default


def printable(value: object, limit: int = 300) -> str:
    """Return a text in one line, without control characters, escape sequences or changes of direction."""
    text = str(value)[: 4 * limit]
    text = "".join(character if character.isprintable() else " " for character in text)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def as_object(value: object) -> Json:
    """Return the value where it is a JSON object, else an empty one."""
    return typing.cast(Json, value) if isinstance(value, dict) else {}


def as_list(value: object) -> list[typing.Any]:
    """Return the value where it is a JSON array, else an empty one."""
    return typing.cast(list[typing.Any], value) if isinstance(value, list) else []
