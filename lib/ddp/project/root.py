"""The project of a user's program: its folder, and the files that a run takes along.

The first of these is the project:

1. the git repository of the program
2. the nearest folder with a pyproject.toml or .ddpignore
3. the folder that the command was typed in, if the script lies below it
4. the script's folder

A home folder is never copied as a whole. There, in the workspace's own folders and in other
people's folders in /tmp, the project is the script alone.
"""

import collections
import collections.abc
import contextlib
import dataclasses
import functools
import itertools
import os
import pathlib
import pwd
import stat

from ddp.project import contents, git, problems

Paths = collections.abc.Collection[pathlib.Path]
LIMIT_BYTES = 256 * 2**20
LIMIT_FILES = 10_000
_MARKERS = ("pyproject.toml", problems.IGNORE_FILE)


@dataclasses.dataclass(frozen=True)
class Project:
    """The files that a run takes along."""

    root: pathlib.Path
    script: str  # its path below `root`; "" for a module
    files: tuple[str, ...]  # the paths below `root` of regular files and links
    size_bytes: int = 0
    # With "-dirty" if tracked files differ from it; "" outside of git, and before the first commit
    commit: str = ""
    private: frozenset[str] = frozenset()  # of `files`: only the user may read their copies
    left_out: tuple[str, ...] = ()  # what git ignores and is not copied; folders end in "/"
    is_alone: bool = False  # `root` is never copied as a whole, only the script

    @functools.cached_property
    def _paths(self) -> frozenset[str]:
        folders = (name.rpartition("/")[0] for name in self.files)
        return frozenset([*self.files, *folders])

    def link(self, name: str) -> str:
        """Return the target of a link's copy: relative within the project, absolute otherwise."""
        source = self.root / name
        real = pathlib.Path(os.path.realpath(source))
        is_inside = real.is_relative_to(self.root)
        if is_inside and real.relative_to(self.root).as_posix() in self._paths:
            return os.path.relpath(real, source.parent)
        return str(real) if real.exists() else str(source.readlink())

    def stamp(self, name: str) -> str:
        """Describe a file as its copy will be: size, time and mode, or a link's target."""
        path = self.root / name
        return f"link:{self.link(name)}" if path.is_symlink() else stamp(path)


def stamp(path: pathlib.Path) -> str:
    """Describe a file by its size, time and mode, and a link by its target; "" if there is none."""
    try:
        about = path.lstat()
        if stat.S_ISLNK(about.st_mode):
            return f"link:{path.readlink()}"
    except (FileNotFoundError, NotADirectoryError):
        return ""
    if stat.S_ISREG(about.st_mode):
        return f"{about.st_size}:{about.st_mtime_ns}:{mode_of(about):o}"
    return "folder" if stat.S_ISDIR(about.st_mode) else "other"


def mode_of(about: os.stat_result) -> int:
    """Return the mode of a file's copy."""
    return about.st_mode & 0o777 | 0o400


def find(
    script: pathlib.Path | None, *, own: Paths = (), typed_in: pathlib.Path | None = None
) -> Project:
    """Find the project of a script or, without one, of a module. Raises ParameterError.

    A link to a script is followed, as Python does. `own` are folders of the workspace, which are
    not projects; `typed_in` is the folder that the command was typed in. A module needs it.
    """
    here = None if typed_in is None else pathlib.Path(os.path.realpath(typed_in))
    if script is not None:
        script = pathlib.Path(os.path.realpath(script))
    folder = _folder_of(script, here)
    own = {path.resolve() for path in own}

    top = git.find_top(folder)
    if top is not None and not _is_never(top, own):
        return _of_repository(top, script)
    root = _marked(folder, own) or _unmarked(folder, here, own)
    if not _is_never(root, own) and not os.path.ismount(root):
        return _of_folder(root, script)
    if script is None:
        how = "put the program into a folder below, and cd there"
        text = problems.describe(root, "is never copied as a whole", how)
        raise problems.NoProjectError("workload", text)
    name = _below(root, script)
    return _measured(Project(root, name, (name,), is_alone=True))


