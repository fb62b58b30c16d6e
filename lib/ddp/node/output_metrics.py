"""Read numbers from rank 0's output by the texts of `--metric`; append them to metrics.jsonl.

A text is what stands around a number, with {} for the number, such as "loss: {}". It is no regular
expression: looking for it takes a time that a line's length bounds.

A line in which a text is found makes a record. Its step is what the text named `step` found last;
without such a text the lines with the first quantity are counted, over all attempts.
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
PLACE = "{}"  # of the number in a text
_PAUSE_S = 1.0
_TAIL_BYTES = 1 << 16
_NUMBER = re.compile(
    r" ?([-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[-+]?[0-9]+)?|[-+]?(?:nan|inf(?:inity)?)(?![a-z_]))",
    re.IGNORECASE,
)
_COLOURS = re.compile("\x1b\\[[0-9;]*m")
_ENDS = re.compile(b"[\r\n]+")  # a progress bar overwrites its line
Texts = collections.abc.Iterable[tuple[str, str]]


class Text:
    """What stands around a number in a line: `*` is any text, blanks are any number of blanks."""

    def __init__(self, text: str) -> None:
        """Raises ValueError, with what is wrong with the text."""
        before, place, after = _squeezed(text).partition(PLACE)
        if not place or PLACE in after:
            raise ValueError(f"write {PLACE} once, where the number stands")
        *self._first, self._last = before.split("*")
        if not self._last.strip():
            raise ValueError(f"write the text that stands right before {PLACE}")
        if "*" in after:
            raise ValueError(f"* may only stand before {PLACE}")
        self._after = after

    def find(self, line: str) -> float | None:
        """Return the first number in a line that has been squeezed; None if there is none."""
        start = 0
        for piece in self._first:
            at = _find(line, piece, start)
            if at < 0:
                return None
            start = at + len(piece)
        while (at := _find(line, self._last, start)) >= 0:
            number = _NUMBER.match(line, at + len(self._last))
            if number and line.startswith(self._after, number.end()):
                return float(number[1])
            start = at + 1
        return None


def _squeezed(line: str) -> str:
    """Remove colours, and make one blank of several."""
    return re.sub(r"\s+", " ", _COLOURS.sub("", line))


def _find(line: str, text: str, start: int) -> int:
    """Return where a text begins, not within a word (`loss` in `val_loss`), or -1."""
    at = line.find(text, start)
    while at > 0 and _is_in_word(text[:1]) and _is_in_word(line[at - 1]):
        at = line.find(text, at + 1)
    return at


def _is_in_word(letter: str) -> bool:
    return letter.isalnum() or letter == "_"


class Lines:
    """What the texts find in lines, as records of metrics.jsonl."""

    def __init__(self, texts: Texts) -> None:
        self._texts = {name: Text(text) for name, text in texts}
        self._first = next((name for name in self._texts if name != "step"), "")
        self._is_counted = "step" not in self._texts
        self.step = 0
        # Of each loss: step and value, for readers of the file's end
        self.best: dict[str, typing.Any] = {}

    def record(self, line: str) -> dict[str, typing.Any]:
        """Return the record of a line, or {} if no text is found in it."""
        line = _squeezed(line[: 4 * LONGEST_LINE])[:LONGEST_LINE]
        found: dict[str, typing.Any] = {}
        for name, text in self._texts.items():
            value = text.find(line)
            if value is not None:
                found[name] = value
        self._count(found)
        for name in {"loss", "val_loss"} & found.keys():
            if found[name] < self.best.get(name, (0, math.inf))[1]:
                self.best[name] = (self.step, found[name])
        if not found:
            return {}
        record: dict[str, typing.Any] = {"kind": "step", "step": self.step, **found}
        if self.best:
            record["best"] = self.best
        return record

    def _count(self, found: dict[str, typing.Any]) -> None:
        """Move on to the step of a line, and take it out of what was found."""
        if self._is_counted:
            self.step += self._first in found
            return
        step = found.pop("step", math.nan)
        if math.isfinite(step):
            self.step = int(step)

    def resume(self, tail: str) -> None:
        """Continue with the count and the lowest losses of earlier attempts' metrics.jsonl."""
        for line in tail.splitlines():
            with contextlib.suppress(ValueError, AttributeError, TypeError):
                record = json.loads(line)
                if self._is_counted and "step" in record:
                    self.step = int(record["step"])
                for name, (at, low) in record.get("best", {}).items():
                    self.best[name] = (int(at), float(low))


class Scanner:
    """Follows rank 0's output below a folder of logs; waits while the filesystem fails."""

    def __init__(self, logs: str, target: str, texts: Texts) -> None:
        self._logs = logs
        self._target = target
        self._lines = Lines(texts)
        # Up to where a file is read, and its line that has not ended
        self._files: dict[str, tuple[int, bytes]] = {}
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
