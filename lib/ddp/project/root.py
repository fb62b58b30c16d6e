"""The project of a user's program: which folder it is, and which of its files a run takes along.

The project is the git repository of the program, with uncommitted edits and new files; else the nearest folder with a
pyproject.toml or .ddpignore; else the folder where the command was typed, if the script lies below it; else the
script's folder. A home folder is never copied as a whole: there, as in the workspace's own folders and in a folder of
others in /tmp, the project is the script alone. Of what git ignores, files beside kept ones are taken along, such as
the data that a script in the same folder makes: readable by the user alone, hidden ones not, and up to a size.
`.ddpignore` at the project's root, in gitignore's syntax, leaves out more, and takes in with `!` what git ignores.
"""

import collections
import collections.abc
import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import os
import pathlib
import pwd
import re
import shutil
import stat
import subprocess

from ddp.host import files
from ddp.problem import ParameterError

Paths = collections.abc.Collection[pathlib.Path]
Verdict = collections.abc.Callable[[str], bool | None]  # of .ddpignore on a path, see _spec
LIMIT_BYTES = 256 * 2**20
LIMIT_FILES = 10_000
_IGNORED_BYTES = 64 * 2**20  # of files that git ignores, beside kept ones
_IGNORE = ".ddpignore"
_MARKERS = ("pyproject.toml", _IGNORE)
_IMPORTABLE = (".py", ".so")
# A folder with one of these is generated: a virtual environment (PEP 405), a cache (https://bford.info/cachedir), conda
_GENERATED = ("pyvenv.cfg", "CACHEDIR.TAG", "conda-meta")
# What nobody misses of what git ignores: hidden files and folders, logs, and what installers write
_TRIFLES = re.compile(r"(.*/)?(\.[^/]*|[^/]*(\.egg-info|\.log|\.pyc|~)|node_modules|__pycache__)/?")
_GIT_S = 60.0
_COPIES = 8  # at a time: most of a small file's way to a network filesystem is waiting
# Git's hooks set them, and git would read another repository: git-rev-parse(1), --local-env-vars
_GIT_VARIABLES = (
    "GIT_DIR",
    "GIT_WORK_TREE",
    "GIT_INDEX_FILE",
    "GIT_PREFIX",
    "GIT_COMMON_DIR",
    "GIT_OBJECT_DIRECTORY",
)


@dataclasses.dataclass(frozen=True)
class Project:
    """What is sent along with a run."""

    root: pathlib.Path
    script: str  # its path below `root`
    files: tuple[str, ...]  # the paths below `root` of regular files and links
    size_bytes: int = 0
    commit: str = ""  # with "-dirty" if tracked files differ from it; empty outside of git, and before the first commit
    private: frozenset[str] = (
        frozenset()
    )  # of `files`: git ignores them, so others need not read their copies
    left_out: tuple[
        str, ...
    ] = ()  # what git ignores and is not copied: files and folders, those with a "/" at the end
    is_alone: bool = False  # `root` is never copied: the script, without what lies beside it

    @functools.cached_property
    def _paths(self) -> frozenset[str]:
        return frozenset({*self.files, *(name.rpartition("/")[0] for name in self.files)})

    def link(self, name: str) -> str:
        """Return the target of a link's copy: relative within the project, else absolute."""
        source = self.root / name
        real = pathlib.Path(os.path.realpath(source))
        if real.is_relative_to(self.root) and real.relative_to(self.root).as_posix() in self._paths:
            return os.path.relpath(real, source.parent)
        return str(real) if real.exists() else str(source.readlink())

    def stamp(self, name: str) -> str:
        """Describe the state of a file as that of its copy: its size, time and mode, or a link's target."""
        path = self.root / name
        return f"link:{self.link(name)}" if path.is_symlink() else stamp(path)


def stamp(path: pathlib.Path) -> str:
    """Describe the state of a path: a file's size, time and mode, or a link's target; empty if it does not exist."""
    try:
        about = path.lstat()
        if stat.S_ISLNK(about.st_mode):
            return f"link:{path.readlink()}"
    except (FileNotFoundError, NotADirectoryError):
        return ""
    if not stat.S_ISREG(about.st_mode):
        return "folder" if stat.S_ISDIR(about.st_mode) else "other"
    return f"{about.st_size}:{about.st_mtime_ns}:{mode_of(about):o}"


