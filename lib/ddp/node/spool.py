"""Write output to the node's own disk and copy it to the shared filesystem, so that no line is lost.

Each copy opens the target anew, appends and closes it: a descriptor of a dead filesystem client never works again, and
`close` reports what `write` does not. After a failed copy, only the bytes that did not arrive are copied again.
"""

import collections.abc
import contextlib
import os
import stat
import threading
import time

CHUNK = 1 << 20
QUICK_S, SLOW_S = 0.2, 1.0  # between two passes: in the first half minute, when a user may watch; and later
PUNCH_BYTES = 64 << 20  # the disk space of what was copied is freed in steps of this
FLUSH_S = 60.0
KEPT_S = 7 * 86400.0  # output that could not be copied is kept this long

Note = collections.abc.Callable[[str], None]


def ensure_private(folder: str) -> None:
    """Make a folder of mode 0700. Raises PermissionError where another account owns it."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    about = os.lstat(folder)
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid():
        raise PermissionError(f"{folder} is not a folder of uid {os.geteuid()}; remove it")
    if stat.S_IMODE(about.st_mode) != 0o700:
        os.chmod(folder, 0o700)


def folder(cache: str, *parts: str) -> str:
    """Make a folder for output below the user's cache on this node. Raises OSError."""
    ensure_private(cache)
    path = os.path.join(cache, "jobs", *parts)
    os.makedirs(path, 0o700, exist_ok=True)
    return path


def remove_old(cache: str) -> None:
    """Remove output older than KEPT_S that could not be copied."""
    import shutil

    with contextlib.suppress(OSError):
        for name in os.listdir(f"{cache}/jobs"):
            path = f"{cache}/jobs/{name}"
            if time.time() - os.lstat(path).st_mtime > KEPT_S:
                shutil.rmtree(path, ignore_errors=True)


class Mirror:
    """A file of the spool, and its copy on the shared filesystem."""

    def __init__(self, source: str, target: str, *, below: str = "", resumes: bool = False) -> None:
        self.target = target
        self._below = below  # an existing folder for the target's own; without a mount it is absent, too
        self._keeps_time = bool(below)  # a log's last change shows which rank failed first
        self._source = os.open(source, os.O_RDWR | os.O_CLOEXEC)
        self._offset = 0  # of the first byte not copied
        self._punched = 0
        self._base: int | None = None  # the target's size when a copy began that failed
        if resumes:  # only this program writes the target: its content was copied before
            with contextlib.suppress(FileNotFoundError):
                self._offset = os.stat(target).st_size

    @property
    def is_current(self) -> bool:
        """Whether all that was written so far is copied."""
        return os.fstat(self._source).st_size <= self._offset

    def forward(self) -> None:
        """Copy the new bytes. Raises OSError."""
        while data := os.pread(self._source, CHUNK, self._offset):
            self._append(data)
            self._offset += len(data)
        if self._offset - self._punched >= PUNCH_BYTES:
            _punch(self._source, self._punched, self._offset - self._punched)
            self._punched = self._offset

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

    def close(self) -> None:
        """Close the file of the spool."""
        os.close(self._source)


