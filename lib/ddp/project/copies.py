"""The copy of a project in a run's folder, where its ranks start: later edits change nothing.

A run that is submitted again keeps its copy, which is updated: files that the run wrote stay, files
that changed in the project replace the old ones.
"""

import collections.abc
import contextlib
import dataclasses
import json
import os
import pathlib
import shutil
import tempfile

from ddp.host import files
from ddp.options import models
from ddp.project import packages, problems, root, updates, writer
from ddp.results.progress import Log
from ddp.workspace import folders
from ddp.workspace.folders import Workspace

_COPY_S = 600.0
Move = tuple[pathlib.Path, pathlib.Path]  # from, to


@dataclasses.dataclass(frozen=True)
class Start:
    """The folder and the PYTHONPATH that the ranks of a user's program start with."""

    folder: str  # absolute
    origin: str  # the project's root
    python_path: str = ""  # PYTHONPATH; empty: the job sets none


@dataclasses.dataclass(frozen=True)
class Copy:
    """The copy of a project, next to the run's folder until it is placed."""

    workspace: Workspace
    found: root.Project
    partial: pathlib.Path
    folder: pathlib.Path  # where it goes
    update: updates.Update
    is_new: bool
    former: str | None  # the list of the copy that is updated
    below: str = ""  # the folder that the ranks start in, below the project's root
    python_path: str = ""  # as given
    done: list[Move] = dataclasses.field(default_factory=list[Move])

    @property
    def script(self) -> str:
        """The script's path in the run's folder."""
        return str(self.folder / self.found.script)

    @property
    def start(self) -> Start:
        """The folder and the PYTHONPATH of the ranks."""
        origin = self.found.root
        parts: list[str] = []
        if self.python_path:
            parts += [self._copied(part) for part in self.python_path.split(":")]
        if not self.found.is_alone:
            near = origin / self.below
            if self.found.script:
                near = (origin / self.found.script).parent
            parts += [self._copied(str(path)) for path in packages.importable(near, origin)]
        folder = os.path.normpath(self.folder / self.below)
        return Start(folder, str(origin), ":".join(dict.fromkeys(parts)))

    def _copied(self, part: str) -> str:
        """Return a folder of PYTHONPATH as the ranks find it."""
        origin = self.found.root
        path = pathlib.Path(os.path.normpath(origin / self.below / part))
        for one in (path, pathlib.Path(os.path.realpath(path))):
            if one.is_relative_to(origin):
                return os.path.normpath(self.folder / one.relative_to(origin))
        return str(path)

    def place(self) -> None:
        """Move the copy into the run's folder, which exists by now. Raises WorkspaceError."""
        self.workspace.do(self._place, timeout_s=_COPY_S)

    def _place(self) -> None:
        if self.is_new:
            self._rename(self.partial, self.folder)
        else:
            self._apply()
        pathlib.Path(self.start.folder).mkdir(parents=True, exist_ok=True)
        states = dict(self.update.known)
        now = updates.each(lambda name: root.stamp(self.folder / name), self.update.copied)
        for name, source in self.update.copied.items():
            states[name] = (source, now[name])
        files.replace(self.folder.with_name(updates.STATES), json.dumps(states) + "\n")

    def _apply(self) -> None:
        """Update the copy in place; each file appears whole."""
        # Holds the replaced files until the submission succeeds
        old = pathlib.Path(tempfile.mkdtemp(dir=self.partial))
        for name in self.update.removed:
            self._rename(self.folder / name, old / str(len(self.done)))
            self._remove_empty(pathlib.PurePath(name).parents[:-1])
        for name in self.update.copied:
            if os.path.lexists(self.partial / name):  # else it was removed while it was copied
                self._replace(name, old)

    def _remove_empty(self, above: collections.abc.Sequence[pathlib.PurePath]) -> None:
        """Remove folders, the innermost first, as far up as they are empty."""
        with contextlib.suppress(OSError):  # it is not empty
            for folder in above:
                (self.folder / folder).rmdir()

    def _replace(self, name: str, old: pathlib.Path) -> None:
        """Move a file into the copy, and set aside the run's own file of that name."""
        for above in reversed(pathlib.PurePath(name).parents[:-1]):
            place = self.folder / above
            if place.is_symlink() or (place.exists() and not place.is_dir()):
                self._rename(place, _free_name(place))
            place.mkdir(exist_ok=True)
        target = self.folder / name
        if os.path.lexists(target):
            is_folder = target.is_dir() and not target.is_symlink()
            is_of_run = is_folder or name in self.update.aside
            self._rename(target, _free_name(target) if is_of_run else old / str(len(self.done)))
        self._rename(self.partial / name, target)

    def _rename(self, source: pathlib.Path, target: pathlib.Path) -> None:
        source.rename(target)
        self.done.append((source, target))

    def undo(self) -> None:
        """Undo `place`: the submission failed. Raises WorkspaceError."""
        self.workspace.do(self._undo, timeout_s=_COPY_S)

    def _undo(self) -> None:
        while self.done:
            source, target = self.done.pop()
            source.parent.mkdir(parents=True, exist_ok=True)
            target.rename(source)
        states = self.folder.with_name(updates.STATES)
        if self.former is None:
            states.unlink(missing_ok=True)
        else:
            files.replace(states, self.former)

    def facts(self) -> dict[str, object]:
        """Describe the copy for job.json."""
        return {
            "folder": self.folder.name,
            "script": self.found.script,
            "origin": str(self.found.root),
            "files": len(self.found.files),
            "commit": self.found.commit or None,
        }