def mode_of(about: os.stat_result) -> int:
    """Return the mode of a file's copy."""
    return about.st_mode & 0o777 | 0o400


def find(
    script: pathlib.Path | None, *, own: Paths = (), typed_in: pathlib.Path | None = None
) -> Project:
    """Find the project of a script, or with None of a module, and its files. Raises ParameterError.

    A link to a script is followed, as Python does. `own` are folders of the workspace, which are no projects;
    `typed_in` is where the command was typed, which a module needs.
    """
    here = None if typed_in is None else pathlib.Path(os.path.realpath(typed_in))
    if script is not None:
        script = pathlib.Path(os.path.realpath(script))
        if not script.is_file():
            raise _refusal(script, "is not a file")
    folder = here if script is None else script.parent
    assert folder is not None
    own = {path.resolve() for path in own}
    top = _git_top(folder)
    if top is not None and not _is_never(top, own):
        return _measured(_of_git(script, top))
    near = (
        path
        for path in (folder, *folder.parents)
        if any((path / name).is_file() for name in _MARKERS)
    )
    root = next((path for path in near if not _is_never(path, own)), None)
    if root is None:
        takes_here = here is not None and folder.is_relative_to(here) and not _is_never(here, own)
        root = here if here is not None and takes_here and not os.path.ismount(here) else folder
    is_alone = _is_never(root, own) or os.path.ismount(root)
    if is_alone and script is None:
        raise _refusal(
            root, "is never copied as a whole", "put the module into a folder below, and cd there"
        )
    files = () if is_alone else itertools.islice(_walk(root, _spec(root)), 10 * LIMIT_FILES)
    name = "" if script is None else script.relative_to(root).as_posix()
    return _measured(
        Project(root, name, (name, *files) if name else tuple(files), is_alone=is_alone)
    )


def _is_never(path: pathlib.Path, own: Paths) -> bool:
    """Return whether a folder is never copied as a whole: homes are in it, others write to it, or all runs are."""
    homes = (pathlib.Path.home(), pathlib.Path(pwd.getpwuid(os.getuid()).pw_dir))
    if path in own or any(home.resolve().is_relative_to(path) for home in homes):
        return True
    if path.stat().st_uid == os.geteuid() or any(path.is_relative_to(folder) for folder in own):
        return False
    return any(
        above.stat().st_mode & stat.S_ISVTX for above in (path, *path.parents)
    )  # as /tmp has


def copy(
    project: Project, target: pathlib.Path, names: collections.abc.Collection[str] | None = None
) -> None:
    """Copy a project's files, or some, to `target`, a new folder. Raises ParameterError, and leaves the copied behind.

    Links to files of the project stay relative, others lead to where they led: their content is not copied, since
    others may read a run's folder. Modes and times are kept, setuid bits are not.
    """
    names = project.files if names is None else names
    target.mkdir(mode=0o755)
    for folder in {str(pathlib.PurePath(name).parent) for name in names}:
        (target / folder).mkdir(parents=True, exist_ok=True)

    def copy_one(name: str) -> None:
        source = project.root / name
        with contextlib.suppress(FileNotFoundError):  # removed meanwhile
            if source.is_symlink():
                (target / name).symlink_to(project.link(name))
            elif stat.S_ISREG(source.stat().st_mode):  # else it was replaced meanwhile
                about = source.stat()
                (target / name).touch(
                    mode=0o600
                )  # nobody else reads what git ignores, not even while it is copied
                shutil.copyfile(source, target / name)
                os.utime(target / name, ns=(about.st_atime_ns, about.st_mtime_ns))
                (target / name).chmod(
                    mode_of(about) & (0o700 if name in project.private else 0o777)
                )

    try:
        with concurrent.futures.ThreadPoolExecutor(_COPIES) as pool:
            collections.deque(pool.map(copy_one, names), maxlen=0)
    except OSError as e:
        raise _refusal(
            e.filename, f"cannot be copied: {e.strerror}", _leave_out(project.root)
        ) from e
    if project.script in names and not (target / project.script).is_file():
        raise _refusal(project.script, "was removed while it was copied", "submit again")


