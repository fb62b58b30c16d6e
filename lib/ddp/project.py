"""The folder of a user's code, copied into the run's folder when a run is submitted: later edits change nothing.

The project is the git repository of the script, with uncommitted edits and new files; else the nearest folder with a
pyproject.toml or .ddpignore; else the script's folder. A home folder is never copied as a whole: there, as in the
workspace's own folders, the project is the script alone. `.ddpignore` at the project's root, in gitignore's syntax,
leaves out more, and takes in with `!` what git ignores.
"""

import collections
import collections.abc
import concurrent.futures
import contextlib
import dataclasses
import itertools
import os
import pathlib
import pwd
import shutil
import stat
import subprocess

from ddp.base import Log, ParameterError, Settings
from ddp.options import models
from ddp.workspace import folders

FOLDER = "code"  # in the run's folder; of later submissions of the run: code-2, code-3 ...
LIMIT_BYTES = 256 * 2**20
LIMIT_FILES = 10_000
_IGNORE = ".ddpignore"
_MARKERS = ("pyproject.toml", _IGNORE)
_IMPORTABLE = (".py", ".so")
# A folder with one of these is generated: a virtual environment (PEP 405), a cache (https://bford.info/cachedir), conda
_GENERATED = ("pyvenv.cfg", "CACHEDIR.TAG", "conda-meta")
_COPY_S = 600.0
_GIT_S = 60.0
_COPIES = 8  # at a time: most of a small file's way to a network filesystem is waiting
# Git's hooks set them, and git would read another repository: git-rev-parse(1), --local-env-vars
_GIT_VARIABLES = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_COMMON_DIR", "GIT_OBJECT_DIRECTORY")


@dataclasses.dataclass(frozen=True)
class Project:
    """What is sent along with a run."""

    root: pathlib.Path
    script: str  # its path below `root`
    files: tuple[str, ...]  # the paths below `root` of regular files and links
    size_bytes: int = 0
    commit: str = ""  # with "-dirty" if tracked files differ from it; empty outside of git, and before the first commit
    is_alone: bool = False  # `root` is never copied: the script, without what lies beside it


@dataclasses.dataclass(frozen=True)
class Copy:
    """The copy of a project, beside the run's folder until it is placed."""

    settings: Settings
    project: Project
    partial: pathlib.Path
    folder: pathlib.Path  # where it goes

    @property
    def script(self) -> str:
        """Return the script's path in the run's folder."""
        return str(self.folder / self.project.script)

    def place(self) -> None:
        """Move the copy into the run's folder, which exists by now. Raises WorkspaceError."""
        folders.call(self.settings, self.partial.rename, target=self.folder)

    def remove(self) -> None:
        """Remove the copy from the run's folder: its submission failed."""
        folders.call(self.settings, shutil.rmtree, path=self.folder, ignore_errors=True)

    def facts(self) -> dict[str, object]:
        """Describe the copy for job.json."""
        found = self.project
        about = {"folder": self.folder.name, "script": found.script, "origin": str(found.root)}
        return {**about, "files": len(found.files), "commit": found.commit or None}


@contextlib.contextmanager
def copied(settings: Settings, params: models.Training, run: str, log: Log) -> collections.abc.Generator[Copy | None]:
    """Copy the script's project and yield the copy; None for what is no script, or runs from where it lies.

    Raises:
        ParameterError: the project cannot be copied.
        WorkspaceError: the filesystem gave no answer in time.
    """
    if params.workload in ("gpt", "smoke") or not params.snapshot:
        yield None
        return
    partial = settings.runs / f".{FOLDER}-{run}-{os.getpid()}"

    def work() -> tuple[Project, pathlib.Path]:
        found = find(pathlib.Path(params.workload), own=[*settings.folders, settings.runs, settings.datasets])
        if found.is_alone:
            why = f"{found.root} is never copied as a whole; put it and what it imports into a folder below"
            log(f"copying {found.script} alone: {why}")
        else:
            log(f"copying {len(found.files)} files, {found.size_bytes / 2**20:.1f} MiB, of {found.root}")
        copy(found, partial)
        names = (FOLDER if number == 1 else f"{FOLDER}-{number}" for number in range(1, LIMIT_FILES))
        return found, next(path for name in names if not (path := settings.runs / run / name).exists())

    try:
        found, folder = folders.call(settings, work, timeout_s=_COPY_S)
        yield Copy(settings, found, partial, folder)
    finally:
        with contextlib.suppress(folders.WorkspaceError):  # the filesystem hangs
            folders.call(settings, shutil.rmtree, path=partial, ignore_errors=True)


