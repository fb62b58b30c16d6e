"""metrics.jsonl of a script: what it logs is taken at once, and a thread appends it, so that no disk holds it up.

Lines of earlier attempts stay; of two lines with a step, readers take the later one.
"""

# pyright: basic
import contextlib
import json
import math
import os
import pathlib
import time
import typing
from multiprocessing import util

from ddptrain.records import trackers

_OURS = ("kind", "time", "step", "best")
_TAIL_BYTES = 1 << 16
_FLUSH_S = 0.5  # what a process that is killed may lose


class Logbook:
    """Lines for a metrics.jsonl; `start` has the facts of this attempt."""

    def __init__(self, path: pathlib.Path, start: trackers.Record) -> None:
        self._path = path
        self._best: dict[
            str, tuple[object, float]
        ] = {}  # of each loss, for readers of the file's end: step and value
        self._waiting: list[trackers.Record] = [{"kind": "start", "time": time.time(), **start}]
        self._has_read = False
        self._background = trackers.Background(self, queued=None, flush_s=_FLUSH_S)
        self._at_exit = util.Finalize(
            None, self.end, exitpriority=0
        )  # atexit's are not called in a child of spawn

    def add(self, at: object, metrics: dict[str, object]) -> None:
        """Take a line; a value that is no number, text or tensor of one element is left out, with a warning."""
        record: trackers.Record = {"kind": "step", "time": time.time()}
        for name, value in (("step", at), *metrics.items()):
            try:
                record[f"{name}_" if name in _OURS and len(record) > 2 else name] = _plain(value)
            except Exception as e:  # whatever a value's own methods may raise
                self._background.warn(f"{name} is left out: {type(e).__name__}: {e}")
        step = record.get("step")
        if isinstance(step, int | float) and not isinstance(step, bool) and abs(step) < 1 << 53:
            self._background.record(record)

    def end(self) -> None:
        """Write what is left."""
        self._at_exit.cancel()
        self._background.close({})

    def open(self) -> None:
        """Do nothing: a file of a filesystem that failed never works again, so that each `send` opens it."""

    def send(self, records: list[trackers.Record]) -> None:
        """Append records; those that cannot be written wait for the next call."""
        self._waiting += records
        with contextlib.suppress(OSError):
            with self._path.open("a+b") as file:
                if not self._has_read:
                    self._begin(file)
                file.write(
                    b"".join(
                        json.dumps(self._with_best(record)).encode() + b"\n"
                        for record in self._waiting
                    )
                )
            self._waiting.clear()  # closed, which reports the errors of delayed writes

    def close(self, _: object) -> None:
        """Try a last time to write what waits. Raises OSError."""
        self.send([])
        if self._waiting:
            raise OSError(f"{len(self._waiting)} lines could not be written to {self._path}")

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

    def _with_best(self, record: trackers.Record) -> trackers.Record:
        for name in ("loss", "val_loss"):
            value = record.get(name)
            if isinstance(value, int | float) and value < self._best.get(name, (0, math.inf))[1]:
                self._best[name] = (record["step"], value)
        return record | ({"best": self._best} if self._best else {})


def _plain(value: typing.Any) -> object:
    """Return a value as JSON has it, NaN and infinities in Python's spelling. Raises whatever the value raises."""
    if hasattr(value, "item"):  # of torch, NumPy, JAX: one element
        value = value.item()
    if isinstance(value, str):
        return value[:1000]
    return (
        value
        if value is None or (isinstance(value, int) and abs(value) < 1 << 63)
        else float(value)
    )
