"""The copy of a project in a run's folder, where its ranks start: later edits of the project change nothing.

A run that is submitted again keeps its copy, which is updated: files that the run wrote stay, files that changed in the
project replace the old ones. A list beside the copy holds the state of each file when it was copied, which shows what
the run has changed since.
"""

import collections.abc
import concurrent.futures
import contextlib
import dataclasses
import itertools
import json
import os
import pathlib
import shutil
import tempfile
import typing

from ddp.host import files
from ddp.options import models
from ddp.project import contents, packages, root, writer
from ddp.results.progress import Log
from ddp.workspace import folders
from ddp.workspace.folders import Workspace

FOLDER, STATES = "code", "code.json"  # in the run's folder
_COPY_S = 600.0
_THREADS = 8
_LEVELS, _PLACES = 3, 2000  # of folders in which what a copy lacks is looked for

T = typing.TypeVar("T")
States = dict[str, tuple[str, str]]  # of each file, by its path: in the project, and in the copy


@dataclasses.dataclass(frozen=True)
class Start:
    """Where the ranks of a user's program start."""

    folder: str  # absolute
    origin: str  # the project's root
    python_path: str = ""  # PYTHONPATH; empty: the job sets none


@dataclasses.dataclass(frozen=True)
class Update:
    """The difference between a project and its copy."""

    copied: dict[str, str]  # files, with their states in the project
    aside: set[str]  # those of `copied` that both the run and its user changed
    removed: tuple[str, ...]
    written: list[str]  # by the run, later than the project's files of these names
    known: States  # of the files that stay


@dataclasses.dataclass(frozen=True)
class Copy:
    """The copy of a project, beside the run's folder until it is placed."""

    workspace: Workspace
    found: root.Project
    partial: pathlib.Path
    folder: pathlib.Path  # where it goes
    update: Update
    is_new: bool
    former: str | None  # the list of the copy that is updated
    below: str = ""  # the folder that the ranks start in, below the project's root
    python_path: str = ""  # as given
    done: list[tuple[pathlib.Path, pathlib.Path]] = dataclasses.field(
        default_factory=list[tuple[pathlib.Path, pathlib.Path]]
    )

    @property
    def script(self) -> str:
        """Return the script's path in the run's folder."""
        return str(self.folder / self.found.script)

    @property
    def start(self) -> Start:
        """Where the ranks start."""
        root, place = self.found.root, os.path.normpath(self.folder / self.below)
        near = (root / self.found.script).parent if self.found.script else root / self.below
        parts = (
            [self._copied(part) for part in self.python_path.split(":")] if self.python_path else []
        )
        parts += [
            self._copied(str(path))
            for path in packages.importable(near, root)
            if not self.found.is_alone
        ]
        return Start(place, str(root), ":".join(dict.fromkeys(parts)))

    def _copied(self, part: str) -> str:
        """Return a folder of PYTHONPATH as the ranks find it."""
        root = self.found.root
        path = pathlib.Path(os.path.normpath(root / self.below / part))
        inside = next(
            (
                one
                for one in (path, pathlib.Path(os.path.realpath(path)))
                if one.is_relative_to(root)
            ),
            None,
        )
        return (
            str(path)
            if inside is None
            else os.path.normpath(self.folder / inside.relative_to(root))
        )

    def place(self) -> None:
        """Move the copy into the run's folder, which exists by now. Raises WorkspaceError."""
        self.workspace.do(self._place, timeout_s=_COPY_S)

    def _place(self) -> None:
        if self.is_new:
            self._rename(self.partial, self.folder)
        else:
            self._apply()
        pathlib.Path(self.start.folder).mkdir(parents=True, exist_ok=True)
        copied = self.update.copied
        now = _each(lambda name: root.stamp(self.folder / name), copied)
        states = self.update.known | {name: (source, now[name]) for name, source in copied.items()}
        files.replace(self.folder.with_name(STATES), json.dumps(states) + "\n")

    def _apply(self) -> None:
        """Update the copy in place; each file appears whole."""
        old = pathlib.Path(
            tempfile.mkdtemp(dir=self.partial)
        )  # for what is replaced, until the submission succeeds
        for name in self.update.removed:
            self._rename(self.folder / name, old / str(len(self.done)))
            for above in pathlib.PurePath(name).parents[:-1]:
                try:
                    (self.folder / above).rmdir()
                except OSError:  # it is not empty
                    break
        for name in self.update.copied:
            source, target = self.partial / name, self.folder / name
            if not os.path.lexists(source):  # it was removed while it was copied
                continue
            for above in reversed(pathlib.PurePath(name).parents[:-1]):
                place = self.folder / above
                if place.is_symlink() or (place.exists() and not place.is_dir()):
                    self._rename(place, _beside(place))
                place.mkdir(exist_ok=True)
            if os.path.lexists(target):
                is_of_run = name in self.update.aside or (
                    target.is_dir() and not target.is_symlink()
                )
                self._rename(target, _beside(target) if is_of_run else old / str(len(self.done)))
            self._rename(source, target)

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
        if self.former is None:
            self.folder.with_name(STATES).unlink(missing_ok=True)
        else:
            files.replace(self.folder.with_name(STATES), self.former)

    def facts(self) -> dict[str, object]:
        """Describe the copy for job.json."""
        found = self.found
        about = {"folder": self.folder.name, "script": found.script, "origin": str(found.root)}
        return {**about, "files": len(found.files), "commit": found.commit or None}


