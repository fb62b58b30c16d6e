"""Keep the code of a run: copy the folder of its script when the run is submitted.

In a git work tree: the tracked files as they are in the work tree, with uncommitted edits, and new files that git does
not ignore, from the repository's top, since a script may import from there; including submodules and repositories in
it. Elsewhere, and if git ignores the script itself: the script's folder. Paths relative to the script and `sys.path[0]`
stay valid. `.ddpignore`, with gitignore's syntax, excludes more, in any folder.

Never copied: `.git`, sockets, devices and FIFOs; if untracked, `__pycache__`, virtual environments and caches; hidden
files of a home folder, where keys are.

A link to a kept file is kept as a relative link. Any other link keeps its absolute target and is named in
`Snapshot.outside`. Its content is not copied: others may read a run's folder, the target may be a whole dataset, and in
another account's repository it may be a private key of the reader. It is not refused: `data -> /mnt/shared/datasets/x`
is usual, and the job reads it under the same account as before.
"""

import collections
import collections.abc
import concurrent.futures
import contextlib
import dataclasses
import errno
import hashlib
import os
import pathlib
import pwd
import shutil
import stat
import subprocess
import tempfile
import time
import typing

if typing.TYPE_CHECKING:
    import pathspec

LIMIT_BYTES = 256 * 2**20
LIMIT_FILES = 10_000

_IGNORE_FILE = ".ddpignore"
_LEFT_OUT = {".git", "__pycache__"}
# A folder with one of these is generated: a virtual environment (PEP 405), a cache (https://bford.info/cachedir), a
# conda environment.
_MARKERS = ("pyvenv.cfg", "CACHEDIR.TAG", "conda-meta")
_GIT_LIMIT_S = 60.0
_LOOK_S = 1.0  # how long to go on beyond a limit, to name the largest folders
_COPIES = 8  # at a time: on a network filesystem copying a small file is mostly latency
_TRIES = 3  # for a file that changes while it is copied
_BLOCK = 2**20
_KINDS = (stat.S_IFREG, stat.S_IFLNK, stat.S_IFDIR)
_REMOVED = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO, errno.ESRCH)  # or replaced
_GITLINK = b"160000"  # the mode of a submodule's entry, gitglossary(7)
# Set by git hooks; they would make git read another repository: git-rev-parse(1), --local-env-vars.
_GIT_VARIABLES = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_COMMON_DIR", "GIT_OBJECT_DIRECTORY")


class SnapshotError(Exception):
    """The code cannot be kept. `str()` is one line: what failed, why, what to type."""


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """The kept code of a run."""

    root: pathlib.Path
    script: str  # its path below `root`
    origin: pathlib.Path  # the folder that was copied
    num_files: int  # links count, folders do not
    size_bytes: int
    commit: str | None  # None outside of git, and before the first commit
    is_dirty: bool  # the work tree differs from the commit, new files included
    sha256: str  # of all names, kinds, executable bits and contents: equal for equal code
    outside: tuple[str, ...] = ()  # links to files that are not kept
    changed: tuple[str, ...] = ()  # files that changed or were removed during the copy

    @property
    def path(self) -> pathlib.Path:
        """The kept script."""
        return self.root / self.script


