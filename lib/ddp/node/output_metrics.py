"""Read numbers from rank 0's output with the patterns of `--metric`, and append them to the run's metrics.jsonl.

A line that a pattern matches makes a record. Its step is what the pattern named `step` found last; without such a
pattern the lines with the first quantity are counted, over all attempts.
"""

import collections.abc
import contextlib
import json
import math
import os
import re
import threading
import time
import typing

from ddp.node import spool

LONGEST_LINE = 1000  # characters of a line that are searched
SLOW_S = 0.05  # of the processor's time for a line: a pattern that takes it is dropped
_PAUSE_S = 1.0
_TAIL_BYTES = 1 << 16
_NUMBER_ENDS = ".,;:eE+-"  # what a pattern for digits may also take of the text behind them
_COLOURS = re.compile("\x1b\\[[0-9;]*m")
_ENDS = re.compile(b"[\r\n]+")  # a progress bar overwrites its line
Patterns = collections.abc.Iterable[tuple[str, str]]


class Lines:
    """What the patterns find in lines of text, as records of metrics.jsonl."""

    def __init__(self, patterns: Patterns, note: spool.Note) -> None:
        self._patterns: dict[str, re.Pattern[str]] = {}
        self._note = note
        for name, pattern in patterns:
            try:
                self._patterns[name] = re.compile(pattern)
            except re.error as e:  # this node's Python may be older than the one that checked it
                note(f"--metric {name} is not read: {e}")
        self._first = next((name for name in self._patterns if name != "step"), "")
        self._is_counted = "step" not in self._patterns
        self.step = 0
        self.best: dict[
            str, typing.Any
        ] = {}  # of each loss: step and value, for readers of the file's end

    def record(self, line: str) -> dict[str, typing.Any]:
        """Return the record of a line; empty without a match."""
        found: dict[str, typing.Any] = {}
        line = _COLOURS.sub("", line)[:LONGEST_LINE]
        for name, pattern in list(self._patterns.items()):
            began = time.thread_time()
            match = pattern.search(line)
            if time.thread_time() - began > SLOW_S:
                self._note(f"--metric {name} is no longer read: it took too long for a line")
                del self._patterns[name]
            elif match is not None and (value := _number(match[1])) is not None:
                found[name] = value
        if self._is_counted:
            self.step += self._first in found
        elif math.isfinite(step := found.pop("step", math.nan)):
            self.step = int(step)
        for name in {"loss", "val_loss"} & found.keys():
            if found[name] < self.best.get(name, (0, math.inf))[1]:
                self.best[name] = (self.step, found[name])
        best = {"best": self.best} if self.best else {}
        return {"kind": "step", "step": self.step, **found, **best} if found else {}

    def resume(self, tail: str) -> None:
        """Go on with the count and the lowest losses of earlier attempts, from the end of their metrics.jsonl."""
        for line in tail.splitlines():
            with contextlib.suppress(ValueError, AttributeError, TypeError):
                record = json.loads(line)
                self.step = (
                    int(record["step"]) if self._is_counted and "step" in record else self.step
                )
                self.best |= {
                    name: (int(at), float(low))
                    for name, (at, low) in record.get("best", {}).items()
                }


class Scanner:
    """A thread that follows rank 0's output below a folder of logs; it waits for a filesystem that fails."""

    def __init__(self, logs: str, target: str, patterns: Patterns, note: spool.Note) -> None:
        self._logs, self._target = logs, target
        self._lines = Lines(patterns, note)
        self._files: dict[
            str, tuple[int, bytes]
        ] = {}  # up to where a file is read, and its line that has not ended
        self._waiting: list[str] = []
        self._has_read = False
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def close(self, timeout_s: float = spool.FLUSH_S) -> None:
        """Read the rest, and wait until it is written."""
        self._over.set()
        self._thread.join(timeout_s)

    def _work(self) -> None:
        began = time.time()
        is_last = False
        while not (is_last and not self._waiting):
            is_last = self._over.wait(_PAUSE_S)
            with contextlib.suppress(OSError):  # the next pass tries again
                self._begin()
                records = [
                    record
                    for path in self._outputs()
                    for record in self._read(path, is_last=is_last)
                ]
                now = time.time()
                for number, record in enumerate(
                    records, 1
                ):  # those of one pass are spread evenly over its time
                    record["time"] = began + (now - began) * number / len(records)
                    self._waiting.append(json.dumps(record))
                began = now
                self._write()

    def _begin(self) -> None:
        if self._has_read:
            return
        with contextlib.suppress(FileNotFoundError), open(self._target, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            tail = file.read()
            self._waiting += (
                [""] if tail and not tail.endswith(b"\n") else []
            )  # a crash cut the last line
            self._lines.resume(tail.decode(errors="replace"))
        self._has_read = True

    def _outputs(self) -> list[str]:
        """Return the files of rank 0: it is the first of its node."""
        tops = [
            top
            for top, _, names in os.walk(self._logs)
            if os.path.basename(top) == "0" and "stdout.log" in names
        ]
        return [f"{top}/{name}.log" for top in sorted(tops) for name in ("stdout", "stderr")]

    def _read(self, path: str, *, is_last: bool) -> collections.abc.Iterator[dict[str, typing.Any]]:
        offset, rest = self._files.get(path, (0, b""))
        with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
            file.seek(offset)
            while data := file.read(spool.CHUNK):
                offset += len(data)
                *lines, rest = _ENDS.split(rest + data)
                rest = rest[: 4 * LONGEST_LINE]
                yield from filter(
                    None, (self._lines.record(line.decode(errors="replace")) for line in lines)
                )
        if is_last and rest:
            yield from filter(None, [self._lines.record(rest.decode(errors="replace"))])
            rest = b""
        self._files[path] = (offset, rest)

    def _write(self) -> None:
        if self._waiting:
            with open(self._target, "a", encoding="utf-8") as file:
                file.write("".join(f"{line}\n" for line in self._waiting))
            self._waiting.clear()


def _number(text: str | None) -> float | None:
    with contextlib.suppress(ValueError):
        return float((text or "").strip().rstrip(_NUMBER_ENDS))
    return None
