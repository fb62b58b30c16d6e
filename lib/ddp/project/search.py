"""Find modules and files that a run's program lacked, in its project."""

import collections.abc
import dataclasses
import itertools
import os
import pathlib
import typing

from ddp.project import contents, updates

Record = collections.abc.Mapping[str, object]  # of a run, its job.json
_LEVELS = 3  # of folders that find_left_out searches
_FOLDERS = 2000  # at most


@dataclasses.dataclass(frozen=True)
class _Place:
    """The start of a run's program, and its project."""

    code: pathlib.Path  # the copy of the project
    start: pathlib.Path  # the folder that the ranks started in
    origin: pathlib.Path | None  # the project's root; None: the program was not copied


def _place(folder: pathlib.Path, record: Record) -> _Place:
    name = str(record.get("sweep") or folder.name)
    start = pathlib.Path(str(record.get("workdir") or folder))
    about = record.get("code")
    origin = None
    if isinstance(about, dict):
        origin = pathlib.Path(str(typing.cast("dict[str, object]", about).get("origin")))
    return _Place(folder.with_name(name) / updates.FOLDER, start, origin)


def find_module(folder: pathlib.Path, record: Record, name: str) -> tuple[str, str] | None:
    """Find a module in the project of a run.

    Returns its path there, and its folder relative to the folder that the ranks started in.
    """
    place = _place(folder, record)
    below = name.replace(".", "/")
    if place.origin is None:
        for near in (place.start, place.start / "src", place.start.parent):
            if (near / f"{below}.py").is_file() or any((near / below).glob("*.py")):
                return str(near / below), os.path.relpath(near, place.start)
        return None

    above = _folders_of(name.split("."), updates.read_states(place.code) or {})
    if not above:
        return None
    nearest = min(above, key=lambda one: (len(one), one))
    found = os.path.relpath(place.code / nearest, place.start)
    return str(place.origin / nearest / below), found


def _folders_of(module: list[str], files: collections.abc.Iterable[str]) -> set[str]:
    """Return the folders below which files make up a module or package."""
    found: set[str] = set()
    for path in map(pathlib.PurePosixPath, files):
        if path.suffix not in (".py", ".so"):
            continue
        parts = [*path.parts[:-1], path.name.partition(".")[0]]
        for at in range(len(parts)):
            if parts[at : at + len(module)] == module:
                found.add("/".join(parts[:at]))
    return found


def find_left_out(
    folder: pathlib.Path, record: Record, names: collections.abc.Sequence[str]
) -> str | None:
    """Find a file or package that the run's copy lacks, by its name.

    Searches the folder that the command was typed in, its parent, and three levels below.
    """
    place = _place(folder, record)
    start = place.start
    if place.origin is not None:
        inside = os.path.relpath(place.start, place.code)
        start = pathlib.Path(os.path.normpath(place.origin / inside))
    near = itertools.chain((start, start.parent), _below(start))
    for parent in itertools.islice(near, _FOLDERS):
        for name in names:
            path = parent / name
            if path.is_file() or any(path.glob("*.py")):
                return str(path)
    return None


def _below(start: pathlib.Path) -> collections.abc.Iterator[pathlib.Path]:
    for place, inner, _ in os.walk(start):
        here = pathlib.Path(place)
        if len(here.relative_to(start).parts) == _LEVELS:
            inner.clear()
        inner[:] = [
            name for name in inner if name[0] != "." and not contents.is_generated(here / name)
        ]
        yield here
