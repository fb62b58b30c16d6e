"""Locks between the commands on this host: one for each run, one for environments.

A command holds them until it has submitted, or ends; the kernel releases a killed process's locks.
"""

import contextlib
import fcntl
import os
import pathlib
import time

from ddp.node import spool

CACHE = pathlib.Path(f"/var/tmp/slurm-ddp-{os.geteuid()}")  # noqa: S108 - its owner is checked
POLL_S = 0.5


class Claims(contextlib.AbstractContextManager["Claims"]):
    """The locks that one command holds; as a context manager, until it ends."""

    def __init__(self) -> None:
        self._held: dict[str, int] = {}

    def __exit__(self, *_: object) -> None:
        """Release all locks."""
        self.drop(*self._held)

    def take(self, name: str) -> bool:
        """Acquire a lock unless another command holds it; return whether this one has it."""
        if name in self._held:
            return True
        folder = pathlib.Path(spool.own_cache(str(CACHE)), "locks")
        folder.mkdir(mode=0o700, exist_ok=True)
        lock = os.open(folder / f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            return False
        self._held[name] = lock
        return True

    def wait(self, name: str, *, timeout_s: float) -> bool:
        """Wait for a lock and acquire it; return False after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while not self.take(name):
            if time.monotonic() >= deadline:
                return False
            time.sleep(POLL_S)
        return True

    def drop(self, *names: str) -> None:
        """Release locks, as far as they are held."""
        for name in names:
            lock = self._held.pop(name, None)
            if lock is not None:
                os.close(lock)
