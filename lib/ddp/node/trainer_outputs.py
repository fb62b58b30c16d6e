"""The figures that known trainers print or write, found without `--metric`.

transformers' Trainer and TRL print dictionaries, and a progress bar with the step. Lightning and
Fabric write metrics.csv, the Trainer trainer_state.json, and each of them, Accelerate too, event
files of TensorBoard. Hydra only moves these files to a folder of its own.
"""

import collections
import csv
import io
import itertools
import json
import math
import os
import pathlib
import re
import struct
import typing

from ddp.node import small_files

Record = dict[str, typing.Any]
MAX_FOLDERS = 300  # of one look for files, and entries of each folder
MAX_ENTRIES = 500
MAX_DEPTH = 8  # of folders: project, outputs, Hydra's date and time, lightning_logs, version
MAX_BYTES = 64 << 20  # of a file
_MOST_NAMES = 20  # of a record
_NO_FOLDERS = frozenset(("__pycache__", "wandb", "mlruns", ".git", "control", "program"))
_PAIR = re.compile(
    r"'([\w/.@-]{1,64})': '?([-+]?(?:\d+\.?\d*(?:e[-+]?\d+)?|\.\d+|nan|inf))'?[,}]", re.IGNORECASE
)
# tqdm's, without a description: 40%|####   | 8/20 [00:01<00:02, ...
_BAR = re.compile(r" *\d{1,3}%\|.*\| (\d{1,15})/(\d{1,15}) \[")
_UP = "\x1b[A"  # to the bar above
_LOSS = frozenset(("loss", "train_loss", "train/loss", "train_loss_step", "training_loss"))
_VAL_LOSS = frozenset("val_loss eval_loss valid_loss val/loss eval/loss validation_loss".split())
_RATE = frozenset(("lr", "learning_rate", "train/learning_rate"))
_STEPS = ("step", "global_step", "iteration", "iter")
_DROPPED = ("_runtime", "_per_second", "/time", "hp_metric", "total_flos")
_EVENTS = "events.out.tfevents."


def rename(name: str) -> str:
    """Return our name for a quantity of another program."""
    if name in _LOSS:
        return "loss"
    if name in _VAL_LOSS:
        return "val_loss"
    return "lr" if name in _RATE else name


def _as_record(values: dict[str, float]) -> Record:
    """Return figures under our names, as a step's or an evaluation's; {} without a loss."""
    found: Record = {}
    for name, value in values.items():
        if name not in _STEPS and not name.endswith(_DROPPED) and len(found) < _MOST_NAMES:
            found.setdefault(rename(name), value)
    if "loss" in found:
        return {"kind": "step", **found}
    return {"kind": "eval", **found} if "val_loss" in found else {}


class Printed:
    """Finds the dictionaries that rank 0 prints, and their steps in the progress bar.

    tqdm writes a dictionary by clearing the bar, and showing it again behind it.
    """

    def __init__(self, counted: int = 0) -> None:
        self._figures: collections.deque[Record] = collections.deque()
        self._steps: collections.deque[int] = collections.deque()
        self._is_cleared = False
        self._total = 0
        self._counted = counted
        self._has_bar = False
        self._passes = 0  # since figures began to wait for their step

    def add_line(self, stream: str, line: str) -> None:
        """Take a line, ended by a newline or a carriage return."""
        if stream == "stderr":
            self._look_for_bar(line)
        if line.startswith("{'") and line.rstrip().endswith("}"):
            self._add_figures(line)

    def _look_for_bar(self, line: str) -> None:
        bar = _BAR.match(line)
        if not line or line == _UP:
            return
        if bar is None:
            self._is_cleared = line.isspace()  # a bar that ends has _UP behind its blanks
            return
        step, total = map(int, bar.groups())
        if self._is_cleared and (not self._total or self._total == total):
            self._total = total
            self._steps.append(step)
        self._is_cleared = False

    def _add_figures(self, line: str) -> None:
        values = {name: float(text) for name, text in _PAIR.findall(line)}
        if "train_runtime" in values:  # the Trainer's summary
            return
        record = _as_record(values)
        if not record:
            return
        step = next((values[name] for name in _STEPS if name in values), math.nan)
        if math.isfinite(step):
            record["step"] = int(step)
        self._figures.append(record)

    def take(self, *, is_last: bool = False) -> list[Record]:
        """Return the records whose step is known by now; without a bar they are counted."""
        taken: list[Record] = []
        self._passes += bool(self._figures)
        while self._figures:
            if "step" not in self._figures[0] and not self._set_step(is_last=is_last):
                break
            taken.append(self._figures.popleft())
        if not self._figures:
            self._passes = 0
        return taken

    def _set_step(self, *, is_last: bool) -> bool:
        record = self._figures[0]
        if self._steps:
            self._has_bar = True
            record["step"] = self._steps.popleft()
            record["total_steps"] = self._total
            return True
        if self._passes < 2 and not is_last:  # its bar may be on the way
            return False
        if self._has_bar:  # a line that was lost
            self._figures.popleft()
            return bool(self._figures) and ("step" in self._figures[0] or bool(self._steps))
        self._counted += record["kind"] == "step"
        record["step"] = self._counted
        record["counted"] = True
        return True


