"""Compare a project with its copy in a run's folder.

A list next to the copy has the state of each file when it was copied. So the run's own changes
show.
"""

import collections.abc
import concurrent.futures
import dataclasses
import json
import os
import pathlib
import typing

from ddp.project import root

FOLDER = "code"  # in the run's folder
STATES = "code.json"  # the list, in the same folder
_THREADS = 8

T = typing.TypeVar("T")
States = dict[str, tuple[str, str]]  # of each file, by its path: in the project, and in the copy


@dataclasses.dataclass(frozen=True)
class Update:
    """The difference between a project and its copy."""

    copied: dict[str, str]  # files, with their states in the project
    aside: set[str]  # files of `copied` that both the run and its user changed
    removed: tuple[str, ...]
    written: list[str]  # by the run, later than the project's files of these names
    known: States  # of the files that stay


def compare(found: root.Project, folder: pathlib.Path) -> Update:
    """Compare a project with its copy in a run's folder, which need not exist.

    Where both the run and its user changed a file, the user's is copied and the run's set aside,
    except one that the run made and that is newer: an output that was fetched before.
    """
    before = read_states(folder)
    former = before or {}
    view = _View(folder, [*found.files, *former])
    view.removed |= _removed(view, former, set(found.files))
    update = Update({}, set(), tuple(sorted(view.removed)), [], {})
    sources = each(found.stamp, found.files)
    states = each(view.state, found.files)
    for name, source in sources.items():
        now = states[name]
        then = former.get(name)
        is_of_run = before is not None and then is None and name != found.script
        if now == source:
            update.known[name] = (source, now)
        elif now and then is not None and source == then[0]:  # only the run may have changed it
            update.known[name] = then
        elif is_of_run and _time(now) > _time(source):
            update.written.append(name)
        else:
            update.copied[name] = source
            if now and (then is None or now != then[1]):
                update.aside.add(name)
    return update


def _removed(view: "_View", former: States, files: set[str]) -> set[str]:
    """Return the files that the project lacks by now, and that the run did not change."""
    gone = [name for name in former if name not in files]
    states = each(view.state, gone)
    return {name for name in gone if states[name] and states[name] == former[name][1]}


class _View:
    """The copy in a run's folder. The run may have replaced folders by links."""

    def __init__(self, folder: pathlib.Path, names: list[str]) -> None:
        self._folder = folder
        self.removed: set[str] = set()
        parents = {parent for name in names for parent in _parents(name)}
        is_link = each(lambda parent: (folder / parent).is_symlink(), parents)
        self._links = {parent for parent in parents if is_link[parent]}

    def state(self, name: str) -> str:
        """Describe a file; files behind a link of the run are not part of the copy."""
        behind = self._links & _parents(name)
        if not behind:
            return root.stamp(self._folder / name)
        return "" if behind <= self.removed else "other"


def _parents(name: str) -> set[str]:
    return {str(parent) for parent in pathlib.PurePath(name).parents[:-1]}


def each(
    work: collections.abc.Callable[[str], T], names: collections.abc.Iterable[str]
) -> dict[str, T]:
    """Do work for each name, many at a time: on a network filesystem most of it is waiting."""
    given = list(names)
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        return dict(zip(given, pool.map(work, given), strict=True))


def _time(stamp: str) -> int:
    """Return the time of a file's last change; 0 if it is not a file."""
    size, _, rest = stamp.partition(":")
    return int(rest.partition(":")[0]) if size.isdecimal() else 0


def read_states(folder: pathlib.Path) -> States | None:
    """Read the list of a copy; None if it is missing or damaged."""
    states: States = {}
    try:
        held: object = json.loads(folder.with_name(STATES).read_text())
        if not isinstance(held, dict):
            return None
        for name, one in typing.cast("dict[str, list[object]]", held).items():
            states[name] = (str(one[0]), str(one[1]))
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return states


def written_by_run(folder: pathlib.Path) -> list[str]:
    """List the files below a run's copy that the run wrote or changed, without Python's caches."""
    former = read_states(folder) or {}
    written: list[str] = []
    for path in walk(folder):
        name = path.relative_to(folder).as_posix()
        if name not in former or root.stamp(path) != former[name][1]:
            written.append(name)
    return written


def walk(folder: pathlib.Path) -> collections.abc.Iterator[pathlib.Path]:
    """Yield the files and links below a folder, without Python's caches."""
    for place, inner, names in os.walk(folder):
        links = [name for name in inner if pathlib.Path(place, name).is_symlink()]
        inner[:] = sorted(name for name in inner if name != "__pycache__" and name not in links)
        for name in [*sorted(names), *links]:
            yield pathlib.Path(place, name)