def find(script: pathlib.Path, *, own: collections.abc.Collection[pathlib.Path] = ()) -> Project:
    """Find the project of a script, and its files.

    Args:
        script: a program; a link to one is followed, as Python does.
        own: folders of the workspace, which are no projects.

    Raises:
        ParameterError: the script is no file, git fails, a folder cannot be read, or a limit is exceeded.
    """
    script = pathlib.Path(os.path.realpath(script))
    if not script.is_file():
        raise _refusal(script, "is not a file")
    homes = (pathlib.Path.home(), pathlib.Path(pwd.getpwuid(os.getuid()).pw_dir))
    never = {path.resolve() for path in (*own, *homes)}
    top = _git_top(script.parent)
    if top is not None and top not in never:
        return _measured(_of_git(script, top))
    near = (path for path in script.parents if any((path / name).is_file() for name in _MARKERS))
    root = next((path for path in near if path not in never), script.parent)
    is_alone = root in never or os.path.ismount(root)
    files = () if is_alone else itertools.islice(_walk(root, _spec(root)), 10 * LIMIT_FILES)
    name = script.relative_to(root).as_posix()
    return _measured(Project(root, name, (name, *files), is_alone=is_alone))


def copy(project: Project, target: pathlib.Path) -> None:
    """Copy a project's files to `target`, a new folder. Raises ParameterError; what was copied is then left behind.

    Links to files of the project stay relative, others lead to where they led: their content is not copied, since
    others may read a run's folder. Modes and times are kept, setuid bits are not.
    """
    target.mkdir(mode=0o755)
    for folder in {str(pathlib.PurePath(name).parent) for name in project.files}:
        (target / folder).mkdir(parents=True, exist_ok=True)
    kept = {*project.files, *(name.rpartition("/")[0] for name in project.files)}

    def copy_one(name: str) -> None:
        source = project.root / name
        with contextlib.suppress(FileNotFoundError):  # removed meanwhile
            if source.is_symlink():
                (target / name).symlink_to(_link(project.root, source, kept))
            elif stat.S_ISREG(source.stat().st_mode):  # else it was replaced meanwhile
                shutil.copy2(source, target / name)
                (target / name).chmod(source.stat().st_mode & 0o777 | 0o400)

    try:
        with concurrent.futures.ThreadPoolExecutor(_COPIES) as pool:
            collections.deque(pool.map(copy_one, project.files), maxlen=0)
    except OSError as e:
        raise _refusal(e.filename, f"cannot be copied: {e.strerror}", _leave_out(project.root)) from e
    if not (target / project.script).is_file():
        raise _refusal(project.script, "was removed while it was copied", "submit again")


