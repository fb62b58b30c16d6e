"""Whether the shared filesystem responds. No call waits for it longer than it says: a dead mount can hang for ever."""

import collections.abc
import contextlib
import os
import threading
import time
import typing

CALL_S = 30.0  # one call on a filesystem that works, however busy
PATIENCE_S = 900.0  # a mount is remounted in seconds; a server that is restarted may take minutes
REPORT_S = 30.0

T = typing.TypeVar("T")


class GoneError(Exception):
    """The shared filesystem did not come back in time; `str()` is one line."""


def within(action: collections.abc.Callable[[], T], timeout_s: float) -> T:
    """Return what `action` returns. Raises TimeoutError where it takes longer; it is abandoned then."""
    done: list[T] = []
    failed: list[BaseException] = []

    def work() -> None:
        try:
            done.append(action())
        except BaseException as e:  # it is raised in the caller's thread
            failed.append(e)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(timeout_s)
    if failed:
        raise failed[0]
    if not done:
        raise TimeoutError(f"no response within {timeout_s:g} s")
    return done[0]


def reason(e: OSError) -> str:
    """Return the error in words."""
    return e.strerror or str(e) or type(e).__name__


class Storage:
    """A folder on the shared filesystem."""

    def __init__(
        self,
        folder: str,
        say: collections.abc.Callable[[str], None],
        *,
        is_cancelled: collections.abc.Callable[[], bool] = lambda: False,
        patience_s: float | None = None,
    ) -> None:
        self.folder = folder
        self.faults = 0  # how often it did not respond
        self.last_reason = ""
        self._say, self._is_cancelled, self._patience_s = (
            say, is_cancelled, PATIENCE_S if patience_s is None else patience_s
        )  # fmt: skip

    def trouble(self) -> str:
        """Return why the folder cannot be used; nothing where it can: a file was written and removed."""
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
        """Wait until the folder can be used; return whether it had to. Raises GoneError."""
        began = reported = time.monotonic()
        pause_s = 0.25
        words = ""
        while found := self.trouble():
            waited = time.monotonic() - began
            if not words or time.monotonic() - reported > REPORT_S:
                self._say(f"{self.folder} does not respond ({found}); waiting for it, {waited:.0f} s")
                reported = time.monotonic()
            if not words:
                self.faults += 1
            self.last_reason = words = found
            if waited > self._patience_s or self._is_cancelled():
                raise GoneError(f"{self.folder} has not responded for {waited:.0f} s: {found}")
            time.sleep(pause_s)
            pause_s = min(5.0, pause_s * 2)
        if words:
            self._say(f"{self.folder} responds again after {time.monotonic() - began:.1f} s")
        return bool(words)

    def do(self, action: collections.abc.Callable[[], T]) -> T:
        """Return what an action on the folder returns; do it again when the filesystem is back.

        Raises OSError, GoneError. An error that the filesystem gives while it works is the action's own.
        """
        while True:
            try:
                return within(action, CALL_S)
            except OSError:
                if not self.await_ready():
                    raise
