"""Access to the shared filesystem with deadlines: a call on a dead mount can hang forever."""

import collections.abc
import contextlib
import os
import threading
import time
import typing

from ddp.node import exit_codes, spool

CALL_S = 30.0  # for one call on a working filesystem, however busy
PATIENCE_S = 900.0  # a mount is remounted in seconds; a server that is restarted may take minutes
REPORT_S = 30.0

# Errors of calls on a shared filesystem once its client or server has failed (errno.h,
# strerror(3)): FUSE's ends open calls with ECONNABORTED and later ones with ENOTCONN
# (fs/fuse/dev.c), and one that was started again knows no open file, hence EBADF. Lustre and CephFS
# give ESHUTDOWN to a client that was cut off, NFS ESTALE and ETIMEDOUT. Sockets, and closed files,
# give most of them, too: they count with a path, or with other evidence.
LOST_ERRORS = {
    5: "Input/output error",
    9: "Bad file descriptor",
    103: "Software caused connection abort",
    107: "Transport endpoint is not connected",
    108: "Cannot send after transport endpoint shutdown",
    110: "Connection timed out",
    116: "Stale file handle",
}

T = typing.TypeVar("T")
Claim = collections.abc.Callable[[], bool]


class Call(typing.Generic[T]):
    """A call in a thread, which may never return and is abandoned then."""

    def __init__(self, action: collections.abc.Callable[[], T]) -> None:
        self._action = action
        self._done: list[T] = []
        self._failed: list[BaseException] = []
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        try:
            self._done.append(self._action())
        except BaseException as e:  # raised in the caller's thread
            self._failed.append(e)

    def ends_within(self, timeout_s: float) -> bool:
        """Wait for it, and return whether it has ended."""
        self._thread.join(timeout_s)
        return bool(self._done or self._failed)

    def result(self) -> T:
        """Return its result once it has ended. Raises what it raised."""
        if self._failed:
            raise self._failed[0]
        return self._done[0]


def within(action: collections.abc.Callable[[], T], timeout_s: float) -> T:
    """Call `action` in a thread, which is abandoned after `timeout_s`. Raises TimeoutError."""
    call = Call(action)
    if not call.ends_within(timeout_s):
        raise TimeoutError(f"no response within {timeout_s:g} s")
    return call.result()


def reason(e: OSError) -> str:
    """Return the error's text."""
    return e.strerror or str(e) or type(e).__name__


class Witness:
    """Holds a file open, which is lost with the filesystem's client like programs' files.

    A client that is started again within a second leaves no other sign. The file is opened for
    writing although nothing writes it: JuiceFS's client knows files that are only read even after
    it was killed.
    """

    def __init__(self, path: str) -> None:
        self._descriptor = -1
        with contextlib.suppress(OSError):
            self._descriptor = within(lambda: os.open(path, os.O_RDWR | os.O_CLOEXEC), CALL_S)

    def trouble(self) -> str:
        """Return why the file does not work any more, "" if it does."""
        if self._descriptor < 0:
            return ""
        try:
            # Answered by the client or the server, not by a cache
            within(lambda: os.fsync(self._descriptor), CALL_S)
        except OSError as e:
            is_over = e.errno is None or e.errno in LOST_ERRORS
            return reason(e) if is_over else ""
        return ""


class Storage:
    """A folder on the shared filesystem."""

    def __init__(
        self, folder: str, note: spool.Note, *, is_cancelled: Claim = lambda: False
    ) -> None:
        self.folder = folder
        self._note = note
        self._is_cancelled = is_cancelled

    def trouble(self) -> str:
        """Write and remove a file; return why that failed, or ""."""
        try:
            within(self._probe, CALL_S)
        except OSError as e:
            return reason(e)
        return ""

    def _probe(self) -> None:
        path = f"{self.folder}/.probe.{os.getpid()}.{threading.get_ident()}"
        descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, b"probe\n")
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)

    def await_ready(self) -> bool:
        """Wait until the folder can be used; return whether it was away. Raises FatalError."""
        began = time.monotonic()
        reported: float | None = None
        pause_s = 0.25
        while found := self.trouble():
            waited = time.monotonic() - began
            if reported is None or time.monotonic() - reported > REPORT_S:
                why = f"{self.folder} does not respond ({found})"
                self._note(f"{why}; waiting for it, {waited:.0f} s")
                reported = time.monotonic()
            if waited > PATIENCE_S or self._is_cancelled():
                why = f"{self.folder} has not responded for {waited:.0f} s: {found}"
                raise exit_codes.FatalError(f"{why}; is the shared filesystem mounted here?")
            time.sleep(pause_s)
            pause_s = min(5.0, pause_s * 2)
        if reported is not None:
            self._note(f"{self.folder} responds again after {time.monotonic() - began:.1f} s")
        return reported is not None

    def do(self, action: collections.abc.Callable[[], T]) -> T:
        """Call `action`, again after a fault of the filesystem. Raises FatalError, OSError."""
        while True:
            call = Call(action)
            try:
                if self._ends(call):
                    return call.result()
            except OSError:
                if not self.await_ready():
                    raise

    def _ends(self, call: Call[T]) -> bool:
        """Wait for a call, for minutes if the filesystem is only slow.

        Returns False once the filesystem was away, since the call may never return then. Raises
        FatalError, or TimeoutError while the job is being ended.
        """
        began = time.monotonic()
        while not call.ends_within(CALL_S):
            if self.await_ready():
                return False
            waited = time.monotonic() - began
            slow = f"{self.folder} is slow: reading and writing has taken {waited:.0f} s so far"
            if self._is_cancelled():
                raise TimeoutError(slow)
            if waited > PATIENCE_S:
                raise exit_codes.FatalError(f"{slow}; is its server overloaded?")
            self._note(f"{slow}; waiting for it")
        return True
