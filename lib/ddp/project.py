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
import os
import pathlib
import pwd
import shutil
import stat
import subprocess

from ddp.base import Log, ParameterError, Settings, one_line
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


class ProjectError(Exception):
    """The project cannot be copied. `str()` is one line: what failed, why, what to type."""

    def __init__(self, root: pathlib.Path | str, why: str, how: str) -> None:
        text = str(root)
        super().__init__(one_line(f"{text if text.isprintable() else ascii(text)}: {why}; {how}"))


@dataclasses.dataclass(frozen=True)
class Project:
    """What is sent along with a run."""

    root: pathlib.Path
    script: str  # its path below `root`
    files: tuple[str, ...]  # the paths below `root` of regular files and links
    size_bytes: int = 0
    commit: str | None = None  # None outside of git, and before the first commit
    is_dirty: bool = False  # the work tree differs from the commit, new files included
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
        return {**about, "files": len(found.files), "commit": found.commit, "dirty": found.is_dirty}


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
        log(_announcement(found))
        copy(found, partial)
        names = (FOLDER if number == 1 else f"{FOLDER}-{number}" for number in range(1, LIMIT_FILES))
        return found, next(path for name in names if not (path := settings.runs / run / name).exists())

    try:
        found, folder = folders.call(settings, work, timeout_s=_COPY_S)
        yield Copy(settings, found, partial, folder)
    except ProjectError as e:
        raise ParameterError("workload", str(e)) from e
    finally:
        with contextlib.suppress(folders.WorkspaceError):  # the filesystem hangs
            folders.call(settings, shutil.rmtree, path=partial, ignore_errors=True)


def find(script: pathlib.Path, *, own: collections.abc.Collection[pathlib.Path] = ()) -> Project:
    """Find the project of a script, and its files.

    Args:
        script: a program; a link to one is followed, as Python does.
        own: folders of the workspace, which are no projects.

    Raises:
        ProjectError: the script is no file, git fails, a folder cannot be read, or a limit is exceeded.
    """
    try:
        script = script.resolve(strict=True)
    except (OSError, RuntimeError) as e:
        raise ProjectError(script, _reason(e), "give the path of a script") from e
    if not script.is_file():
        raise ProjectError(script, "is not a file", "give the path of a script")
    never = {*(path.resolve() for path in own), *_homes()}
    top = _git_top(script.parent)
    if top is not None and top not in never:
        return _measured(_of_git(script, top))
    near = (path for path in script.parents if any((path / name).is_file() for name in _MARKERS))
    root = next((path for path in near if path not in never), script.parent)
    is_alone = root in never or os.path.ismount(root)
    files = [] if is_alone else _walk(root, _spec(root))
    name = script.relative_to(root).as_posix()
    return _measured(Project(root, name, (name, *files), is_alone=is_alone))


def copy(project: Project, target: pathlib.Path) -> None:
    """Copy a project's files to `target`, a new folder. Raises ProjectError; what was copied is then left behind.

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
        raise ProjectError(str(e.filename), f"cannot be copied: {_reason(e)}", _how(project.root)) from e
    if not (target / project.script).is_file():
        raise ProjectError(project.script, "was removed while it was copied", "submit again")


def _of_git(script: pathlib.Path, top: pathlib.Path) -> Project:
    """List what git tracks or does not ignore, what a build made beside it, and what .ddpignore takes in."""
    spec = _spec(top)
    tracked = _ls_files(top, "--cached", "--recurse-submodules")
    new = [name for name in _ls_files(top, "--others", "--exclude-standard") if not _is_generated(top, name)]
    for inner in [name for name in new if name.endswith("/")]:  # a repository inside, of which git lists no files
        new.remove(inner)
        new += [f"{inner}{name}" for name in _walk(top / inner, _spec(top / inner))]
    names = [*tracked, *new]
    parents = {name.rpartition("/")[0] for name in names}
    ignored = _ls_files(top, "--others", "--ignored", "--exclude-standard", "--directory")
    names += [name for name in ignored if name.endswith(_IMPORTABLE) and name.rpartition("/")[0] in parents]
    if (top / _IGNORE).is_file():
        names += [name for name in _walk(top, spec) if spec(name) is True]
    name = script.relative_to(top).as_posix()
    files = (name, *(path for path in names if spec(path) is not False))
    commit = _git(top, "rev-parse", "--verify", "--quiet", "HEAD", may_fail=True).strip() or None
    is_dirty = bool(new) or bool(_git(top, "status", "--porcelain", "--untracked-files=no"))
    return Project(top, name, files, commit=commit, is_dirty=is_dirty)


def _walk(root: pathlib.Path, spec: collections.abc.Callable[[str], bool | None]) -> list[str]:
    """List the files below a folder that are neither generated nor left out. Raises ProjectError."""
    files: list[str] = []

    def refuse(e: OSError) -> None:
        raise ProjectError(str(e.filename), f"cannot be read: {_reason(e)}", _how(root)) from e

    for folder, inner, names in os.walk(root, onerror=refuse):
        below = pathlib.Path(folder).relative_to(root)
        links = [name for name in inner if pathlib.Path(folder, name).is_symlink()]
        paths = {name: (below / name).as_posix() for name in (*inner, *names)}
        files += [paths[name] for name in (*names, *links) if spec(paths[name]) is not False]
        wanted = [name for name in inner if name not in links and spec(f"{paths[name]}/") is not False]
        inner[:] = [name for name in wanted if not _is_generated(root, paths[name])]
        if len(files) > 10 * LIMIT_FILES:
            break  # it is refused for its number of files
    return files


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
    """Drop what is no file, and add the size. Raises ProjectError beyond a limit."""
    kept: list[str] = []
    sizes, counts = collections.Counter[str](), collections.Counter[str]()
    for name in dict.fromkeys(project.files):
        with contextlib.suppress(OSError):  # git tracks it, but it was removed
            about = (project.root / name).lstat()
            if stat.S_ISREG(about.st_mode) or stat.S_ISLNK(about.st_mode):
                kept.append(name)
                sizes[name.partition("/")[0]] += about.st_size
                counts[name.partition("/")[0]] += 1
    size = sum(sizes.values())
    if size > LIMIT_BYTES or len(kept) > LIMIT_FILES:
        limit = f"{LIMIT_BYTES >> 20} MiB" if size > LIMIT_BYTES else f"{LIMIT_FILES} files"
        most = (sizes if size > LIMIT_BYTES else counts).most_common(3)
        where = ", ".join(f"{top} ({counts[top]} files, {sizes[top] >> 20} MiB)" for top, _ in most)
        raise ProjectError(project.root, f"has more than {limit}, most of it in {where}", _how(project.root))
    return dataclasses.replace(project, files=tuple(kept), size_bytes=size)


def _is_generated(root: pathlib.Path, name: str) -> bool:
    """Return whether a path is, or is in, a cache, a virtual environment, or git's own folder."""
    parts = pathlib.PurePath(name).parts
    above = [root.joinpath(*parts[: depth + 1]) for depth in range(len(parts))]
    own = any(path.name in (".git", "__pycache__") for path in above)
    return own or any((path / marker).exists() for path in above for marker in _GENERATED)