@contextlib.contextmanager
def copied(
    workspace: Workspace, params: models.Training, run: str, log: Log
) -> collections.abc.Generator[Copy | None]:
    """Copy a project and yield the copy. Raises Problem.

    Yields None for a program of ours, without a snapshot, and for a function without a project.
    """
    if params.workload in ("gpt", "smoke") or not params.snapshot:
        yield None
        return
    partial = workspace.runs / f".{updates.FOLDER}-{run}-{os.getpid()}"
    folder = workspace.runs / run / updates.FOLDER

    def work() -> Copy | None:
        # It was left on a mount that died under a process of this number
        shutil.rmtree(partial, ignore_errors=True)
        try:
            found = find(workspace, params)
        except problems.NoProjectError:
            if params.function:  # it is called in the run's folder
                return None
            raise
        below, remark = _below(found, params.typed_in)
        staged = stage(workspace, found, partial, folder)
        copy = dataclasses.replace(staged, below=below, python_path=_python_path(params))
        for line in (_describe(found), remark, _describe_update(copy.update)):
            if line:
                log(line)
        return copy

    try:
        yield workspace.do(work, timeout_s=_COPY_S)
    finally:
        with contextlib.suppress(folders.WorkspaceError):  # the filesystem hangs
            workspace.do(shutil.rmtree, path=partial, ignore_errors=True)


def stage(
    workspace: Workspace, found: root.Project, partial: pathlib.Path, folder: pathlib.Path
) -> Copy:
    """Copy the new and changed files to `partial`, a new folder. Raises ParameterError."""
    states = folder.with_name(updates.STATES)
    former = states.read_text() if states.is_file() else None
    update = updates.compare(found, folder)
    copy = Copy(workspace, found, partial, folder, update, not folder.exists(), former)
    writer.write(found, partial, update.copied)
    return copy


def find(workspace: Workspace, params: models.Training) -> root.Project:
    """Find the project of a script or module. Raises ParameterError."""
    own = [*workspace.folders, workspace.runs, workspace.datasets]
    typed_in = pathlib.Path(params.typed_in) if params.typed_in else None
    script = pathlib.Path(params.script) if params.script else None
    found = root.find(script, own=own, typed_in=typed_in)
    secrets = {os.path.realpath(path) for path in (params.env_file, params.notify) if path}
    if not secrets:
        return found
    kept = tuple(name for name in found.files if str(found.root / name) not in secrets)
    return dataclasses.replace(found, files=kept)


def in_place(params: models.Training) -> Start:
    """Return the start of a program that runs in its own folder, without a copy."""
    folder = pathlib.Path(params.typed_in or pathlib.Path(params.workload).parent)
    parts: list[str] = []
    given = _python_path(params)
    if given:
        parts += [os.path.normpath(folder / part) for part in given.split(":")]
    origin = folder
    for path in (folder, *folder.parents):
        if (path / "pyproject.toml").is_file():
            origin = path
            parts += [str(one) for one in packages.importable(folder, path)]
            break
    return Start(str(folder), str(origin), ":".join(dict.fromkeys(parts)))


def _python_path(params: models.Training) -> str:
    return params.variables.get("PYTHONPATH", "")


def _below(found: root.Project, typed_in: str) -> tuple[str, str]:
    """Return the folder that the ranks start in, below the root.

    With a remark, if the command was typed outside of the project.
    """
    script = str(pathlib.PurePath(found.script).parent)
    if not typed_in:
        return script, ""
    here = pathlib.Path(os.path.realpath(typed_in))
    if here.is_relative_to(found.root) and not found.is_alone:
        return str(here.relative_to(found.root)), ""
    if here == found.root:
        return script, ""
    what = "the job starts in the script's folder"
    return script, f"{here} is not in the project {found.root}: {what}"


def _describe(found: root.Project) -> str:
    if found.is_alone:
        how = "put it and what it imports into a folder below"
        return f"copying {found.script} alone: {found.root} is never copied as a whole; {how}"
    about = f"copying {len(found.files)} files, {found.size_bytes / 2**20:.1f} MiB, of {found.root}"
    if found.left_out:
        first = found.left_out[0]
        more = f" and {len(found.left_out) - 1} more" if found.left_out[1:] else ""
        how = f"!/{first} in .ddpignore takes it in"
        about += f"; git ignores {first}{more}, so they are not copied: {how}"
    if (found.root / ".git").exists() and shutil.which("git") is None:
        about += "; git is not installed here, so .gitignore does not count"
    return about


def _describe_update(update: updates.Update) -> str:
    """Describe the files that both the run and the user changed, or ""."""
    lines: list[str] = []
    if update.written:
        stay = f"{len(update.written)} files of the project stay as the run wrote them"
        lines.append(f"{stay}, such as {update.written[0]}")
    if update.aside:
        changed = f"the run changed {len(update.aside)} files that you changed, too"
        lines.append(f"{changed}; its own are kept as {min(update.aside)}.run-1")
    return "; ".join(lines)


def _free_name(path: pathlib.Path) -> pathlib.Path:
    """Return a free name in the folder of a path."""
    number = 1
    while os.path.lexists(path.with_name(f"{path.name}.run-{number}")):
        number += 1
    return path.with_name(f"{path.name}.run-{number}")