def take(
    script: pathlib.Path,
    destination: pathlib.Path,
    *,
    limit_bytes: int = LIMIT_BYTES,
    limit_files: int = LIMIT_FILES,
    leave_out: collections.abc.Iterable[pathlib.Path] = (),
    copied: collections.abc.Callable[[int, int], None] = lambda _done, _total: None,
) -> Snapshot:
    """Copy the folder of `script` to `destination`, which appears whole or not at all.

    Args:
        script: the program; a link to one is followed, as Python does.
        destination: a new folder in the run's directory, which is itself left out.
        limit_bytes: of all files together.
        limit_files: of files and folders.
        leave_out: further folders without code, such as the workspace's runs and datasets.
        copied: is called with the number of copied files and of all, whenever it changes.

    Raises:
        SnapshotError: the script or a file is unreadable, git fails, a limit is exceeded, or `destination` exists.
    """
    try:
        script = script.resolve(strict=True)
    except (OSError, RuntimeError) as e:
        raise SnapshotError(f"{_shown(script)}: {_reason(e)}; give the path of a script") from e
    if not script.is_file():
        raise SnapshotError(f"{_shown(script)} is not a file; give the path of a script")
    if os.path.lexists(destination):
        raise SnapshotError(f"{destination} exists already; give the run another name")
    destination = destination.resolve()
    others = (path.resolve() for path in (destination, destination.parent, *leave_out))
    tree = _tree(script, frozenset(path for path in others if not script.is_relative_to(path)))
    survey = _survey(tree, limit_bytes=limit_bytes, limit_files=limit_files)
    try:
        partial = pathlib.Path(tempfile.mkdtemp(prefix=f".{destination.name}.", dir=destination.parent))
    except OSError as e:
        raise SnapshotError(f"{destination.parent}: {_reason(e)}; the code of the run is kept there") from e
    try:
        kept = _copy(tree.root, survey, partial, limit_bytes=limit_bytes, copied=copied)
        name = script.relative_to(tree.root).as_posix()
        if name not in kept.digests:
            raise SnapshotError(f"{script} was removed or replaced while it was copied; submit again")
        partial.chmod(0o777 & ~_umask())
        partial.rename(destination)
    except OSError as e:
        what = "exists already" if e.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR) else _reason(e)
        raise SnapshotError(f"{destination}: {what}; the code of the run is kept there") from e
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # already renamed on success
    return Snapshot(
        root=destination,
        script=name,
        origin=tree.root,
        num_files=sum(not line.startswith(b"d") for line in kept.digests.values()),
        size_bytes=kept.size_bytes,
        commit=tree.commit,
        is_dirty=tree.is_dirty,
        sha256=_listing_digest(kept.digests),
        outside=tuple(sorted(kept.outside)),
        changed=tuple(sorted(kept.changed)),
    )


# --- selection -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Tree:
    """A folder to copy, and the relative names in it, in the order of the search."""

    root: pathlib.Path
    names: collections.abc.Iterable[str]
    unreadable: list[str]  # grows while `names` is iterated
    commit: str | None = None
    is_dirty: bool = False


class _Filter:
    """The names excluded from a folder."""

    def __init__(self, root: pathlib.Path, skipped: frozenset[pathlib.Path], ignore_files: tuple[str, ...]) -> None:
        self.root = root
        self._skipped = {path.relative_to(root).as_posix() for path in skipped if path.is_relative_to(root)}
        self._is_home = str(root) in _homes()
        self._ignore_files = ignore_files
        self._specs: dict[str, pathspec.GitIgnoreSpec | None] = {}
        self._ignored: dict[str, bool] = {"": False}
        self._generated: dict[str, bool] = {"": False}

    def is_ignored(self, name: str, *, is_folder: bool) -> bool:
        """Whether `.ddpignore` excludes a name, or it is one of the folders without code."""
        if is_folder and (known := self._ignored.get(name)) is not None:
            return known
        parent = name.rpartition("/")[0]
        found = self.is_ignored(parent, is_folder=True) or (name in self._skipped) or self._matches(name, is_folder)
        if is_folder:
            self._ignored[name] = found
        return found

    def is_generated(self, name: str, *, is_folder: bool) -> bool:
        """Whether an untracked name is, or is inside, something generated or private."""
        if is_folder and (known := self._generated.get(name)) is not None:
            return known
        parent, _, last = name.rpartition("/")
        is_hidden = self._is_home and not parent and last.startswith(".") and last != _IGNORE_FILE
        found = is_hidden or last in _LEFT_OUT or self.is_generated(parent, is_folder=True)
        if is_folder and not found:
            found = any(os.path.lexists(self.root / name / marker) for marker in _MARKERS)
        if is_folder:
            self._generated[name] = found
        return found

    def _matches(self, name: str, is_folder: bool) -> bool:
        """Apply the nearest ignore file with a pattern for a name."""
        folder, below = name, "/" if is_folder else ""
        while folder:
            folder, _, part = folder.rpartition("/")
            below = f"{part}{below}" if below in ("", "/") else f"{part}/{below}"
            spec = self._spec(folder)
            verdict = spec.check_file(below).include if spec is not None else None
            if verdict is not None:
                return verdict
        return False

    def _spec(self, folder: str) -> "pathspec.GitIgnoreSpec | None":
        if folder not in self._specs:
            lines: list[str] = []
            for name in self._ignore_files:
                path = self.root / folder / name
                try:
                    lines += path.read_text(errors="surrogateescape").splitlines()
                except OSError as e:
                    if e.errno in (*_REMOVED, errno.EISDIR) or not os.access(path.parent, os.X_OK):
                        continue  # no such file, or its folder is reported as unreadable
                    raise SnapshotError(f"{_shown(path)}: {_reason(e)}; make it readable, or remove it") from e
            self._specs[folder] = None
            if not lines:
                return None
            import pathspec  # noqa: PLC0415 - few folders have such a file, and this takes as long as a submission's rest

            try:
                self._specs[folder] = pathspec.GitIgnoreSpec.from_lines(lines)
            except ValueError as e:
                where = _shown(self.root / folder / self._ignore_files[-1])
                raise SnapshotError(f"{where} is not in gitignore's syntax: {_line(str(e))}") from e
        return self._specs[folder]