@contextlib.contextmanager
def copied(
    workspace: Workspace, params: models.Training, run: str, log: Log
) -> collections.abc.Generator[Copy | None]:
    """Copy a project and yield the copy; None for a program of ours, and without a snapshot. Raises Problem."""
    if params.workload in ("gpt", "smoke") or not params.snapshot:
        yield None
        return
    partial = workspace.runs / f".{FOLDER}-{run}-{os.getpid()}"
    folder = workspace.runs / run / FOLDER

    def work() -> Copy:
        shutil.rmtree(
            partial, ignore_errors=True
        )  # left on a mount that died under a process of this number
        found = find(workspace, params)
        below, remark = _below(found, params.typed_in)
        given = params.variables.get("PYTHONPATH", "")
        copy = dataclasses.replace(
            stage(workspace, found, partial, folder), below=below, python_path=given
        )
        for line in (_about(found), remark, _of_run(copy.update)):
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
    """Copy what a run's copy lacks of a project to `partial`, a new folder. Raises ParameterError."""
    states = folder.with_name(STATES)
    former = states.read_text() if states.is_file() else None
    copy = Copy(
        workspace, found, partial, folder, compare(found, folder), not folder.exists(), former
    )
    writer.write(found, partial, copy.update.copied)
    return copy


def find(workspace: Workspace, params: models.Training) -> root.Project:
    """Find the project of a script or module. Raises ParameterError."""
    own = [*workspace.folders, workspace.runs, workspace.datasets]
    typed_in = pathlib.Path(params.typed_in) if params.typed_in else None
    script = None if params.module else pathlib.Path(params.workload)
    found = root.find(script, own=own, typed_in=typed_in)
    secret = os.path.realpath(params.env_file) if params.env_file else ""
    return dataclasses.replace(
        found, files=tuple(name for name in found.files if str(found.root / name) != secret)
    )


def in_place(params: models.Training) -> Start:
    """Return where the ranks start if the program runs where it lies."""
    folder = pathlib.Path(params.typed_in or pathlib.Path(params.workload).parent)
    given = params.variables.get("PYTHONPATH", "")
    parts = [os.path.normpath(folder / part) for part in given.split(":")] if given else []
    root = next(
        (path for path in (folder, *folder.parents) if (path / "pyproject.toml").is_file()), None
    )
    parts += [str(path) for path in packages.importable(folder, root)] if root is not None else []
    return Start(str(folder), str(root or folder), ":".join(dict.fromkeys(parts)))


