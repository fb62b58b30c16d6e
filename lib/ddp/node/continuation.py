"""The arguments that a program gets to continue, from its second attempt on (`--again`).

In a word `{latest:PATTERN}` stands for the newest file or folder that matches a pattern of the
shell, such as `{latest:out/checkpoint-*}`. `{latest:PATTERN:FILE}` looks only at folders that hold
this file, which a trainer writes last, so that a checkpoint that was cut off is left out. A
relative pattern begins in the ranks' folder; `$RUN_DIR/` at its beginning is the run's folder.
"""

import collections.abc
import dataclasses
import glob
import os
import re

OPENING = "{latest"
_LATEST = re.compile(r"\{latest:([^{}:]+)(?::([^{}:/]+))?\}")
_RUN_DIR = "$RUN_DIR/"
_NUMBER = re.compile(r"(\d+)")


def check(words: collections.abc.Sequence[str]) -> None:
    """Raise ValueError, which says what to write, if a word is not a {latest:PATTERN}."""
    for word in words:
        if OPENING in _LATEST.sub("", word):
            raise ValueError(
                f"{word}: write {{latest:PATTERN}}, such as {{latest:out/checkpoint-*}}"
            )


def has_pattern(words: collections.abc.Iterable[str]) -> bool:
    """Return whether a word stands for the newest file or folder of a pattern."""
    return any(_LATEST.search(word) for word in words)


@dataclasses.dataclass(frozen=True)
class Filled:
    """The arguments with their patterns replaced."""

    words: tuple[str, ...]
    missing: str = ""  # the first pattern that nothing matches; the arguments are then not given


def fill_in(words: collections.abc.Iterable[str], run_dir: str, workdir: str) -> Filled:
    """Replace each pattern by the newest file or folder that matches it."""
    filled: list[str] = []
    for word in words:
        text = ""
        end = 0
        for found in _LATEST.finditer(word):
            pattern = _absolute(found[1], run_dir, workdir)
            newest = _newest(pattern, found[2] or "")
            if not newest:
                return Filled((), f"{pattern}/{found[2]}" if found[2] else pattern)
            text += word[end : found.start()] + newest
            end = found.end()
        filled.append(text + word[end:])
    return Filled(tuple(filled))


def _absolute(pattern: str, run_dir: str, workdir: str) -> str:
    if pattern.startswith(_RUN_DIR):
        return os.path.join(run_dir, pattern.removeprefix(_RUN_DIR))
    return os.path.join(workdir, pattern)


def _newest(pattern: str, inside: str) -> str:
    """Return the path that changed last; "" if nothing matches."""
    best: tuple[tuple[object, ...], str] | None = None
    for path in glob.glob(pattern):
        try:
            changed = os.stat(os.path.join(path, inside) if inside else path).st_mtime_ns
        except OSError:
            continue
        order = (changed, *_natural(path))
        if best is None or order > best[0]:
            best = (order, path)
    return best[1] if best else ""


def _natural(path: str) -> list[tuple[int, str]]:
    """Return a key that sorts numbers in a path by their value."""
    key: list[tuple[int, str]] = []
    for part in _NUMBER.split(path):
        is_number = part.isascii() and part.isdigit()
        key.append((int(part), "") if is_number else (-1, part))
    return key