def _tree(script: pathlib.Path, skipped: frozenset[pathlib.Path]) -> _Tree:
    """Choose the folder to copy for a script."""
    top = _git_top(script.parent)
    if top is None or _is_ignored_by_git(script):
        return _plain(script, script.parent, skipped, (_IGNORE_FILE,))
    if isinstance(top, _NoGit):
        return _plain(script, top.root, skipped, (".gitignore", _IGNORE_FILE))
    unreadable: list[str] = []
    filter_ = _Filter(top, skipped, (_IGNORE_FILE,))
    tracked, untracked = _git_names(top, "", filter_, unreadable)
    new = [name for name in untracked if not filter_.is_generated(name, is_folder=False)]
    names = [name for name in (*tracked, *new) if not filter_.is_ignored(name, is_folder=False)]
    name = script.relative_to(top).as_posix()
    commit = _git(top, "rev-parse", "--verify", "--quiet", "HEAD", may_fail=True).decode().strip() or None
    is_dirty = bool(new) or bool(_git(top, "status", "--porcelain", "--untracked-files=no"))
    return _Tree(top, dict.fromkeys([name, *names]), unreadable, commit, is_dirty)


def _plain(
    script: pathlib.Path, root: pathlib.Path, skipped: frozenset[pathlib.Path], ignore_files: tuple[str, ...]
) -> _Tree:
    unreadable: list[str] = []
    filter_ = _Filter(root, skipped, ignore_files)

    def names() -> collections.abc.Iterator[str]:
        yield script.relative_to(root).as_posix()
        yield from _walk(filter_, "", unreadable)

    return _Tree(root, names(), unreadable)


def _walk(filter_: _Filter, start: str, unreadable: list[str]) -> collections.abc.Iterator[str]:
    """Yield the names in a folder, breadth first, without following links."""
    folders = collections.deque([start])
    while folders:
        folder = folders.popleft()
        try:
            with os.scandir(filter_.root / folder) as entries:
                for entry in entries:
                    name = f"{folder}/{entry.name}" if folder else entry.name
                    is_folder = entry.is_dir(follow_symlinks=False)
                    if filter_.is_generated(name, is_folder=is_folder) or filter_.is_ignored(name, is_folder=is_folder):
                        continue
                    yield name
                    if is_folder:
                        folders.append(name)
        except OSError as e:
            if e.errno not in _REMOVED:
                unreadable.append(folder or ".")


def _homes() -> set[str]:
    found = {os.environ.get("HOME", "")}
    with contextlib.suppress(KeyError):  # an account without an entry
        found.add(pwd.getpwuid(os.getuid()).pw_dir)
    return {os.path.realpath(home) for home in found if home}


# --- git -------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _NoGit:
    """A repository on a host without git."""

    root: pathlib.Path