def compare(found: root.Project, folder: pathlib.Path) -> Update:
    """Compare a project with its copy in a run's folder, which need not exist.

    Where both the run and its user changed a file, the user's is copied and the run's set aside, except one that
    the run made and that is newer: an output that was fetched before.
    """
    before = read_states(folder)
    former = before or {}
    gone = [name for name in former if name not in set(found.files)]
    parents = {
        str(above)
        for name in (*found.files, *former)
        for above in pathlib.PurePath(name).parents[:-1]
    }
    links = {
        name
        for name, is_link in _each(lambda one: (folder / one).is_symlink(), parents).items()
        if is_link
    }
    removed: set[str] = set()

    def present(name: str) -> str:
        """Describe a file of the copy; what lies behind a link of the run's is not the copy's."""
        behind = links & {str(parent) for parent in pathlib.PurePath(name).parents[:-1]}
        return ("" if behind <= removed else "other") if behind else root.stamp(folder / name)

    removed |= {
        name for name, state in _each(present, gone).items() if state and state == former[name][1]
    }
    sources, nows = _each(found.stamp, found.files), _each(present, found.files)
    update = Update({}, set(), tuple(sorted(removed)), [], {})
    for name, source in sources.items():
        now, then = nows[name], former.get(name)
        if now == source:
            update.known[name] = (source, now)
        elif now and then is not None and source == then[0]:  # the run may have changed it
            update.known[name] = then
        elif (
            before is not None
            and then is None
            and name != found.script
            and _time(now) > _time(source)
        ):
            update.written.append(name)
        else:
            update.copied[name] = source
            if now and (then is None or now != then[1]):
                update.aside.add(name)
    return update


def _each(
    work: collections.abc.Callable[[str], T], names: collections.abc.Iterable[str]
) -> dict[str, T]:
    """Do work for each name, many at a time: most of a small file's way to a network filesystem is waiting."""
    given = list(names)
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        return dict(zip(given, pool.map(work, given), strict=True))


def _time(stamp: str) -> int:
    """Return when a file was changed; 0 for what is no file."""
    size, _, rest = stamp.partition(":")
    return int(rest.partition(":")[0]) if size.isdecimal() else 0


def read_states(folder: pathlib.Path) -> States | None:
    """Read the list beside a copy; None if it is missing or damaged."""
    try:
        held: object = json.loads(folder.with_name(STATES).read_text())
        if not isinstance(held, dict):
            return None
        return {
            name: (str(one[0]), str(one[1]))
            for name, one in typing.cast("dict[str, list[object]]", held).items()
        }
    except (OSError, ValueError, LookupError, TypeError):
        return None


def find_module(
    folder: pathlib.Path, record: collections.abc.Mapping[str, object], name: str
) -> tuple[str, str] | None:
    """Find a module in the project of a run: its path there, and its folder as seen from where the ranks started."""
    wanted, name = tuple(name.split(".")), name.replace(".", "/")
    about, code = (
        record.get("code"),
        folder.with_name(str(record.get("sweep") or folder.name)) / FOLDER,
    )
    start = pathlib.Path(str(record.get("workdir") or folder))
    if not isinstance(about, dict):  # it runs where it lies
        near = (start, start / "src", start.parent)
        found = (
            place
            for place in near
            if (place / f"{name}.py").is_file() or any((place / name).glob("*.py"))
        )
        return next(((str(place / name), os.path.relpath(place, start)) for place in found), None)
    above: set[str] = set()
    for path in map(pathlib.PurePosixPath, read_states(code) or {}):
        if path.suffix in (".py", ".so"):
            parts = (*path.parts[:-1], path.name.partition(".")[0])
            above |= {
                "/".join(parts[:number])
                for number in range(len(parts))
                if parts[number:][: len(wanted)] == wanted
            }
    if not above:
        return None
    nearest = min(above, key=lambda one: (len(one), one))
    origin = pathlib.Path(str(typing.cast("dict[str, object]", about).get("origin")))
    return str(origin / nearest / name), os.path.relpath(code / nearest, start)