def _of_git(script: pathlib.Path, top: pathlib.Path) -> Project:
    """List what git tracks or does not ignore, what a build made beside it, and what .ddpignore takes in."""
    spec = _spec(top)
    names = _ls_files(top, "--cached", "--recurse-submodules")
    for name in _ls_files(top, "--others", "--exclude-standard"):
        path = pathlib.PurePath(name)
        if any(_is_generated(top / part) for part in (path, *path.parents[:-1])):
            continue
        is_repository = name.endswith("/")  # of which git lists no files
        names += [f"{name}{inner}" for inner in _walk(top / name, _spec(top / name))] if is_repository else [name]
    parents = {name.rpartition("/")[0] for name in names}
    ignored = _ls_files(top, "--others", "--ignored", "--exclude-standard", "--directory")
    names += [name for name in ignored if name.endswith(_IMPORTABLE) and name.rpartition("/")[0] in parents]
    if (top / _IGNORE).is_file():
        names += [name for name in _walk(top, spec) if spec(name) is True]
    name = script.relative_to(top).as_posix()
    files = (name, *(path for path in names if spec(path) is not False))
    commit = _git(top, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*").stdout.strip()
    return Project(top, name, files, commit=commit)


def _walk(
    folder: pathlib.Path, spec: collections.abc.Callable[[str], bool | None], below: str = ""
) -> collections.abc.Iterator[str]:
    """Yield the files in a folder that are neither generated nor left out. Raises ParameterError."""
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as e:
        raise _refusal(e.filename, f"cannot be read: {e.strerror}", _leave_out(folder)) from e
    for entry in entries:
        name = f"{below}{entry.name}"
        if not entry.is_dir(follow_symlinks=False):
            if spec(name) is not False:
                yield name
        elif spec(f"{name}/") is not False and not _is_generated(path := pathlib.Path(entry.path)):
            yield from _walk(path, spec, f"{name}/")


def _spec(root: pathlib.Path) -> collections.abc.Callable[[str], bool | None]:
    """Return a function of a path: False if .ddpignore leaves it out, True if it takes it in, else None."""
    try:
        lines = (root / _IGNORE).read_text(errors="surrogateescape").splitlines()
    except OSError:
        return lambda _: None
    import pathspec  # noqa: PLC0415 - few projects have such a file, and this takes as long as a submission's rest

    spec = pathspec.GitIgnoreSpec.from_lines(lines)
    verdicts = {True: False, False: True, None: None}
    return lambda name: verdicts[spec.check_file(name).include]


def _measured(project: Project) -> Project:
    """Drop what is no file, and add the size. Raises ParameterError beyond a limit."""
    sizes: dict[str, int] = {}
    for name in project.files:
        with contextlib.suppress(OSError):  # git tracks it, but it was removed
            about = (project.root / name).lstat()
            if stat.S_ISREG(about.st_mode) or stat.S_ISLNK(about.st_mode):
                sizes[name] = about.st_size
    total = sum(sizes.values())
    if total > LIMIT_BYTES or len(sizes) > LIMIT_FILES:
        limit = f"{LIMIT_BYTES >> 20} MiB" if total > LIMIT_BYTES else f"{LIMIT_FILES} files"
        most = collections.Counter[str]()
        for name, size in sizes.items():
            most[name.partition("/")[0]] += size if total > LIMIT_BYTES else 1
        why = f"has more than {limit}, most of it in {', '.join(name for name, _ in most.most_common(3))}"
        raise _refusal(project.root, why, _leave_out(project.root))
    return dataclasses.replace(project, files=tuple(sizes), size_bytes=total)


def _is_generated(path: pathlib.Path) -> bool:
    """Return whether a path is a cache, a virtual environment, or git's own folder."""
    return path.name in (".git", "__pycache__") or any((path / marker).exists() for marker in _GENERATED)


def _link(root: pathlib.Path, source: pathlib.Path, kept: set[str]) -> str:
    """Return the target of a link's copy: relative within the project, else absolute."""
    real = pathlib.Path(os.path.realpath(source))
    if real.is_relative_to(root) and real.relative_to(root).as_posix() in kept:
        return os.path.relpath(real, source.parent)
    return str(real) if real.exists() else str(source.readlink())


def _git_top(folder: pathlib.Path) -> pathlib.Path | None:
    """Find the top of a folder's work tree; None outside of one, if git ignores the folder, and without git."""
    top = next((path for path in (folder, *folder.parents) if (path / ".git").exists()), None)
    if top is None or shutil.which("git") is None:
        return None
    return None if _git(top, "check-ignore", "--quiet", str(folder)).returncode == 0 else top


def _ls_files(top: pathlib.Path, *words: str) -> list[str]:
    done = _git(top, "ls-files", "-z", *words)
    if done.returncode:
        raise _refusal(top, f"git: {done.stderr}", "repair the repository, or give --no-snapshot")
    return done.stdout.split("\0")[:-1]


def _git(folder: pathlib.Path, *words: str) -> "subprocess.CompletedProcess[str]":
    """Run git, which changes nothing, not even its index, and asks nothing."""
    env = {name: value for name, value in os.environ.items() if name not in _GIT_VARIABLES}
    env |= {"LC_ALL": "C", "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0"}
    argv = ["git", "-c", "core.fsmonitor=false", "-C", str(folder), *words]
    try:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, env=env, timeout=_GIT_S, check=False)
    except subprocess.TimeoutExpired as e:
        raise _refusal(folder, f"git {words[0]} took over {_GIT_S:g} s", "give --no-snapshot") from e
    out, err = (os.fsdecode(stream) for stream in (done.stdout, done.stderr))
    return subprocess.CompletedProcess(argv, done.returncode, out, err)


def _refusal(path: pathlib.Path | str, why: str, how: str = "give the path of a script") -> ParameterError:
    text = str(path)
    return ParameterError("workload", f"{text if text.isprintable() else ascii(text)}: {why}; {how}")


def _leave_out(root: pathlib.Path) -> str:
    return f"list what the job does not need in {root / _IGNORE}, or give --no-snapshot"