def _git_top(folder: pathlib.Path) -> pathlib.Path | _NoGit | None:
    """Find the top of a folder's work tree; None outside of git."""
    try:
        done = _run_git(folder, "rev-parse", "--show-toplevel")
    except FileNotFoundError:
        top = _dot_git(folder)
        return _NoGit(top) if top else None
    if done.returncode == 0:
        return pathlib.Path(os.fsdecode(done.stdout.removesuffix(b"\n"))).resolve()
    error = done.stderr.decode(errors="replace")
    if "not a git repository" in error or "must be run in a work tree" in error:
        return None
    if "dubious ownership" in error:
        top = _dot_git(folder) or folder
        how = f"trust it with: git config --global --add safe.directory {top}"
        raise SnapshotError(
            f"git does not read {_shown(top)}, which another account owns; {how}; or give --no-snapshot"
        )
    raise SnapshotError(f"git in {_shown(folder)}: {_line(error)}; repair the repository, or give --no-snapshot")


def _dot_git(folder: pathlib.Path) -> pathlib.Path | None:
    return next((parent for parent in (folder, *folder.parents) if (parent / ".git").exists()), None)


def _is_ignored_by_git(script: pathlib.Path) -> bool:
    """Whether git ignores a script: then it does not know the files that the script needs, either."""
    try:
        return _run_git(script.parent, "check-ignore", "--quiet", "--", script.name).returncode == 0
    except FileNotFoundError:
        return False


def _git_names(top: pathlib.Path, prefix: str, filter_: _Filter, unreadable: list[str]) -> tuple[list[str], list[str]]:
    """List the tracked and the new files of a work tree, including the repositories in it."""
    tracked: list[str] = []
    untracked: list[str] = []
    inner: list[str] = []
    for line in _git(top, "ls-files", "-z", "--cached", "--stage").split(b"\0")[:-1]:
        about, _, name = line.partition(b"\t")
        (inner if about.startswith(_GITLINK) else tracked).append(prefix + os.fsdecode(name))
    for name in _git(top, "ls-files", "-z", "--others", "--exclude-standard").split(b"\0")[:-1]:
        (inner if name.endswith(b"/") else untracked).append(prefix + os.fsdecode(name.removesuffix(b"/")))
    for name in inner:
        folder = filter_.root / name
        if filter_.is_ignored(name, is_folder=True) or not os.path.lexists(folder / ".git"):
            continue  # a submodule that is not checked out is an empty folder
        if _git_top(folder) != folder:
            untracked += _walk(filter_, name, unreadable)
            continue
        more, new = _git_names(folder, f"{name}/", filter_, unreadable)
        tracked += more
        untracked += new
    return tracked, untracked


def _git(folder: pathlib.Path, *words: str, may_fail: bool = False) -> bytes:
    done = _run_git(folder, *words)
    if done.returncode and not may_fail:
        error = _line(done.stderr.decode(errors="replace"))
        raise SnapshotError(
            f"git {words[0]} in {_shown(folder)}: {error}; repair the repository, or give --no-snapshot"
        )
    return done.stdout


def _run_git(folder: pathlib.Path, *words: str) -> "subprocess.CompletedProcess[bytes]":
    """Run git without changing anything, not even its index, and without prompts."""
    env = {name: value for name, value in os.environ.items() if name not in _GIT_VARIABLES}
    env |= {"LC_ALL": "C", "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0"}
    argv = ["git", "-c", "core.fsmonitor=false", "-C", str(folder), *words]
    try:
        return subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, env=env, timeout=_GIT_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired as e:
        how = "submit from a smaller repository, or give --no-snapshot"
        raise SnapshotError(f"git {words[0]} in {_shown(folder)} took over {_GIT_LIMIT_S:.0f} s; {how}") from e


# --- limits ----------------------------------------------------------------------------------------------------------


def _survey(tree: _Tree, *, limit_bytes: int, limit_files: int) -> dict[str, os.stat_result]:
    """Stat the files to copy, by name. Raises SnapshotError beyond a limit and for unreadable files."""
    found: dict[str, os.stat_result] = {}
    tallies: dict[str, tuple[int, int]] = {"": (0, 0)}  # of each folder: files and bytes
    until: float | None = None
    for name in tree.names:
        try:
            about = (tree.root / name).lstat()
        except OSError as e:
            if e.errno not in _REMOVED:  # tracked but removed, or removed just now
                tree.unreadable.append(name)
            continue
        if name in found or stat.S_IFMT(about.st_mode) not in _KINDS:
            continue
        found[name] = about
        size = about.st_size if stat.S_ISREG(about.st_mode) else 0
        folder = name
        while folder:
            folder = folder.rpartition("/")[0]
            files, total = tallies.get(folder, (0, 0))
            tallies[folder] = files + 1, total + size
        if until is None and (tallies[""][0] > limit_files or tallies[""][1] > limit_bytes):
            until = time.monotonic() + _LOOK_S
        if until is not None and time.monotonic() > until:
            break
    if until is not None:
        raise SnapshotError(_describe_excess(tree.root, tallies, limit_bytes=limit_bytes, limit_files=limit_files))
    if tree.unreadable:
        raise _unreadable(tree.root, tree.unreadable)
    return found