def _folder_of(script: pathlib.Path | None, here: pathlib.Path | None) -> pathlib.Path:
    """Return the folder that the search begins in. Raises ParameterError without such a file."""
    if script is None:
        assert here is not None
        return here
    if not script.is_file():
        raise problems.of_path(script, "is not a file")
    return script.parent


def _of_repository(top: pathlib.Path, script: pathlib.Path | None) -> Project:
    found = contents.in_repository(top)
    name = _below(top, script)
    project = Project(
        top,
        name,
        tuple([name, *found.files] if name else found.files),
        commit=git.describe_commit(top),
        private=found.private,
        left_out=tuple(one for one in found.left_out if one != name),
    )
    return _measured(project)


def _of_folder(root: pathlib.Path, script: pathlib.Path | None) -> Project:
    # One may have typed this at the top of a disk: reading ends at ten times the limit
    found = list(itertools.islice(contents.in_folder(root), 10 * LIMIT_FILES))
    name = _below(root, script)
    return _measured(Project(root, name, tuple([name, *found] if name else found)))


def _below(root: pathlib.Path, script: pathlib.Path | None) -> str:
    return "" if script is None else script.relative_to(root).as_posix()


def _marked(folder: pathlib.Path, own: Paths) -> pathlib.Path | None:
    """Return the nearest folder that is marked as a project's root."""
    for path in (folder, *folder.parents):
        has_marker = any((path / name).is_file() for name in _MARKERS)
        if has_marker and not _is_never(path, own):
            return path
    return None


def _unmarked(folder: pathlib.Path, here: pathlib.Path | None, own: Paths) -> pathlib.Path:
    """Return the folder of the command if it is above `folder` and may be copied, or `folder`."""
    if here is None or not folder.is_relative_to(here):
        return folder
    if _is_never(here, own) or os.path.ismount(here):
        return folder
    return here


def _is_never(path: pathlib.Path, own: Paths) -> bool:
    """Return whether a folder holds homes or all runs, or others write to it as to /tmp."""
    homes = (pathlib.Path.home(), pathlib.Path(pwd.getpwuid(os.getuid()).pw_dir))
    if path in own or any(home.resolve().is_relative_to(path) for home in homes):
        return True
    if path.stat().st_uid == os.geteuid():
        return False
    if any(path.is_relative_to(folder) for folder in own):
        return False
    return any(above.stat().st_mode & stat.S_ISVTX for above in (path, *path.parents))


def _measured(project: Project) -> Project:
    """Keep only files and links, and add up their sizes. Raises ParameterError beyond a limit."""
    sizes: dict[str, int] = {}
    for name in project.files:
        with contextlib.suppress(OSError):  # git tracks it, but it was removed
            about = (project.root / name).lstat()
            if stat.S_ISREG(about.st_mode) or stat.S_ISLNK(about.st_mode):
                sizes[name] = about.st_size
    total = sum(sizes.values())
    if total > LIMIT_BYTES:
        raise _too_large(project.root, f"{LIMIT_BYTES >> 20} MiB", sizes)
    if len(sizes) > LIMIT_FILES:
        raise _too_large(project.root, f"{LIMIT_FILES} files", dict.fromkeys(sizes, 1))
    return dataclasses.replace(project, files=tuple(sizes), size_bytes=total)


def _too_large(root: pathlib.Path, limit: str, weights: dict[str, int]) -> Exception:
    """Name the folders that hold the most."""
    most = collections.Counter[str]()
    for name, weight in weights.items():
        most[name.partition("/")[0]] += weight
    names = ", ".join(name for name, _ in most.most_common(3))
    return problems.of_path(
        root, f"has more than {limit}, most of it in {names}", problems.send_less(root)
    )