def _of_git(script: pathlib.Path | None, top: pathlib.Path) -> Project:
    """List what git tracks or does not ignore, what it ignores beside that, and what .ddpignore takes in."""
    spec = _spec(top)
    names = _ls_files(top, "--cached", "--recurse-submodules")
    for name in _ls_files(top, "--others", "--exclude-standard"):
        path = pathlib.PurePath(name)
        if any(is_generated(top / part) for part in (path, *path.parents[:-1])):
            continue
        is_repository = name.endswith("/")  # of which git lists no files
        names += (
            [f"{name}{inner}" for inner in _walk(top / name, _spec(top / name))]
            if is_repository
            else [name]
        )
    parents = {name.rpartition("/")[0] for name in names}
    ignored = _ls_files(top, "--others", "--ignored", "--exclude-standard", "--directory")
    ignored = [name for name in ignored if not _TRIFLES.fullmatch(name)]
    beside = [
        name for name in ignored if name.rpartition("/")[0] in parents and not name.endswith("/")
    ]
    built = [name for name in beside if name.endswith(_IMPORTABLE)]
    private = _small(top, set(beside) - {*built})
    names += [*built, *private]
    if (top / _IGNORE).is_file():
        names += [name for name in _walk(top, spec) if spec(name) is True]
    name = "" if script is None else script.relative_to(top).as_posix()
    files = (*([name] if name else []), *(path for path in names if spec(path) is not False))
    commit = _git(
        top, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"
    ).stdout.strip()
    kept = {
        *files,
        *(f"{above}/" for file in files for above in pathlib.PurePosixPath(file).parents[:-1]),
    }
    left_out: list[str] = []
    for one in sorted(ignored):  # git may list a folder and what is in it
        is_listed = bool(left_out) and left_out[-1].endswith("/") and one.startswith(left_out[-1])
        if not (is_listed or one in kept or is_generated(top / one) or spec(one) is not None):
            left_out.append(one)
    return Project(
        top, name, files, commit=commit, private=frozenset(private), left_out=tuple(left_out)
    )


def _small(top: pathlib.Path, names: collections.abc.Collection[str]) -> list[str]:
    """Return the files, the smallest first, that together are not larger than they may be."""
    sizes: dict[str, int] = {}
    for name in names:
        with contextlib.suppress(OSError):
            sizes[name] = (top / name).lstat().st_size
    smallest = sorted(sizes, key=lambda name: (sizes[name], name))
    sums = itertools.accumulate(sizes[name] for name in smallest)
    return [name for name, total in zip(smallest, sums, strict=True) if total <= _IGNORED_BYTES]


def _walk(folder: pathlib.Path, spec: Verdict, below: str = "") -> collections.abc.Iterator[str]:
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
        elif spec(f"{name}/") is not False and not is_generated(path := pathlib.Path(entry.path)):
            yield from _walk(path, spec, f"{name}/")


def _spec(root: pathlib.Path) -> Verdict:
    """Return a function of a path: False if .ddpignore leaves it out, True if it takes it in, else None."""
    try:
        lines = files.read_named(root / _IGNORE).decode(errors="surrogateescape").splitlines()
    except FileNotFoundError:
        return lambda _: None
    except OSError as e:
        raise _refusal(
            root / _IGNORE, f"cannot be read: {e.strerror}", "make it readable, or remove it"
        ) from e
    except files.RefusedError as e:
        raise ParameterError("workload", f"{e}; {_IGNORE} lists what the job does not need") from e
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


def is_generated(path: pathlib.Path) -> bool:
    """Return whether a path is a cache, a virtual environment, or git's own folder."""
    return path.name in (".git", "__pycache__") or any(
        (path / marker).exists() for marker in _GENERATED
    )


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
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env=env,
            timeout=_GIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as e:
        raise _refusal(
            folder, f"git {words[0]} took over {_GIT_S:g} s", "give --no-snapshot"
        ) from e
    out, err = (os.fsdecode(stream) for stream in (done.stdout, done.stderr))
    return subprocess.CompletedProcess(argv, done.returncode, out, err)


def _refusal(
    path: pathlib.Path | str, why: str, how: str = "give the path of a script"
) -> ParameterError:
    text = str(path)
    return ParameterError(
        "workload", f"{text if text.isprintable() else ascii(text)}: {why}; {how}"
    )


def _leave_out(root: pathlib.Path) -> str:
    return f"list what the job does not need in {root / _IGNORE}, or give --no-snapshot"
