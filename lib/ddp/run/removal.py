"""Find and remove runs and their checkpoints: call these functions in `Workspace.do`.

A folder is renamed to a name that no reader lists, and deleted after that: a reader sees all of it
or nothing. The next command deletes what a killed one left under such a name.
"""

import collections.abc
import dataclasses
import os
import pathlib
import pwd
import shutil
import stat
import uuid

from ddp.host import disk_usage
from ddp.host.files import MAX_LISTED, RefusedError
from ddp.node import checkpoints, foreign_checkpoints, small_files
from ddp.project import updates
from ddp.run import folder, untrusted

_REMOVED = ".removed-"


@dataclasses.dataclass(frozen=True)
class Saved:
    """A checkpoint on disk."""

    path: pathlib.Path  # a folder, or a file
    is_best: bool


def check_own(path: pathlib.Path) -> None:
    """Raise RefusedError unless a run's folder is one of this account, and no link."""
    about = path.lstat()
    if not stat.S_ISDIR(about.st_mode):
        raise RefusedError(f"{path} is not a folder, so it is not a run")
    if about.st_uid != os.geteuid():
        raise RefusedError(f"{path} belongs to {_account(about.st_uid)}, who can remove it")


def _account(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"


def list_elements(path: pathlib.Path) -> list[str]:
    """List the runs of a sweep that exist, by name."""
    count = untrusted.number(str(folder.read_record(path).get("count")), 0)
    names = [f"{path.name}-{number}" for number in range(min(count, MAX_LISTED))]
    return [name for name in names if (path.parent / name).is_dir()]


def hide(runs: pathlib.Path, path: pathlib.Path) -> pathlib.Path:
    """Hide a folder or file of the runs from all readers at once; return its new path."""
    hidden = runs / f"{_REMOVED}{uuid.uuid4().hex[:12]}"
    return path.rename(hidden)


def delete(paths: list[pathlib.Path]) -> None:
    """Delete folders and files; links are removed, not followed. Raises OSError at the end."""
    failure: OSError | None = None
    for path in paths:
        try:
            _delete(path)
        except FileNotFoundError:  # another command deletes it, too
            continue
        except OSError as e:
            failure = e
    if failure is not None:
        raise failure


def _delete(path: pathlib.Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def hidden(runs: pathlib.Path) -> list[pathlib.Path]:
    """List the files and folders that killed commands left hidden."""
    return [runs / name for name in untrusted.names(runs) if name.startswith(_REMOVED)]


def measure(paths: list[pathlib.Path]) -> list[int]:
    """Return the bytes of each folder; a file with several names counts once."""
    usage = disk_usage.Usage()
    return [usage.add(path) for path in paths]


# -- checkpoints -----------------------------------------------------------------------------------


def list_saved(path: pathlib.Path) -> list[Saved]:
    """List the checkpoints in a run's folder, the oldest first: the payload's, or a program's.

    Files of the copied project, such as a model to start from, do not count.
    """
    own = [one for one in checkpoints.complete(path) if not one.is_symlink()]
    if own:
        best = checkpoints.best(path)
        return [Saved(one, one == best) for one in own]

    given = updates.read_states(path / updates.FOLDER) or {}
    found: list[pathlib.Path] = []
    best_name = ""
    for one in foreign_checkpoints.find([str(path)]):
        name = _name_in_project(path, one.marker)
        if name not in given:
            found.append(one.path)
            best_name = _best_of_trainer(one.marker) or best_name
    return [Saved(one, one.name == best_name) for one in found]


def _name_in_project(path: pathlib.Path, file: pathlib.Path) -> str:
    """Return a file's name in the copied project, or ""."""
    code = path / updates.FOLDER
    return file.relative_to(code).as_posix() if file.is_relative_to(code) else ""


def _best_of_trainer(marker: pathlib.Path) -> str:
    """Return the name of the best checkpoint by the state of transformers' Trainer, or ""."""
    if marker.suffix != ".json":
        return ""
    state = untrusted.json_object(marker)
    return pathlib.PurePath(str(state.get("best_model_checkpoint") or "")).name


def unlink_names(path: pathlib.Path, gone: collections.abc.Iterable[pathlib.Path]) -> None:
    """Remove a run's links `latest` and `best` if they point to checkpoints that are removed."""
    names = {one.name for one in gone}
    for name in (checkpoints.LATEST, checkpoints.BEST):
        link = path / name
        if link.is_symlink() and link.readlink().name in names:
            link.unlink()


def leftovers(path: pathlib.Path) -> list[pathlib.Path]:
    """List the checkpoints of a run that a killed attempt did not finish."""
    return checkpoints.unfinished(path)


def instructions(path: pathlib.Path) -> str:
    """Return the text of a run's input: the job's specification and its arguments."""
    texts: list[str] = []
    for name in ("program/job.json", "program/parts.json", "args"):
        try:
            with small_files.opened(path / name) as file:
                texts.append(file.read(small_files.MAX_JSON_BYTES).decode(errors="replace"))
        except OSError:
            continue
    return "\n".join(texts)