def find_left_out(
    folder: pathlib.Path,
    record: collections.abc.Mapping[str, object],
    names: collections.abc.Sequence[str],
) -> str | None:
    """Find what a run's copy lacks, by its name: where the command was typed, above that, or three levels below."""
    about, code = (
        record.get("code"),
        folder.with_name(str(record.get("sweep") or folder.name)) / FOLDER,
    )
    start = pathlib.Path(str(record.get("workdir") or folder))
    if isinstance(about, dict):
        origin = pathlib.Path(str(typing.cast("dict[str, object]", about).get("origin")))
        start = pathlib.Path(os.path.normpath(origin / os.path.relpath(start, code)))

    def below() -> collections.abc.Iterator[pathlib.Path]:
        for place, inner, _ in os.walk(start):
            here = pathlib.Path(place)
            inner[:] = [
                one for one in inner if one[0] != "." and not contents.is_generated(here / one)
            ]
            if len(here.relative_to(start).parts) == _LEVELS:
                inner.clear()
            yield here

    places = itertools.islice(itertools.chain((start, start.parent), below()), _PLACES)
    found = (place / name for place in places for name in names)
    return next((str(path) for path in found if path.is_file() or any(path.glob("*.py"))), None)


def written_by_run(folder: pathlib.Path) -> list[str]:
    """List the files below a run's copy that the run wrote or changed, without Python's caches."""
    former = read_states(folder) or {}
    names = {path.relative_to(folder).as_posix(): path for path in walk(folder)}
    return [
        name
        for name, path in names.items()
        if name not in former or root.stamp(path) != former[name][1]
    ]


def walk(folder: pathlib.Path) -> collections.abc.Iterator[pathlib.Path]:
    """Yield the files and links below a folder, without Python's caches."""
    for place, inner, names in os.walk(folder):
        links = [name for name in inner if pathlib.Path(place, name).is_symlink()]
        inner[:] = sorted(name for name in inner if name != "__pycache__" and name not in links)
        yield from (pathlib.Path(place, name) for name in (*sorted(names), *links))


def _below(found: root.Project, typed_in: str) -> tuple[str, str]:
    """Return the folder that the ranks start in, below the root, and a remark if the command was typed elsewhere."""
    script = str(pathlib.PurePath(found.script).parent)
    if not typed_in:
        return script, ""
    here = pathlib.Path(os.path.realpath(typed_in))
    if here.is_relative_to(found.root) and not found.is_alone:
        return str(here.relative_to(found.root)), ""
    if here == found.root:
        return script, ""
    return (
        script,
        f"{here} is not in the project {found.root}: the job starts in the script's folder",
    )


def _about(found: root.Project) -> str:
    if found.is_alone:
        why = f"{found.root} is never copied as a whole; put it and what it imports into a folder below"
        return f"copying {found.script} alone: {why}"
    about = f"copying {len(found.files)} files, {found.size_bytes / 2**20:.1f} MiB, of {found.root}"
    if found.left_out:
        more = f" and {len(found.left_out) - 1} more" if found.left_out[1:] else ""
        how = f"!/{found.left_out[0]} in .ddpignore takes it in"
        about += f"; git ignores {found.left_out[0]}{more}, so they are not copied: {how}"
    has_no_git = (found.root / ".git").exists() and shutil.which("git") is None
    return about + (
        "; git is not installed here, so .gitignore does not count" if has_no_git else ""
    )


def _of_run(update: Update) -> str:
    """Describe the files at which the run's and the user's changes meet; empty without any."""
    lines: list[str] = []
    if update.written:
        lines.append(
            f"{len(update.written)} files of the project stay as the run wrote them, such as {update.written[0]}"
        )
    if update.aside:
        name = min(update.aside)
        lines.append(
            f"the run changed {len(update.aside)} files that you changed, too; its own are kept as {name}.run-1"
        )
    return "; ".join(lines)


def _beside(path: pathlib.Path) -> pathlib.Path:
    """Return a free name for what the run wrote, so that nothing of it is lost."""
    numbers = (path.with_name(f"{path.name}.run-{number}") for number in itertools.count(1))
    return next(place for place in numbers if not os.path.lexists(place))
