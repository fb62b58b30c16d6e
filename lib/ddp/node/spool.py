"""Write output to the node's own disk and copy it to the shared filesystem, so that no line is lost.

Each copy opens the target again, appends and closes it: a descriptor of a dead filesystem client never works again, and
`close` reports what `write` does not. After a failed copy, only the bytes that did not arrive are copied again.
"""

import collections.abc
import contextlib
import os
import stat
import threading
import time

CHUNK = 1 << 20
QUICK_S, SLOW_S = (
    0.2,
    1.0,
)  # between two passes: in the first half minute, when a user may watch; and later
FLUSH_S = 60.0
KEPT_S = 7 * 86400.0  # output that could not be copied is kept this long

Note = collections.abc.Callable[[str], None]


def ensure_private(folder: str) -> None:
    """Make a folder of mode 0700. Raises PermissionError where another account owns it."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    if not _is_own(folder):
        raise PermissionError(f"{folder} is not a folder of uid {os.geteuid()}; as root: remove it")


def own_cache(cache: str) -> str:
    """Return this account's folder on this node's disk, of mode 0700: `cache`, or one beside it. Raises OSError.

    Any account can take the name first, as /var/tmp is everybody's. Then the folder has random characters behind the
    name, and its owner tells it from what others make: nobody can give a folder away.
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
        self._below = (
            below  # an existing folder for the target's own; without a mount it is absent, too
        )
        self._keeps_time = bool(below)  # a log's last change shows which rank failed first
        self._source = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
        self._offset = 0  # of the first byte not copied
        self._base: int | None = None  # the target's size when a copy began that failed

    @property
    def is_current(self) -> bool:
        """Whether all that was written so far is copied."""
        return os.fstat(self._source).st_size <= self._offset

    def forward(self) -> None:
        """Copy the new bytes. Raises OSError."""
        while data := os.pread(self._source, CHUNK, self._offset):
            self._append(data)
            self._offset += len(data)

    def _append(self, data: bytes) -> None:
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            descriptor = os.open(self.target, flags, 0o644)
        except FileNotFoundError:
            if not self._below or not os.path.isdir(self._below):
                raise
            os.makedirs(os.path.dirname(self.target), 0o755, exist_ok=True)
            descriptor = os.open(self.target, flags, 0o644)
        try:
            if self._base is not None:
                there = os.pread(descriptor, len(data), self._base)
                data = data[len(there) :] if data.startswith(there) else data
            else:
                self._base = os.fstat(descriptor).st_size
            while data:
                data = data[os.write(descriptor, data) :]
            if self._keeps_time:
                about = os.fstat(self._source)
                os.utime(descriptor, ns=(about.st_atime_ns, about.st_mtime_ns))
        finally:
            os.close(descriptor)  # reports the errors of delayed writes
        self._base = None


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
        """Copy all files below a folder, also later ones, to a folder that is made below an existing one."""
        self._trees.append((source, target, below))

    def flush(self, timeout_s: float = FLUSH_S) -> bool:
        """Copy all that is written now; return whether that succeeded in time."""
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
                if not self.trouble:
                    failed = now
                    self._note(
                        f"output cannot be written ({e.strerror or e}) and waits on this node's disk"
                    )
                self.trouble = e.strerror or str(e)
                time.sleep(QUICK_S if now - failed < 10 else SLOW_S)
            else:
                if self.trouble:
                    self.trouble = ""
                    self._note(f"output is written again after {time.monotonic() - failed:.1f} s")
                self._copied_at = now
                self._wake.wait(QUICK_S if now - began < 30 else SLOW_S)

    def _pass(self) -> None:
        for source, target, below in list(self._trees):
            for top, _, names in os.walk(source):
                for name in names:
                    path = os.path.join(top, name)
                    if path not in self._mirrors and stat.S_ISREG(os.lstat(path).st_mode):
                        copy = os.path.join(target, os.path.relpath(path, source))
                        self._mirrors[path] = Mirror(path, copy, below=below)
        failure: OSError | None = None
        for mirror in list(self._mirrors.values()):
            if not mirror.is_current:
                try:
                    mirror.forward()
                except OSError as e:  # one that fails must not stop the others
                    failure = e
        if failure is not None:
            raise failure


class Output(Forwarder):
    """The output of a batch script and its children: redirect it to a file of the spool.

    Change nothing where standard output is no file, or the node's disk cannot be written.
    """

    def __init__(self, cache: str, job: str, note: Note) -> None:
        super().__init__(note)
        self._path = ""
        try:
            about = os.fstat(1)
            log = os.readlink("/proc/self/fd/1")
            if not stat.S_ISREG(about.st_mode) or not os.path.samestat(about, os.stat(log)):
                return
            path = os.path.join(folder(cache, job), f"out.{os.getpid()}")
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            descriptor = os.open(path, flags, 0o600)
        except OSError:
            return
        self._path = path
        self.add(path, log)
        for standard in (1, 2):
            os.dup2(descriptor, standard)
        os.close(descriptor)

    def close(self, timeout_s: float = FLUSH_S) -> bool:
        """Copy all output for the last time; the rest stays on this node's disk. Return whether all was copied."""
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
