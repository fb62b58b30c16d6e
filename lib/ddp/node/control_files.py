"""The files that a job reads and writes in its run's control/, also while the filesystem fails."""

import contextlib
import json
import os
import pathlib
import re
import time
import typing

from ddp.node import checkpoints, spool, storage, time_limit
from ddp.node.started_job import StartedJob

_MAX_BYTES = 1 << 20
_OUTCOME = re.compile(r'"outcome": *"([a-z]*)"')


class ControlFiles:
    """The files of a job; what cannot be written stands in its log, too."""

    def __init__(self, job: StartedJob, shared: storage.Storage) -> None:
        self._job = job
        self._storage = shared
        self._prefix = f"{job.control}/{job.job_id}"
        self.last_failure = ""  # the reason of the last attempt that failed

    def write_hosts(self, hosts: list[str]) -> None:
        """Write the nodes in the order of their ranks."""
        self._write(f"{self._prefix}.hosts", " ".join(hosts) + "\n")

    def write_job_id(self) -> None:
        """Write the id of a sweep's job into the run of its element."""
        self._write(f"{self._job.control}/job", f"{self._job.job_id}\n")

    def read_retries(self) -> dict[str, int]:
        """Read how often the job was started again after which kind of fault; {} if unknown."""
        with contextlib.suppress(OSError, ValueError, AttributeError, TypeError):
            found: dict[str, typing.Any] = json.loads(self._read(f"{self._prefix}.retries"))
            return {name: int(count) for name, count in found.items()}
        return {}

    def write_retries(self, retries: dict[str, int]) -> None:
        """Write the counts for `read_retries` of the job's next start."""
        self._write(f"{self._prefix}.retries", json.dumps(retries) + "\n")

    def record_failure(self, attempt: str, kind: str, node: str, words: str) -> None:
        """Append the reason of a failed attempt, and log it."""
        self.last_failure = words
        when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self._append(f"{self._prefix}.failures", f"{when}\t{attempt}\t{kind}\t{node}\t{words}\n")
        spool.write(f"[FAILED] attempt={attempt} fault={kind} node={node}: {words}")

    def read_excluded(self) -> list[str]:
        """Read the nodes that the job has excluded in its earlier starts."""
        return self._read(f"{self._prefix}.excluded").split()

    def exclude(self, nodes: list[str]) -> None:
        """Append nodes for `read_excluded`."""
        self._append(f"{self._prefix}.excluded", "".join(f"{node}\n" for node in nodes))

    def read_mark(self) -> time_limit.Mark | None:
        """Read the start of the attempts that reached the time limit without progress."""
        return time_limit.parse(self._read(f"{self._prefix}.limits"))

    def write_mark(self, mark: time_limit.Mark) -> None:
        """Write the mark for `read_mark`."""
        self._write(f"{self._prefix}.limits", time_limit.dump(mark))

    def first_start(self) -> float:
        """Return when the run's first attempt began, 0 if that is now; note it for the next."""
        path = f"{self._job.control}/first-attempt"
        with contextlib.suppress(ValueError):
            return float(self._read(path))
        self._write(path, f"{time.time():.3f}\n")
        return 0.0

    def outcome_path(self, attempt: str) -> str:
        """Return the file with an attempt's outcome."""
        return f"{self._job.control}/{attempt}.outcome"

    def stop_path(self, attempt: str) -> str:
        """Return the file that asks the ranks of an attempt to save and leave."""
        return f"{self._job.control}/{attempt}.stop"

    def ask_to_stop(self, attempt: str, stop_by: float | None = None) -> None:
        """Ask the ranks of an attempt to save and leave, until a time if it is known.

        Raises OSError, FatalError.
        """
        path = self.stop_path(attempt)
        text = "" if stop_by is None else f"{stop_by:.0f}\n"
        self._storage.do(lambda: _write(path, text))

    def clear(self, attempt: str) -> bool:
        """Remove an earlier attempt's files; return whether the run has a checkpoint."""
        paths = (self.outcome_path(attempt), self.stop_path(attempt))
        return self._storage.do(lambda: _clear(paths, self._job.run_dir))

    def read_outcome(self, attempt: str) -> str:
        """Read how an attempt ended by its own account, "" if it left none."""
        found = _OUTCOME.search(self._read(self.outcome_path(attempt)))
        return found[1] if found else ""

    def write_outcome(self, attempt: str, outcome: str, exit_code: int, cause: str) -> None:
        """Write the outcome for ranks that wrote none: Slurm alone soon forgets a job."""
        found: dict[str, object] = {"outcome": outcome, "exit_code": exit_code}
        if cause:
            found["cause"] = cause
        self._write(self.outcome_path(attempt), json.dumps(found) + "\n")

    def was_done(self) -> bool:
        """Return whether the start of the job before this one ended as its ranks were done."""
        if not self._job.restarts:
            return False
        start = re.compile(rf"({self._job.job_id}\.r{self._job.restarts - 1}(?:t\d+)?)\.outcome")
        for name in self._names():
            found = start.fullmatch(name)
            if found and self.read_outcome(found[1]) == "done":
                return True
        return False

    def _names(self) -> list[str]:
        """Return the names of the files, [] without the folder. Raises OSError, FatalError."""
        with contextlib.suppress(FileNotFoundError):
            return self._storage.do(lambda: os.listdir(self._job.control))
        return []

    def read_lines(self, path: str) -> list[str]:
        """Read the lines of another file of the run. Raises OSError, FatalError."""
        return self._storage.do(lambda: _text(path)).splitlines()

    def _read(self, path: str) -> str:
        """Return the text of a file, "" if it does not exist. Raises OSError, FatalError."""
        with contextlib.suppress(FileNotFoundError):
            return self._storage.do(lambda: _text(path))
        return ""

    def _write(self, path: str, text: str) -> None:
        with contextlib.suppress(OSError):  # the log holds the same
            self._storage.do(lambda: _write(path, text))

    def _append(self, path: str, text: str) -> None:
        with contextlib.suppress(OSError):  # the log holds the same
            self._storage.do(lambda: _write(path, text, mode="a"))


def _text(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read(_MAX_BYTES)


def _write(path: str, text: str, *, mode: str = "w") -> None:
    with open(path, mode, encoding="utf-8") as file:
        file.write(text)


def _clear(paths: tuple[str, ...], run_dir: str) -> bool:
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
    return checkpoints.newest(pathlib.Path(run_dir)) is not None
