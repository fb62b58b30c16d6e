"""Read numbers from rank 0's output, and append them to metrics.jsonl.

The texts of `--metric` say which; without them the numbers of known trainers are found, unless the
program writes to metrics.jsonl itself.

A text is a number's surroundings, with {} for the number, such as "loss: {}". It is not a regular
expression, so that the line's length bounds the time of a search.

A line that contains a text makes a record. Its step is the last number of the text named `step`;
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

from ddp.node import spool, trainer_outputs

LONGEST_LINE = 1000  # characters of a line that are searched
PLACE = "{}"  # of the number in a text
_PAUSE_S = 1.0
_LOOKING_S = 10.0  # between two looks for files of trainers
_PATIENCE = 12  # looks that found nothing; then they are six times as rare
_TAIL_BYTES = 1 << 16
_NUMBER = re.compile(
    r" ?([-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[-+]?[0-9]+)?|[-+]?(?:nan|inf(?:inity)?)(?![a-z_]))",
    re.IGNORECASE,
)
_COLOURS = re.compile("\x1b\\[[0-9;]*m")
_ENDS = re.compile(b"[\r\n]+")  # a progress bar overwrites its line
Texts = collections.abc.Iterable[tuple[str, str]]


class Text:
    """The text around a number in a line: `*` is any text, blanks are any number of blanks."""

    def __init__(self, text: str) -> None:
        """Raises ValueError, which says what is wrong with the text."""
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
    """A parser that makes records of metrics.jsonl from lines that contain the texts."""

    def __init__(self, texts: Texts) -> None:
        self._texts = {name: Text(text) for name, text in texts}
        self._first = next((name for name in self._texts if name != "step"), "")
        self._is_counted = "step" not in self._texts
        self.has_texts = bool(self._texts)
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
        if self._is_counted:
            record["counted"] = True
        if self.best:
            record["best"] = self.best
        return record

    def _count(self, found: dict[str, typing.Any]) -> None:
        """Move on to a line's step, and remove it from the numbers found."""
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

    def __init__(
        self, logs: str, target: str, texts: Texts, places: collections.abc.Iterable[str] = ()
    ) -> None:
        """Without texts, look for the output of known trainers, and their files in `places`."""
        self._logs = logs
        self._target = target
        self._lines = Lines(texts)
        self._places = list(places)
        self._trainer: _Trainer | None = None
        self._size: int | None = None  # of the target, as this program left it
        self._is_under_way = False  # the first record of this attempt is written
        # How far each file has been read, and its last line if it has not ended
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
        with contextlib.suppress(OSError):
            self._begin()  # lines that are there already are not this attempt's
        is_last = False
        while not (is_last and not self._waiting):
            is_last = self._over.wait(_PAUSE_S)
            with contextlib.suppress(OSError):  # the next pass tries again
                self._begin()
                if self._trainer is not None and self._is_written_by_program():
                    return
                records = self._read_all(is_last=is_last)
                now = time.time()
                # The records of one pass are spread evenly over its time
                for number, record in enumerate(records, 1):
                    record.setdefault("time", began + (now - began) * number / len(records))
                    self._add(record)
                began = now
                self._write()

    def _read_all(self, *, is_last: bool) -> list[dict[str, typing.Any]]:
        """Return the records that are new in rank 0's output, or in the files of its trainer."""
        records: list[dict[str, typing.Any]] = []
        for path in self._outputs():
            records += self._read(path, is_last=is_last)
        if self._trainer is not None:
            records += self._trainer.take(is_last=is_last)
        return records

    def _add(self, record: dict[str, typing.Any]) -> None:
        if not self._is_under_way:
            record["begins"] = True  # an attempt: the pause before it belongs to no step
            self._is_under_way = True
        self._waiting.append(json.dumps(record))

    def _is_written_by_program(self) -> bool:
        """Return whether the program itself writes to metrics.jsonl."""
        size = 0
        with contextlib.suppress(FileNotFoundError):
            size = os.stat(self._target).st_size
        return size != self._size

    def _begin(self) -> None:
        if self._has_read:
            return
        self._size = 0
        with contextlib.suppress(FileNotFoundError), open(self._target, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            tail = file.read()
            self._waiting += (
                [""] if tail and not tail.endswith(b"\n") else []
            )  # a crash cut the last line
            self._size = file.tell()
            self._lines.resume(tail.decode(errors="replace"))
        if not self._lines.has_texts:
            self._trainer = _Trainer(self._places, self._lines)
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
                yield from self._take(path, lines)
        if is_last and rest:
            yield from self._take(path, [rest])
            rest = b""
        self._files[path] = (offset, rest)

    def _take(
        self, path: str, lines: list[bytes]
    ) -> collections.abc.Iterator[dict[str, typing.Any]]:
        """Yield the records of lines; a known trainer's come later, once their step is known."""
        stream = os.path.basename(path).removesuffix(".log")
        for line in lines:
            text = line.decode(errors="replace")
            if self._trainer is not None:
                self._trainer.add_line(stream, text)
            elif record := self._lines.record(text):
                yield record

    def _write(self) -> None:
        if self._waiting:
            with open(self._target, "a", encoding="utf-8") as file:
                file.write("".join(f"{line}\n" for line in self._waiting))
                self._size = file.tell()
            self._waiting.clear()


class _Trainer:
    """The records of a known trainer, from its output, or else from a file that it writes."""

    def __init__(self, places: list[str], before: Lines) -> None:
        """`before` has the step and the best losses of earlier attempts, from metrics.jsonl."""
        self._printed = trainer_outputs.Printed(before.step)
        self._files = trainer_outputs.Files(places)
        self._is_printing = False
        self._looked_at = time.monotonic()
        self._num_looks = 0
        self._best = before.best

    def add_line(self, stream: str, line: str) -> None:
        """Take a line of rank 0's output."""
        self._printed.add_line(stream, line)

    def take(self, *, is_last: bool) -> list[dict[str, typing.Any]]:
        """Return the records that are new."""
        records = self._printed.take(is_last=is_last)
        self._is_printing = self._is_printing or bool(records)
        if not self._is_printing and (is_last or self._is_time_to_look()):
            records = self._files.take()
            self._num_looks = 0 if records else self._num_looks + 1
        for record in records:
            self._note_best(record)
        return records

    def _is_time_to_look(self) -> bool:
        pause_s = _LOOKING_S if self._num_looks < _PATIENCE else 6 * _LOOKING_S
        if time.monotonic() - self._looked_at < pause_s:
            return False
        self._looked_at = time.monotonic()
        return True

    def _note_best(self, record: dict[str, typing.Any]) -> None:
        for name in {"loss", "val_loss"} & record.keys():
            if record[name] < self._best.get(name, (0, math.inf))[1]:
                self._best[name] = (record["step"], record[name])
        if self._best:
            record["best"] = dict(self._best)
