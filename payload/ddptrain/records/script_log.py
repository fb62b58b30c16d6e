"""metrics.jsonl of a script, appended by a thread, so that a slow disk never delays the script.

Lines of earlier attempts stay; of two lines with a step, readers take the later one.
"""

# pyright: basic
import collections
import contextlib
import json
import math
import os
import pathlib
import threading
import time
import typing
from multiprocessing import util

from ddptrain.ground import log

Record = dict[str, typing.Any]

_OURS = ("kind", "time", "step", "best")
_TAIL_BYTES = 1 << 16
_FLUSH_S = 0.5  # the most that a killed process loses
_CLOSE_S = 30.0  # how long the end of a script waits for the last lines


class ScriptLog:
    """Lines for a metrics.jsonl; `start` has the facts of this attempt."""

    def __init__(self, path: pathlib.Path, start: Record, *, flush_s: float = _FLUSH_S) -> None:
        self._path = path
        self._flush_s = flush_s
        # Of each loss, for readers of the file's end: step and value
        self._best: dict[str, tuple[object, float]] = {}
        self._taken: collections.deque[Record] = collections.deque()
        self._unwritten: list[Record] = [{"kind": "start", "time": time.time(), **start}]
        self._has_read = False
        self._has_warned = False
        self._writing = threading.Lock()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="script-log", daemon=True)
        self._thread.start()
        # Not atexit, which is not called in a child of spawn
        self._at_exit = util.Finalize(None, self.end, exitpriority=0)

    def add(self, at: object, metrics: dict[str, object]) -> None:
        """Take a line.

        Values other than numbers, texts and tensors of one element are left out, with a warning.
        """
        record: Record = {"kind": "step", "time": time.time()}
        self._put(record, "step", at)
        for name, value in metrics.items():
            self._put(record, f"{name}_" if name in _OURS else name, value)
        step = record.get("step")
        if isinstance(step, int | float) and not isinstance(step, bool) and abs(step) < 1 << 53:
            self._taken.append(record)

    def sync(self) -> None:
        """Write the lines so far, and make them durable if the filesystem does not fail."""
        self._append()
        with contextlib.suppress(OSError), self._path.open("rb") as file:
            os.fsync(file.fileno())

    def end(self) -> None:
        """Write the last lines."""
        self._at_exit.cancel()
        self._ending.set()
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            self._warn(f"{self._path} could not be written within {_CLOSE_S:g} s")
        elif self._unwritten:
            self._warn(f"{len(self._unwritten)} lines could not be written to {self._path}")

    def _put(self, record: Record, name: str, value: object) -> None:
        try:
            record[name] = _plain(value)
        except Exception as e:  # a value's own methods may raise anything
            if not self._has_warned:
                self._has_warned = True
                self._warn(f"{name} is left out: {type(e).__name__}: {e}")

    def _warn(self, text: str) -> None:
        log.warn("TRACK", f"metrics.jsonl: {text}")

    def _run(self) -> None:
        while not self._ending.wait(self._flush_s):
            self._append()
        self._append()
        if self._unwritten:  # a filesystem that comes back gets a second chance
            time.sleep(2 * self._flush_s)
            self._append()

    def _append(self) -> None:
        """Append the lines taken so far; those that cannot be written wait for the next call."""
        with self._writing:
            self._append_alone()

    def _append_alone(self) -> None:
        while self._taken:
            self._unwritten.append(self._taken.popleft())
        if not self._unwritten:
            return
        # A file of a filesystem that failed never works again, so each call opens it
        with contextlib.suppress(OSError):
            with self._path.open("a+b") as file:
                if not self._has_read:
                    self._begin(file)
                lines = [json.dumps(self._with_best(record)) for record in self._unwritten]
                file.write("".join(f"{line}\n" for line in lines).encode())
            self._unwritten.clear()  # closed, which reports the errors of delayed writes

    def _begin(self, file: typing.BinaryIO) -> None:
        """Read the lowest losses up to now; end a line that a crash cut short."""
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
        before = file.read()
        for line in before.splitlines():
            with contextlib.suppress(ValueError, AttributeError, TypeError):
                self._best |= json.loads(line).get("best", {})
        if before and not before.endswith(b"\n"):
            file.write(b"\n")
        self._has_read = True

    def _with_best(self, record: Record) -> Record:
        for name in ("loss", "val_loss"):
            value = record.get(name)
            _, lowest = self._best.get(name, (0, math.inf))
            if isinstance(value, int | float) and value < lowest:
                self._best[name] = (record["step"], value)
        if not self._best:
            return record
        return record | {"best": self._best}


def _plain(value: typing.Any) -> object:
    """Return a value for JSON, NaN and infinities in Python's spelling.

    Raises the value's own errors.
    """
    if hasattr(value, "item"):  # of torch, NumPy, JAX: one element
        value = value.item()
    if isinstance(value, str):
        return value[:1000]
    is_small = isinstance(value, int) and abs(value) < 1 << 63
    if value is None or is_small:
        return value
    return float(value)