def _describe_excess(
    root: pathlib.Path, tallies: dict[str, tuple[int, int]], *, limit_bytes: int, limit_files: int
) -> str:
    by_size = tallies[""][1] > limit_bytes
    limit = _mib(limit_bytes) if by_size else f"{limit_files} files"

    def weight(folder: str) -> int:
        return tallies[folder][by_size]

    inner: dict[str, list[str]] = {}
    for folder in tallies:
        if folder:
            inner.setdefault(folder.rpartition("/")[0], []).append(folder)
    largest: list[str] = []
    for top in sorted(inner.get("", []), key=weight, reverse=True)[:3]:
        folder = top
        while (below := max(inner.get(folder, []), key=weight, default=None)) and weight(below) > 0.8 * weight(folder):
            folder = below
        largest.append(f"{_shown(folder)} ({tallies[folder][0]} files, {_mib(tallies[folder][1])})")
    where = f", most of it in {', '.join(largest)}" if largest else ""
    how = f"list what the job does not need in {_shown(root / _IGNORE_FILE)}, or give --no-snapshot"
    return f"the code to keep, {_shown(root)}, holds more than {limit}{where}; {how}"


def _unreadable(root: pathlib.Path, names: list[str]) -> SnapshotError:
    shown = ", ".join(_shown(name) for name in sorted(names)[:3])
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    how = f"make them readable, list them in {_shown(root / _IGNORE_FILE)}, or give --no-snapshot"
    return SnapshotError(f"cannot read {shown}{more} in {_shown(root)}; {how}")


# --- copying ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class _Kept:
    """The result of the copy."""

    digests: dict[str, bytes] = dataclasses.field(default_factory=dict[str, bytes])  # kind and content of each name
    size_bytes: int = 0
    outside: list[str] = dataclasses.field(default_factory=list[str])
    changed: list[str] = dataclasses.field(default_factory=list[str])


@dataclasses.dataclass(frozen=True)
class _File:
    """A file's copy; without a digest, none was made."""

    digest: bytes = b""
    size: int = 0
    is_changed: bool = False
    is_unreadable: bool = False


def _copy(
    root: pathlib.Path,
    survey: dict[str, os.stat_result],
    target: pathlib.Path,
    *,
    limit_bytes: int,
    copied: collections.abc.Callable[[int, int], None],
) -> _Kept:
    """Copy the surveyed files. Raises SnapshotError for unreadable ones, OSError if `target` cannot be written."""
    kept = _Kept()
    folders = {name for name, about in survey.items() if stat.S_ISDIR(about.st_mode)}
    parents = set(folders)
    for name in survey:
        while (name := name.rpartition("/")[0]) and name not in parents:
            parents.add(name)
    for name in sorted(parents):
        (target / name).mkdir(exist_ok=True)
    regular = [name for name, about in survey.items() if stat.S_ISREG(about.st_mode)]
    unreadable: list[str] = []

    def copy(name: str) -> _File:
        return _copy_file(root / name, target / name)

    with concurrent.futures.ThreadPoolExecutor(_COPIES) as pool:
        for number, (name, file) in enumerate(zip(regular, pool.map(copy, regular), strict=True), 1):
            copied(number, len(regular))
            if file.is_unreadable:
                unreadable.append(name)
            if file.is_changed:
                kept.changed.append(name)
            if file.digest:
                kept.digests[name] = file.digest
                kept.size_bytes += file.size
            if kept.size_bytes > limit_bytes:
                pool.shutdown(cancel_futures=True)
                how = f"list them in {_shown(root / _IGNORE_FILE)}, or give --no-snapshot"
                raise SnapshotError(
                    f"files in {_shown(root)} grew beyond {_mib(limit_bytes)} while they were copied; {how}"
                )
    if unreadable:
        raise _unreadable(root, unreadable)
    for name, about in survey.items():
        if stat.S_ISLNK(about.st_mode):
            _copy_link(root, name, target, kept, parents)
    kept.digests |= dict.fromkeys(folders, b"d")
    for name in sorted(parents, reverse=True):  # inner ones first: creating files changes a folder's times
        with contextlib.suppress(FileNotFoundError):  # removed meanwhile
            about = survey.get(name) or (root / name).lstat()
            (target / name).chmod(stat.S_IMODE(about.st_mode) & 0o777 | 0o700)
            os.utime(target / name, ns=(about.st_atime_ns, about.st_mtime_ns))
    return kept


