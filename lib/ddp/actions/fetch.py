"""fetch: copy files out of the folder that a run started in."""

import os
import pathlib
import shutil

from ddp import copies
from ddp.base import Log, ParameterError, Settings
from ddp.options import models
from ddp.problem import Command
from ddp.run import catalog
from ddp.view.result import Result
from ddp.workspace import folders

_COPY_S = 600.0


def fetch(settings: Settings, params: models.Fetch, _: Log) -> Result:
    """Copy the named files and folders, else all that the run wrote. Raises TrainerError before anything is copied."""
    name = catalog.name_of(settings, params.run)[0]
    record = catalog.read_record(settings, name)
    if not record:
        raise ParameterError("run", f"no run {name!r} in {settings.runs}", remedy=catalog.LIST)
    source = pathlib.Path(str(record.get("workdir") or settings.runs / name))
    target = pathlib.Path(params.to or pathlib.Path.cwd())
    names = folders.call(settings, lambda: _names(source, params.arguments), timeout_s=_COPY_S)
    if not names:
        text = f"{name} wrote no file in {source}"
        raise ParameterError("run", text, remedy=Command("show", arguments=(name,)))
    if taken := [one for one in names if os.path.lexists(target / one)]:
        more = f" and {len(taken) - 1} more" if len(taken) > 1 else ""
        raise ParameterError("to", f"{target / taken[0]} exists already{more}; choose another folder, or remove it")
    folders.call(settings, lambda: _copy(source, target, names), timeout_s=_COPY_S)
    shown = {"run": name, "from": str(source), "to": str(target), "files": "\n".join(names)}
    return Result(shown, {**shown, "files": names})


def _names(source: pathlib.Path, wanted: tuple[str, ...]) -> list[str]:
    """List the files below a folder that are named, with those of folders; without names all that the run wrote."""
    if not wanted:
        code = next((path for path in (source, *source.parents) if (path.parent / copies.STATES).is_file()), None)
        if code is None:
            raise ParameterError("path", f"name what to fetch; {source} is no copy of a project")
        below = [code / one for one in copies.written_by_run(code)]
        return [str(path.relative_to(source)) for path in below if path.is_relative_to(source)]
    names: list[str] = []
    for one in wanted:
        path = pathlib.Path(os.path.normpath(source / one))
        if not path.is_relative_to(source):
            raise ParameterError("path", f"{one} is not in the run's folder {source}")
        if not os.path.lexists(path):
            raise ParameterError("path", f"{path} does not exist")
        found = copies.walk(path) if path.is_dir() and not path.is_symlink() else [path]
        names += [str(file.relative_to(source)) for file in found]
    return list(dict.fromkeys(names))


def _copy(source: pathlib.Path, target: pathlib.Path, names: list[str]) -> None:
    """Copy files; each appears whole. A link stays one."""
    for name in names:
        place = target / name
        place.parent.mkdir(parents=True, exist_ok=True)
        partial = place.with_name(f".{os.getpid()}.fetched")
        try:
            shutil.copy2(source / name, partial, follow_symlinks=False)
            os.link(partial, place, follow_symlinks=False)  # unlike a rename it never replaces a file
        finally:
            partial.unlink(missing_ok=True)
