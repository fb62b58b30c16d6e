"""Write output to the node's own disk and copy it to the shared filesystem: no line is lost.

Each copy opens the target again, appends and closes it: a descriptor of a dead filesystem client
never works again, and `close` reports errors that `write` does not. After a failed copy, only the
bytes that did not arrive are copied again.
"""

import collections.abc
import contextlib
import os
import stat
import threading
import time

CHUNK = 1 << 20
QUICK_S = 0.2  # between two passes in the first half minute, when a user may watch
SLOW_S = 1.0  # later
_WATCHED_S = 30.0
_QUICK_RETRIES_S = 10.0
FLUSH_S = 60.0
KEPT_S = 7 * 86400.0  # output that could not be copied is kept this long

Note = collections.abc.Callable[[str], None]


def ensure_private(folder: str) -> None:
    """Make a folder of mode 0700. Raises PermissionError if another account owns it."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    if not _is_own(folder):
        raise PermissionError(f"{folder} is not a folder of uid {os.geteuid()}; as root: remove it")


def own_cache(cache: str) -> str:
    """Return this account's folder on this node's disk, of mode 0700. Raises OSError.

    It is `cache`, unless another account has taken that name first, as any can in /var/tmp. Then
    the folder has random characters behind the name, and its owner tells it from others' folders:
    an account cannot give a folder away.
    """
    import glob
    import tempfile

    with contextlib.suppress(FileExistsError):
        os.mkdir(cache, 0o700)
    for path in (cache, *sorted(glob.iglob(f"{glob.escape(cache)}.*"))):
        if _is_own(path):
            return path
    above, name = os.path.split(cache)
    return tempfile.mkdtemp(prefix=f"{name}.", dir=above)


def _is_own(folder: str) -> bool:
    """Return whether a folder is this account's; give it the mode 0700 then."""
    about = os.lstat(folder)
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid():
        return False
    if stat.S_IMODE(about.st_mode) != 0o700:
        os.chmod(folder, 0o700)
    return True


def folder(cache: str, *parts: str) -> str:
    """Make a folder for output below the user's cache on this node. Raises OSError."""
    path = os.path.join(own_cache(cache), "jobs", *parts)
    os.makedirs(path, 0o700, exist_ok=True)
    return path


def remove_old(cache: str) -> None:
    """Remove output older than KEPT_S that could not be copied."""
    import shutil

    with contextlib.suppress(OSError):
        jobs = f"{own_cache(cache)}/jobs"
        for name in os.listdir(jobs):
            path = f"{jobs}/{name}"
            if time.time() - os.lstat(path).st_mtime > KEPT_S:
                shutil.rmtree(path, ignore_errors=True)


class Mirror:
    """A file of the spool, and its copy on the shared filesystem."""

    def __init__(self, source: str, target: str, *, below: str = "") -> None:
        self.target = target
        # An existing folder above the target's own; without a mount it is absent, too
        self._below = below
        self._keeps_time = bool(below)  # a log's last change shows which rank failed first
        self._source = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
        self._offset = 0  # of the first byte not copied
        self._base: int | None = None  # the target's size when a copy began that failed

    @property
    def is_current(self) -> bool:
        """Whether all bytes written so far are copied."""
        return os.fstat(self._source).st_size <= self._offset

    def forward(self) -> None:
        """Copy the new bytes. Raises OSError."""
        while data := os.pread(self._source, CHUNK, self._offset):
            self._append(data)
            self._offset += len(data)

    def _append(self, data: bytes) -> None:
        """Append bytes to the target. Raises OSError."""
        descriptor = self._open_target()
        try:
            if self._base is None:
                self._base = os.fstat(descriptor).st_size
            else:  # the last copy failed, perhaps after some bytes
                arrived = os.pread(descriptor, len(data), self._base)
                data = data.removeprefix(arrived)
            while data:
                data = data[os.write(descriptor, data) :]
            if self._keeps_time:
                about = os.fstat(self._source)
                os.utime(descriptor, ns=(about.st_atime_ns, about.st_mtime_ns))
        finally:
            os.close(descriptor)  # reports the errors of delayed writes
        self._base = None

    def _open_target(self) -> int:
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            return os.open(self.target, flags, 0o644)
        except FileNotFoundError:
            if not self._below or not os.path.isdir(self._below):
                raise
        os.makedirs(os.path.dirname(self.target), 0o755, exist_ok=True)
        return os.open(self.target, flags, 0o644)


