"""metrics.jsonl: all plotted or exported values, an object a line.

Documented in docs/reference/run-directory.md.
"""

import json
import os
import pathlib
import threading
import time
import typing

from ddptrain.ground import attempt, files
from ddptrain.records import trackers

FILE = "metrics.jsonl"

Record = dict[str, typing.Any]


class Metrics:
    """An attempt's lines of a metrics.jsonl, which the trackers get, too.

    `start` is the first record of this attempt. Its `step` is the one to continue from: records of
    later steps are dropped, except the starts of earlier attempts.
    """

    def __init__(
        self,
        run_dir: pathlib.Path,
        *,
        start: Record,
        sinks: trackers.Trackers | None = None,
    ) -> None:
        self.path = run_dir / FILE
        self._last_flush = time.monotonic()
        self._lock = threading.Lock()  # checkpoints are recorded from another thread
        own: Record = {"kind": "start", "time": time.time(), **start}
        name = os.environ.get(attempt.ATTEMPT)
        if name:
            own["attempt"] = name
        kept = _up_to(files.read_records(self.path), start["step"])
        with files.replacing(self.path) as file:
            for record in [*kept, own]:
                file.write(json.dumps(record).encode() + b"\n")
        self._file = self.path.open("a", encoding="utf-8")
        self._trackers = sinks or trackers.Trackers({})

    def add(self, record: Record) -> None:
        """Append a record. Readers elsewhere see it within some seconds."""
        with self._lock, files.naming(self.path):
            self._file.write(json.dumps(record) + "\n")
        if time.monotonic() - self._last_flush > 2:
            self.flush()
        self._trackers.record(record)

    def flush(self) -> None:
        """Hand the records to the filesystem."""
        with self._lock, files.naming(self.path):
            self._file.flush()
        self._last_flush = time.monotonic()

    def sync(self) -> None:
        """Make the records durable. Others may be added meanwhile."""
        self.flush()
        with files.naming(self.path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Make everything durable, and take no more records."""
        self.sync()
        with files.naming(self.path):
            self._file.close()


def _up_to(records: list[Record], step: int) -> list[Record]:
    """Return the records of the steps up to one, and all starts."""
    kept: list[Record] = []
    for record in records:
        if record.get("kind") == "start" or int(record.get("step", 0)) <= step:
            kept.append(record)
    return kept
