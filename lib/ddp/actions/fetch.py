"""fetch: copy files out of the folder that a run started in."""

import contextlib
import os
import pathlib
import shutil

from ddp.host import files
from ddp.options import models
from ddp.problem import Command, ParameterError
from ddp.project import updates
from ddp.results.progress import Log
from ddp.results.result import Result
from ddp.run import catalog
from ddp.settings import Settings
from ddp.workspace.folders import Workspace

_COPY_S = 600.0
LeftOut = dict[str, str]  # why a path was not copied, by its name


def fetch(settings: Settings, params: models.Fetch, _: Log) -> Result:
    """Copy the named files and folders, or all that the run wrote; name what cannot be copied.

    Raises Problem before anything is copied.
    """
    workspace = settings.workspace
    name = catalog.name_of(workspace, params.run)[0]
    source = _source(workspace, name)
    target = pathlib.Path(params.to or pathlib.Path.cwd())

    found = workspace.do(lambda: _names(source, params.arguments), timeout_s=_COPY_S)
    left_out = workspace.do(lambda: _special(source, found), timeout_s=_COPY_S)
    names = [one for one in found if one not in left_out]
    if not names:
        raise _nothing(name, source, left_out)
    _check_target(target, names)

    left_out |= workspace.do(lambda: _copy(source, target, names), timeout_s=_COPY_S)
    copied = [one for one in names if one not in left_out]
    shown = {"run": name, "from": str(source), "to": str(target), "files": "\n".join(copied)}
    values: dict[str, object] = {**shown, "files": copied, "left_out": left_out}
    if left_out:
        shown["left-out"] = "\n".join(f"{one}: {why}" for one, why in left_out.items())
    return Result(shown, values)


def _source(workspace: Workspace, name: str) -> pathlib.Path:
    """Return the folder that a run started in. Raises ParameterError."""
    record = catalog.read_record(workspace, name)
    if not record:
        raise ParameterError("run", f"no run {name!r} in {workspace.runs}", remedy=catalog.LIST)
    return pathlib.Path(str(record.get("workdir") or workspace.runs / name))


def _nothing(name: str, source: pathlib.Path, left_out: LeftOut) -> ParameterError:
    """Explain why there is nothing to copy."""
    text = f"{name} wrote no file in {source}"
    if left_out:
        first, why = next(iter(left_out.items()))
        text = f"{source / first} {why}, and there is nothing else to copy"
    return ParameterError("run", text, remedy=Command("show", arguments=(name,)))


def _check_target(target: pathlib.Path, names: list[str]) -> None:
    """Raise ParameterError if a file would be overwritten."""
    taken = [one for one in names if os.path.lexists(target / one)]
    if not taken:
        return
    more = f" and {len(taken) - 1} more" if len(taken) > 1 else ""
    how = "choose another folder, or remove it"
    raise ParameterError("to", f"{target / taken[0]} exists already{more}; {how}")


def _names(source: pathlib.Path, wanted: tuple[str, ...]) -> list[str]:
    """List the files to copy, relative to the source. Raises ParameterError."""
    if not wanted:
        return _written_by_run(source)
    names: dict[str, None] = {}
    for one in wanted:
        path = pathlib.Path(os.path.normpath(source / one))
        if not path.is_relative_to(source):
            raise ParameterError("path", f"{one} is not in the run's folder {source}")
        if not os.path.lexists(path):
            raise ParameterError("path", f"{path} does not exist")
        is_folder = path.is_dir() and not path.is_symlink()
        for file in updates.walk(path) if is_folder else [path]:
            names[str(file.relative_to(source))] = None
    return list(names)


def _written_by_run(source: pathlib.Path) -> list[str]:
    """List the files below the source that the run wrote. Raises ParameterError."""
    for code in (source, *source.parents):
        if (code.parent / updates.STATES).is_file():
            written = [code / one for one in updates.written_by_run(code)]
            return [
                str(path.relative_to(source)) for path in written if path.is_relative_to(source)
            ]
    raise ParameterError("path", f"name what to fetch; {source} is not a copy of a project")


def _special(source: pathlib.Path, names: list[str]) -> LeftOut:
    """Return the paths that are neither files nor links, such as a pipe that a program left."""
    found: LeftOut = {}
    for name in names:
        with contextlib.suppress(FileNotFoundError):  # it was removed: _copy reports it
            kind = files.special((source / name).lstat().st_mode)
            if kind:
                found[name] = f"is {kind}"
    return found


def _copy(source: pathlib.Path, target: pathlib.Path, names: list[str]) -> LeftOut:
    """Copy files so that each appears whole; return the ones that are unreadable or removed.

    A link stays a link.
    """
    left_out: LeftOut = {}
    for name in names:
        place = target / name
        place.parent.mkdir(parents=True, exist_ok=True)
        partial = place.with_name(f".{os.getpid()}.fetched")
        try:
            shutil.copy2(source / name, partial, follow_symlinks=False)
        except (FileNotFoundError, PermissionError) as e:
            if str(e.filename) != str(source / name):  # the target's
                raise
            was_removed = isinstance(e, FileNotFoundError)
            left_out[name] = "was removed meanwhile" if was_removed else "cannot be read"
        else:  # unlike a rename, a link never replaces a file
            os.link(partial, place, follow_symlinks=False)
        finally:
            partial.unlink(missing_ok=True)
    return left_out