class Files:
    """Follows the file with a loss that an attempt writes below some folders."""

    def __init__(self, places: list[str]) -> None:
        self._places = places
        # Sizes of the files that were there before
        self._before = {path: _size(path) for path in self._find()}
        self._chosen = ""
        self._num_records = 0
        self._last_step = -1

    def take(self) -> list[Record]:
        """Return the records that are new."""
        if self._chosen and not self._chosen.endswith("trainer_state.json"):
            return self._new_records(self._chosen)
        for path in sorted(self._find(), key=_preference):
            records = self._new_records(path) if self._is_new(path) else []
            if records:
                self._chosen = path
                return records
        return []

    def _is_new(self, path: str) -> bool:
        return _size(path) != self._before.get(path)

    def _new_records(self, path: str) -> list[Record]:
        records = _read(path, self._before.get(path, 0))
        if path.endswith("trainer_state.json"):  # each has the whole history
            fresh = [one for one in records if one["step"] > self._last_step]
        else:
            fresh = records[self._num_records :]
            self._num_records = len(records)
        if fresh:
            self._last_step = max(one["step"] for one in fresh)
        return fresh

    def _find(self) -> list[str]:
        """Return the files of trainers below the folders, as far as a look may go."""
        found: list[str] = []
        remaining = collections.deque((place, 0) for place in dict.fromkeys(self._places))
        for _ in range(MAX_FOLDERS):
            if not remaining:
                break
            folder, depth = remaining.popleft()
            for entry in _entries(folder):
                if entry.is_dir(follow_symlinks=False):
                    if depth < MAX_DEPTH and entry.name not in _NO_FOLDERS:
                        remaining.append((entry.path, depth + 1))
                elif _preference(entry.path) < len(_READERS):
                    found.append(entry.path)
        return list(dict.fromkeys(found))


def _entries(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(itertools.islice(entries, MAX_ENTRIES))
    except OSError:
        return []


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def _preference(path: str) -> int:
    """Return the place of a file's kind in _READERS; the number of kinds for others."""
    name = os.path.basename(path)
    for place, (pattern, _) in enumerate(_READERS):
        if name == pattern or (pattern == _EVENTS and name.startswith(pattern)):
            return place
    return len(_READERS)


def _read(path: str, skipped: int) -> list[Record]:
    """Return the records of a file after an earlier attempt's; [] if it is unreadable."""
    read = _READERS[_preference(path)][1]
    try:
        with small_files.opened(pathlib.Path(path)) as file:
            return read(file.read(MAX_BYTES), skipped)
    except (OSError, ValueError, KeyError, TypeError, RecursionError, struct.error, csv.Error):
        return []


def _read_csv(data: bytes, skipped: int) -> list[Record]:
    num_skipped = max(0, data[:skipped].count(b"\n") - 1)
    records: list[Record] = []
    whole = data[: data.rfind(b"\n") + 1].decode(errors="replace")
    for row in itertools.islice(csv.DictReader(io.StringIO(whole)), num_skipped, None):
        values: dict[str, float] = {}
        for name, text in row.items():
            if name and text:
                values[name] = float(text)
        record = _as_record(values)
        if record and "step" in values:
            records.append({**record, "step": int(values["step"])})
    return records


def _read_state(data: bytes, _: int) -> list[Record]:
    state = json.loads(data)
    records: list[Record] = []
    for entry in state["log_history"]:
        values = {name: float(value) for name, value in entry.items() if _is_number(value)}
        record = _as_record(values)
        if record and "train_runtime" not in values:
            total = int(state.get("max_steps") or 0)
            records.append({**record, "step": int(values["step"]), "total_steps": total})
    return records


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _read_events(data: bytes, skipped: int) -> list[Record]:
    """Return the scalars of an event file: TFRecords of tensorflow.Event, event.proto."""
    records: list[Record] = []
    at = skipped
    while at + 12 <= len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        event = data[at + 12 : at + 12 + length]  # its length and a checksum go before
        at += 16 + length
        if len(event) < length:
            break
        fields = dict(_fields(event))
        values = _scalars(fields.get(5, b""))
        record = _as_record(values)
        if record and 1 in fields:
            (time,) = struct.unpack("<d", fields[1])
            records.append({**record, "step": int(fields.get(2, 0)), "time": time})
    return records


def _scalars(summary: bytes) -> dict[str, float]:
    values: dict[str, float] = {}
    for number, value in _fields(summary):
        if number == 1:  # Summary.Value: the tag, and a simple_value
            parts = dict(_fields(value))
            if 1 in parts and 2 in parts:
                values[parts[1].decode()] = struct.unpack("<f", parts[2])[0]
    return values


def _fields(message: bytes) -> typing.Iterator[tuple[int, typing.Any]]:
    """Iterate over the fields of a protobuf message: integers, or bytes."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        value: int | bytes
        if key & 7 == 0:
            value, at = _varint(message, at)
        else:
            size = {1: 8, 5: 4}.get(key & 7, 0)
            if key & 7 == 2:
                size, at = _varint(message, at)
            value = message[at : at + size]
            at += max(size, 1)
        yield key >> 3, value


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 64, 7):
        if at >= len(data):
            raise ValueError("cut off")
        value |= (data[at] & 127) << shift
        at += 1
        if not data[at - 1] & 128:
            break
    return value, at


_READERS: tuple[tuple[str, typing.Callable[[bytes, int], list[Record]]], ...] = (
    (_EVENTS, _read_events),
    ("metrics.csv", _read_csv),
    ("trainer_state.json", _read_state),
)
