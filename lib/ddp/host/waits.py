"""The waits of this account's commands, each a file on this host: removing it ends the wait."""

import collections.abc
import contextlib
import fcntl
import os
import pathlib
import time

from ddp.host import locks
from ddp.node import spool

_NAME = "wait-{}"  # of the command's process


def folder() -> pathlib.Path:
    """Make and return this account's folder of waits. Raises OSError."""
    place = pathlib.Path(spool.own_cache(str(locks.CACHE)), "waits")
    place.mkdir(mode=0o700, exist_ok=True)
    return place


class Wait(contextlib.AbstractContextManager["Wait"]):
    """How long one command may wait for jobs; as a context manager, until the command ends."""

    def __init__(self, sleep: collections.abc.Callable[[float], None] = time.sleep) -> None:
        self.pause = sleep  # for some seconds, between two looks at a job
        self.limit_s: float | None = None  # since the command began
        self._began = time.monotonic()
        self._path: pathlib.Path | None = None
        self._lock = -1  # held while the command lives

    def __exit__(self, *_: object) -> None:
        """Remove the file."""
        if self._path is None:
            return
        self._path.unlink(missing_ok=True)
        os.close(self._lock)
        self._path = None

    def begin(self, *names: str) -> None:
        """Let `stop` find this command by any of these names; later calls add names."""
        with contextlib.suppress(OSError):  # a full disk: the job is submitted, the wait goes on
            if self._path is None:
                self._open()
            lines = "".join(f"{name}\n" for name in names)
            os.write(self._lock, lines.encode())

    def _open(self) -> None:
        path = folder() / _NAME.format(os.getpid())
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        self._lock = os.open(path, flags, 0o600)
        self._path = path
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    @property
    def is_over(self) -> bool:
        """Whether the limit has passed, or someone has ended the waiting."""
        elapsed_s = time.monotonic() - self._began
        if self.limit_s is not None and elapsed_s >= self.limit_s:
            return True
        return self._path is not None and not self._path.exists()


def stop(name: str | None) -> list[list[str]]:
    """End the waits of this account for a run or job, or all of them; return the names of each."""
    ended: list[list[str]] = []
    for path in sorted(folder().glob(_NAME.format("*"))):
        names = _names_of_live(path)
        if names and name in (None, *names):
            path.unlink(missing_ok=True)
            ended.append(names)
    return ended


def _names_of_live(path: pathlib.Path) -> list[str]:
    """Return the names of a live command's wait; remove the file of a command that was killed."""
    with contextlib.suppress(FileNotFoundError), path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return file.read().split()
        path.unlink(missing_ok=True)
    return []