def _link(root: pathlib.Path, source: pathlib.Path, kept: set[str]) -> str:
    """Return the target of a link's copy: relative within the project, else absolute."""
    real = pathlib.Path(os.path.realpath(source))
    if real.is_relative_to(root) and real.relative_to(root).as_posix() in kept:
        return os.path.relpath(real, source.parent)
    return str(real) if real.exists() else str(source.readlink())


def _git_top(folder: pathlib.Path) -> pathlib.Path | None:
    """Find the top of a folder's work tree; None outside of one, if git ignores the folder, and without git."""
    try:
        done = _run_git(folder, "rev-parse", "--show-toplevel")
    except FileNotFoundError:
        return None
    if "dubious ownership" in done.stderr:
        how = f"trust it with: git config --global --add safe.directory {folder}"
        raise ProjectError(folder, "git does not read what another account owns", f"{how}; or give --no-snapshot")
    if "not a git repository" in done.stderr or "must be run in a work tree" in done.stderr:
        return None
    top = pathlib.Path(_checked(folder, done).removesuffix("\n")).resolve()
    return None if _run_git(folder, "check-ignore", "--quiet", str(folder)).returncode == 0 else top


def _ls_files(top: pathlib.Path, *words: str) -> list[str]:
    return _git(top, "ls-files", "-z", *words).split("\0")[:-1]


def _git(folder: pathlib.Path, *words: str, may_fail: bool = False) -> str:
    done = _run_git(folder, *words)
    return done.stdout if may_fail else _checked(folder, done)


def _checked(folder: pathlib.Path, done: "subprocess.CompletedProcess[str]") -> str:
    if done.returncode:
        raise ProjectError(folder, f"git: {done.stderr}", "repair the repository, or give --no-snapshot")
    return done.stdout


def _run_git(folder: pathlib.Path, *words: str) -> "subprocess.CompletedProcess[str]":
    """Run git, which changes nothing, not even its index, and asks nothing."""
    env = {name: value for name, value in os.environ.items() if name not in _GIT_VARIABLES}
    env |= {"LC_ALL": "C", "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0"}
    argv = ["git", "-c", "core.fsmonitor=false", "-C", str(folder), *words]
    try:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, env=env, timeout=_GIT_S, check=False)
    except subprocess.TimeoutExpired as e:
        raise ProjectError(folder, f"git {words[0]} took over {_GIT_S:g} s", "give --no-snapshot") from e
    out, err = (os.fsdecode(stream) for stream in (done.stdout, done.stderr))
    return subprocess.CompletedProcess(argv, done.returncode, out, err)


def _homes() -> set[pathlib.Path]:
    found = {os.environ.get("HOME", "")}
    with contextlib.suppress(KeyError):  # an account without an entry
        found.add(pwd.getpwuid(os.getuid()).pw_dir)
    return {pathlib.Path(home).resolve() for home in found if home}


def _announcement(found: Project) -> str:
    if found.is_alone:
        why = f"{found.root} is never copied as a whole"
        return f"copying {found.script} alone: {why}; put it and what it imports into a folder below"
    return f"copying {len(found.files)} files, {found.size_bytes / 2**20:.1f} MiB, of {found.root}"


def _how(root: pathlib.Path) -> str:
    return f"list what the job does not need in {root / _IGNORE}, or give --no-snapshot"


def _reason(e: BaseException) -> str:
    return (e.strerror if isinstance(e, OSError) else None) or str(e)
