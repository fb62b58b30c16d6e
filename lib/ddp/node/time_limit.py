"""Check whether a run that reaches its time limit makes progress.

Otherwise each attempt would repeat the last one. A run makes progress if an attempt began at a
later step than the one before, or if a file appeared or changed in the run's folder, in the
folder that the ranks start in, or in one that their command names. Logs, metrics and caches do
not count: programs write them in any case.
"""

import dataclasses
import json
import os
import time

ATTEMPTS = 2  # that may reach the limit without progress
SEARCHING_S = 6.0  # within Slurm's KillWait: a larger tree counts as progress
_READ_BYTES = 1 << 16
_NO_FOLDERS = ("__pycache__", "wandb", "mlruns", ".git")
_NO_ENDINGS = (".pyc", ".log", ".out", ".err", ".lock")
_NO_BEGINNING = "events.out.tfevents"
_OURS = ("control", "logs", "program", "profile", "metrics.jsonl")  # at the top of a run's folder


@dataclasses.dataclass(frozen=True)
class Mark:
    """The start of attempts that reached the limit without progress."""

    since: float  # the time
    step: int  # the first step that was logged; -1: none was
    attempts: int  # how many there are


def parse(text: str) -> Mark | None:
    """Return the mark in a file's text; None if it has none."""
    try:
        found = json.loads(text)
        return Mark(float(found["since"]), int(found["step"]), int(found["attempts"]))
    except (ValueError, KeyError, TypeError):
        return None


def dump(mark: Mark) -> str:
    """Serialize the mark for `parse`."""
    return json.dumps(dataclasses.asdict(mark)) + "\n"


def folders(run_dir: str, workdir: str, words: list[str]) -> list[str]:
    """Return the run's folder, the one that the ranks start in, and those in their command."""
    named = [word.rpartition("=")[2] for word in words]
    found = [run_dir, workdir]
    for path in named:
        if path.startswith("/") and path.strip("/") and os.path.isdir(path):
            found.append(path)
    return list(dict.fromkeys(os.path.realpath(path) for path in found))


def has_saved(run_dir: str, places: list[str], since: float) -> bool:
    """Return whether a file below these folders is newer than `since`.

    True if the search takes too long.
    """
    until = time.monotonic() + SEARCHING_S
    top = os.path.realpath(run_dir)
    for place in places:
        for folder, names, files in os.walk(place):
            is_top = folder == top
            names[:] = _counted(names, is_top=is_top)
            for name in _counted(files, is_top=is_top):
                if _is_newer(os.path.join(folder, name), since):
                    return True
            if time.monotonic() > until:
                return True
    return False


def _counted(names: list[str], *, is_top: bool) -> list[str]:
    """Return the names of the files and folders that count as progress."""
    return [name for name in names if not _is_ignored(name, is_top=is_top)]


def _is_ignored(name: str, *, is_top: bool) -> bool:
    if is_top and name in _OURS:
        return True
    return name in _NO_FOLDERS or name.endswith(_NO_ENDINGS) or name.startswith(_NO_BEGINNING)


def _is_newer(path: str, since: float) -> bool:
    try:
        return os.lstat(path).st_mtime > since
    except OSError:
        return False


def first_step(path: str, offset: int) -> int:
    """Return the first step that metrics.jsonl has from `offset` on; -1 if it has none."""
    try:
        with open(path, "rb") as file:
            is_shorter = file.seek(0, os.SEEK_END) < offset  # it was written again
            file.seek(0 if is_shorter else offset)
            text = file.read(_READ_BYTES)
    except OSError:
        return -1
    for line in text.splitlines():
        try:
            record = json.loads(line)
            # A count of lines goes on over all attempts
            return -1 if record.get("counted") else int(record["step"])
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
    return -1


def size(path: str) -> int:
    """Return the size of a file; 0 if it does not exist."""
    try:
        return os.stat(path).st_size
    except OSError:
        return 0