class Forwarder:
    """A thread that copies new bytes of files, and of all files below folders."""

    def __init__(self, note: Note) -> None:
        self.trouble = ""  # why the last pass failed
        self._note = note
        self._mirrors: dict[str, Mirror] = {}
        self._trees: list[tuple[str, str, str]] = []
        self._wake = threading.Event()
        self._copied_at = 0.0  # when the last pass that copied everything began
        self._is_over = False
        threading.Thread(target=self._work, daemon=True).start()

    def add(self, source: str, target: str) -> None:
        """Copy a file."""
        self._mirrors[source] = Mirror(source, target)

    def add_tree(self, source: str, target: str, *, below: str) -> None:
        """Copy all files below a folder, also later ones; the folder `below` exists."""
        self._trees.append((source, target, below))

    def flush(self, timeout_s: float = FLUSH_S) -> bool:
        """Copy all bytes written so far; return whether that succeeded in time."""
        asked = time.monotonic()
        while self._copied_at < asked:
            if time.monotonic() > asked + timeout_s:
                return False
            self._wake.set()
            time.sleep(0.01)
        return True

    def close(self, timeout_s: float = FLUSH_S) -> bool:
        """Copy the rest and end the thread; return whether all was copied."""
        succeeded = self.flush(timeout_s)
        self._is_over = True
        self._wake.set()
        return succeeded

    def _work(self) -> None:
        began = failed = time.monotonic()
        while not self._is_over:
            self._wake.clear()
            now = time.monotonic()
            try:
                self._pass()
            except OSError as e:
                reason = e.strerror or str(e)
                if not self.trouble:
                    failed = now
                    self._note(f"output cannot be written ({reason}) and waits on this node's disk")
                self.trouble = reason
                time.sleep(QUICK_S if now - failed < _QUICK_RETRIES_S else SLOW_S)
                continue

            if self.trouble:
                self.trouble = ""
                self._note(f"output is written again after {time.monotonic() - failed:.1f} s")
            self._copied_at = now
            self._wake.wait(QUICK_S if now - began < _WATCHED_S else SLOW_S)

    def _pass(self) -> None:
        """Copy the new bytes of all files, also if one of them fails. Raises OSError."""
        for source, target, below in list(self._trees):
            self._find_files(source, target, below)
        failure: OSError | None = None
        for mirror in list(self._mirrors.values()):
            if mirror.is_current:
                continue
            try:
                mirror.forward()
            except OSError as e:
                failure = e
        if failure is not None:
            raise failure

    def _find_files(self, source: str, target: str, below: str) -> None:
        """Find new files below a folder. Raises OSError."""
        for top, _, names in os.walk(source):
            for name in names:
                path = os.path.join(top, name)
                if path not in self._mirrors and stat.S_ISREG(os.lstat(path).st_mode):
                    copy = os.path.join(target, os.path.relpath(path, source))
                    self._mirrors[path] = Mirror(path, copy, below=below)


class Output(Forwarder):
    """Redirects the output of a batch script and its children to a file of the spool.

    Nothing changes if standard output is not a file, or the node's disk cannot be written.
    """

    def __init__(self, cache: str, job: str, note: Note) -> None:
        super().__init__(note)
        self._path = ""
        with contextlib.suppress(OSError):
            self._redirect(cache, job)

    def _redirect(self, cache: str, job: str) -> None:
        about = os.fstat(1)
        log = os.readlink("/proc/self/fd/1")
        if not stat.S_ISREG(about.st_mode) or not os.path.samestat(about, os.stat(log)):
            return
        path = os.path.join(folder(cache, job), f"out.{os.getpid()}")
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o600)
        self.add(path, log)
        self._path = path
        for standard in (1, 2):
            os.dup2(descriptor, standard)
        os.close(descriptor)

    def close(self, timeout_s: float = FLUSH_S) -> bool:
        """Copy the output for the last time; return whether that succeeded.

        The rest stays on this node's disk.
        """
        succeeded = super().close(timeout_s)
        if succeeded and self._path:
            with contextlib.suppress(OSError):
                os.unlink(self._path)
                os.rmdir(os.path.dirname(self._path))
        return succeeded


def write(text: str) -> None:
    """Print a line with one system call, safe in a signal handler or a thread."""
    with contextlib.suppress(OSError):
        os.write(1, f"{text}\n".encode())


def note(host: str) -> Note:
    """Return a function that prints a line with a node's name."""
    return lambda text: write(f"[ENV] {host}: {text}")