def _copy_file(source: pathlib.Path, target: pathlib.Path) -> _File:
    """Copy a file; if it changes meanwhile, copy it again, at most three times."""
    result = _File(is_changed=True)
    for _ in range(_TRIES):
        target.unlink(missing_ok=True)
        try:
            descriptor = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except PermissionError:
            return _File(is_unreadable=True)
        except OSError as e:
            if e.errno in _REMOVED:
                return _File(is_changed=True)
            raise
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            return _File(is_changed=True)
        with open(descriptor, "rb", buffering=0) as reading, target.open("wb") as writing:  # noqa: PTH123 - a descriptor
            before = os.fstat(descriptor)
            digest = hashlib.sha256()
            left = before.st_size  # of a growing file, what was there at first
            while left > 0 and (block := reading.read(min(left, _BLOCK))):
                digest.update(block)
                writing.write(block)
                left -= len(block)
            after = os.fstat(descriptor)
        mode = stat.S_IMODE(before.st_mode) & 0o777 | 0o400
        target.chmod(mode)
        os.utime(target, ns=(before.st_atime_ns, before.st_mtime_ns))
        is_same = not left and (before.st_size, before.st_mtime_ns) == (after.st_size, after.st_mtime_ns)
        kind = b"x" if mode & 0o100 else b"f"
        result = _File(kind + digest.digest(), before.st_size - left, is_changed=not is_same)
        if is_same:
            break
    return result


def _copy_link(root: pathlib.Path, name: str, target: pathlib.Path, kept: _Kept, folders: set[str]) -> None:
    try:
        text = str((root / name).readlink())
    except OSError:
        kept.changed.append(name)  # removed, or replaced by a file
        return
    real = pathlib.Path(os.path.realpath(root / name))
    inside = real.relative_to(root).as_posix() if real.is_relative_to(root) else ""
    if inside == "." or inside in kept.digests or inside in folders:
        text = os.path.relpath(real, (root / name).parent)
    elif real.exists():
        text = str(real)
        kept.outside.append(name)
    (target / name).symlink_to(text)
    about = (root / name).lstat()
    os.utime(target / name, ns=(about.st_atime_ns, about.st_mtime_ns), follow_symlinks=False)
    kept.digests[name] = b"l" + os.fsencode(text)


def _listing_digest(digests: dict[str, bytes]) -> str:
    listing = hashlib.sha256()
    for name, line in sorted((os.fsencode(name), line) for name, line in digests.items()):
        listing.update(len(line).to_bytes(4, "big") + line + name + b"\0")
    return listing.hexdigest()


# --- formatting ------------------------------------------------------------------------------------------------------


def _umask() -> int:
    """Read the process's umask; os.umask cannot read it without changing it."""
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith("Umask:"):
            return int(line.split()[1], 8)
    return 0o022


def _mib(size: int) -> str:
    return f"{size / 2**20:.0f} MiB" if size < 2**30 else f"{size / 2**30:.1f} GiB"


def _shown(path: pathlib.Path | str) -> str:
    text = str(path)
    return text if text.isprintable() else ascii(text)


def _line(text: str) -> str:
    return "; ".join(line.strip().removeprefix("fatal: ") for line in text.splitlines() if line.strip())[:300]


def _reason(e: BaseException) -> str:
    return (e.strerror if isinstance(e, OSError) else None) or str(e)