class Forwarder:
    """A thread that copies new bytes of files, and of all files below folders."""

    def __init__(self, note: Note) -> None:
        self.trouble = ""  # why the last pass failed
        self.faults = 0
        self._note = note
        self._mirrors: dict[str, Mirror] = {}
        self._trees: list[tuple[str, str, str, bool]] = []
        self._lock = threading.Lock()
        self._turn = threading.Condition()
        self._asked = self._served = 0
        self._is_over = False
        self._thread = threading.Thread(target=self._work, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def add(self, source: str, target: str) -> None:
        """Copy a file."""
        with self._lock:
            self._mirrors[source] = Mirror(source, target)

    def add_tree(self, source: str, target: str, *, below: str, resumes: bool = False) -> None:
        """Copy all files below a folder, also later ones, to a folder that is made below an existing one.

        With `resumes` they are those of an earlier process, and may be copied in part.
        """
        with self._lock:
            self._trees.append((source, target, below, resumes))

    def flush(self, timeout_s: float = FLUSH_S) -> bool:
        """Copy all that is written now; return whether that succeeded in time."""
        with self._turn:
            self._asked += 1
            asked = self._asked
            self._turn.notify_all()
            return self._turn.wait_for(lambda: self._served >= asked, timeout_s)

    def close(self, timeout_s: float = FLUSH_S) -> bool:
        """Copy the rest and end the thread; return whether all was copied."""
        succeeded = self.flush(timeout_s)
        with self._turn:
            self._is_over = True
            self._turn.notify_all()
        return succeeded

    def _work(self) -> None:
        began = failed = time.monotonic()
        while True:
            with self._turn:
                asked = self._asked
                if self._is_over and self._served >= asked:
                    return
            try:
                self._pass()
            except OSError as e:
                if not self.trouble:
                    failed = time.monotonic()
                    self.faults += 1
                    self._note(f"output cannot be written ({e.strerror or e}) and waits on this node's disk")
                self.trouble = e.strerror or str(e)
                with self._turn:
                    if self._is_over:
                        return
                time.sleep(QUICK_S if time.monotonic() - failed < 10 else SLOW_S)
                continue
            if self.trouble:
                self.trouble = ""
                self._note(f"output is written again after {time.monotonic() - failed:.1f} s")
            with self._turn:
                self._served = asked
                self._turn.notify_all()
                pause_s = QUICK_S if time.monotonic() - began < 30 else SLOW_S
                self._turn.wait_for(lambda: self._asked > self._served or self._is_over, pause_s)

    def _pass(self) -> None:
        with self._lock:
            trees = list(self._trees)
        for source, target, below, resumes in trees:
            for top, _, names in os.walk(source):
                for name in names:
                    path = os.path.join(top, name)
                    if path not in self._mirrors and stat.S_ISREG(os.lstat(path).st_mode):
                        copy = os.path.join(target, os.path.relpath(path, source))
                        self._mirrors[path] = Mirror(path, copy, below=below, resumes=resumes)
        failure: OSError | None = None
        for mirror in list(self._mirrors.values()):
            if not mirror.is_current:
                try:
                    mirror.forward()
                except OSError as e:  # one that fails must not stop the others
                    failure = e
        if failure is not None:
            raise failure


class Output:
    """The output of a batch script and its children: redirect it to a file of the spool.

    Change nothing where standard output is no file, or the node's disk cannot be written: then `forwarder` is None.
    """

    def __init__(self, cache: str, job: str, note: Note) -> None:
        self.forwarder: Forwarder | None = None
        self._path = ""
        try:
            about = os.fstat(1)
            log = os.readlink("/proc/self/fd/1")
            if not stat.S_ISREG(about.st_mode) or not os.path.samestat(about, os.stat(log)):
                return
            self._path = os.path.join(folder(cache, job), f"out.{os.getpid()}")
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            descriptor = os.open(self._path, flags, 0o600)
        except OSError:
            return
        self.forwarder = Forwarder(note)
        self.forwarder.add(self._path, log)
        self.forwarder.start()
        for standard in (1, 2):
            os.dup2(descriptor, standard)
        os.close(descriptor)

    def flush(self, timeout_s: float = FLUSH_S) -> bool:
        """Copy all output to the log; return whether that succeeded."""
        return self.forwarder is None or self.forwarder.flush(timeout_s)

    def close(self, timeout_s: float = FLUSH_S) -> None:
        """Copy all output for the last time; the rest stays on this node's disk."""
        if self.forwarder is not None and self.forwarder.close(timeout_s):
            with contextlib.suppress(OSError):
                os.unlink(self._path)
                os.rmdir(os.path.dirname(self._path))


def write(text: str) -> None:
    """Print a line with one system call, safe in a signal handler or a thread."""
    with contextlib.suppress(OSError):
        os.write(1, f"{text}\n".encode())


def _punch(descriptor: int, begin: int, length: int) -> None:
    """Free the disk space of a part of a file: fallocate(2) with KEEP_SIZE and PUNCH_HOLE."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_longlong, ctypes.c_longlong]
    libc.fallocate(descriptor, 3, begin, length)  # without support the file keeps its size
