"""The files of a project that a run takes along.

In a git repository: tracked files with uncommitted edits, and new files. Files that git ignores are
taken along, too, if they are in the same folders, such as data that a script makes there, up to a
size and without hidden ones; only the user can read the copies. Elsewhere: all files that are not
generated. `.ddpignore` at the root, in gitignore's syntax, leaves out more, and takes in ignored
files with `!`.
"""

import collections.abc
import contextlib
import dataclasses
import os
import pathlib
import re

from ddp.host import files
from ddp.problem import ParameterError
from ddp.project import git, problems

# What .ddpignore says about a path: False leaves it out, True takes it in, None: no rule matches
Verdict = collections.abc.Callable[[str], bool | None]

IGNORED_BYTES = 64 * 2**20  # of files that git ignores, in the folders of kept ones
_IMPORTABLE = (".py", ".so")
# A folder with one of these is generated: a virtual environment (PEP 405), a cache
# (https://bford.info/cachedir), conda
_GENERATED = ("pyvenv.cfg", "CACHEDIR.TAG", "conda-meta")
# Ignored files that a run never needs: hidden ones, logs, and traces of installers
_TRIFLES = re.compile(r"(.*/)?(\.[^/]*|[^/]*(\.egg-info|\.log|\.pyc|~)|node_modules|__pycache__)/?")


@dataclasses.dataclass(frozen=True)
class Contents:
    """The files of a project, by their paths below its root."""

    files: list[str]
    private: frozenset[str] = frozenset()  # git ignores them, so others need not read their copies
    left_out: tuple[str, ...] = ()  # what git ignores and is not copied; folders end in "/"


def in_folder(root: pathlib.Path) -> collections.abc.Iterator[str]:
    """Yield the files of a folder outside of git. Raises ParameterError."""
    return _walk(root, _read_ignore(root))


def in_repository(top: pathlib.Path) -> Contents:
    """List the files of a repository, with some that git ignores. Raises ParameterError."""
    verdict = _read_ignore(top)
    kept = [*git.list_tracked(top), *_new_files(top)]
    ignored = [name for name in git.list_ignored(top) if not _TRIFLES.fullmatch(name)]
    beside = _files_beside(kept, ignored)
    built = [name for name in beside if name.endswith(_IMPORTABLE)]
    private = _smallest(top, set(beside) - set(built))

    found = [*kept, *built, *private]
    if (top / problems.IGNORE_FILE).is_file():
        found += [name for name in _walk(top, verdict) if verdict(name) is True]
    found = [name for name in found if verdict(name) is not False]
    # What has a rule in .ddpignore was left out on purpose
    unruled = [name for name in ignored if verdict(name) is None]
    left_out = _left_out(top, unruled, found)
    return Contents(found, frozenset(private), tuple(left_out))


def is_generated(path: pathlib.Path) -> bool:
    """Return whether a path is a cache, a virtual environment, or git's own folder."""
    if path.name in (".git", "__pycache__"):
        return True
    return any((path / marker).exists() for marker in _GENERATED)


def _new_files(top: pathlib.Path) -> collections.abc.Iterator[str]:
    """Yield the files that git does not track yet, and the files of nested repositories."""
    for name in git.list_untracked(top):
        path = pathlib.PurePath(name)
        if any(is_generated(top / part) for part in (path, *path.parents[:-1])):
            continue
        if not name.endswith("/"):
            yield name
            continue
        for inner in in_folder(top / name):  # of a repository git lists no files
            yield f"{name}{inner}"


def _files_beside(kept: list[str], ignored: list[str]) -> list[str]:
    """List the ignored files in the folders of kept files."""
    folders = {name.rpartition("/")[0] for name in kept}
    return [
        name for name in ignored if not name.endswith("/") and name.rpartition("/")[0] in folders
    ]


def _smallest(top: pathlib.Path, names: set[str]) -> list[str]:
    """List files, the smallest first, up to IGNORED_BYTES in total."""
    sizes: dict[str, int] = {}
    for name in names:
        with contextlib.suppress(OSError):
            sizes[name] = (top / name).lstat().st_size
    taken: list[str] = []
    total = 0
    for name in sorted(sizes, key=lambda name: (sizes[name], name)):
        total += sizes[name]
        if total > IGNORED_BYTES:
            break
        taken.append(name)
    return taken


def _left_out(top: pathlib.Path, ignored: list[str], taken: list[str]) -> list[str]:
    """List the ignored files and folders that stay behind, without generated ones."""
    kept = set(taken)
    for name in taken:
        kept |= {f"{above}/" for above in pathlib.PurePosixPath(name).parents[:-1]}
    left_out: list[str] = []
    for name in sorted(ignored):
        folder = left_out[-1] if left_out and left_out[-1].endswith("/") else None
        if folder is not None and name.startswith(folder):
            continue
        if name not in kept and not is_generated(top / name):
            left_out.append(name)
    return left_out


def _walk(folder: pathlib.Path, verdict: Verdict, below: str = "") -> collections.abc.Iterator[str]:
    """Yield the files that are neither generated nor left out. Raises ParameterError."""
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as e:
        raise problems.of_path(
            e.filename, f"cannot be read: {e.strerror}", problems.send_less(folder)
        ) from e
    for entry in entries:
        name = f"{below}{entry.name}"
        if not entry.is_dir(follow_symlinks=False):
            if verdict(name) is not False:
                yield name
            continue
        path = pathlib.Path(entry.path)
        if verdict(f"{name}/") is not False and not is_generated(path):
            yield from _walk(path, verdict, f"{name}/")


def _read_ignore(root: pathlib.Path) -> Verdict:
    """Read .ddpignore. Raises ParameterError."""
    path = root / problems.IGNORE_FILE
    try:
        text = files.read_named(path).decode(errors="surrogateescape")
    except FileNotFoundError:
        return lambda _: None
    except OSError as e:
        how = "make it readable, or remove it"
        raise problems.of_path(path, f"cannot be read: {e.strerror}", how) from e
    except files.RefusedError as e:
        how = f"{problems.IGNORE_FILE} lists what the job does not need"
        raise ParameterError("workload", f"{e}; {how}") from e

    import pathspec  # noqa: PLC0415 - it takes as long as the rest of a submission; few need it

    spec = pathspec.GitIgnoreSpec.from_lines(text.splitlines())

    def verdict(name: str) -> bool | None:
        is_ignored = spec.check_file(name).include
        return None if is_ignored is None else not is_ignored

    return verdict
