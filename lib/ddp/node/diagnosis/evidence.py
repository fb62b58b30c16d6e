"""The evidence of why an attempt failed, gathered from its files before any rule judges it."""

import contextlib
import dataclasses
import pathlib
import re
import signal

from ddp.node import small_files
from ddp.node.diagnosis import attempt_files, messages, rank_ends, rank_errors

MAX_CHAIN = 200  # lines of a rank that are searched for what led to its last error
_MAX_RECORDS_BYTES = 65536
# Printed by task.py and its children, before any rank
_COMPLAINT = re.compile(r"(?:\d+: )?\[FATAL\] (\S+): (.*)")
_NODE_FAILURE = re.compile(r"srun: error: Node failure on (\S+)")
_STARTED = re.compile(r"(?:\d+: )?\[ENV\] node=(\S+) ")
# Printed by an agent of torchrun whose ranks all exited with 0
_LEFT_EARLY = re.compile(r"(\d+): .*Error waiting on exit barrier")
# Printed by spool.py and storage.py
_AWAY = re.compile(
    r"(?:\d+: )?\[ENV\] (\S+): "
    r"(?:output cannot be written|\S+ does not respond|\S+ lost the files that were open) "
    r"\(([^)]*)\)"
)
_FULL = ("No space left on device", "Disk quota exceeded")  # strerror(3)'s: nothing is lost


@dataclasses.dataclass(frozen=True)
class Evidence:
    """The traces of a job's last attempt; nodes have names, and numbers in the ranks' order."""

    folder: pathlib.Path  # of the run
    hosts: list[str]  # names of the nodes
    ranks_per_node: int
    max_lines: int  # of a rank's error
    log: list[str]  # of the job
    recorded: str  # the fault of filesystem or network that the job itself recorded, or ""
    complaints: dict[str, str]  # why a node could not start its ranks, by name
    lost: list[str]  # names of the nodes that Slurm lost
    away: dict[str, str]  # how a node missed the shared filesystem first, by name
    started: set[str]  # names of the nodes that started their ranks
    left_early: list[int]  # numbers of the nodes whose ranks all succeeded while others went on
    ends: list[rank_ends.RankEnd]
    errors: list[rank_errors.Failure]
    outputs: dict[int, list[str]]  # of the ranks that report no error
    outcome: small_files.Json  # the payload's; {}: none

    @property
    def exited(self) -> list[rank_ends.RankEnd]:
        """Return the ends of ranks by an exit code."""
        return [end for end in self.ends if end.code >= 0]

    @property
    def signalled(self) -> list[rank_ends.RankEnd]:
        """Return the ends of ranks by a signal."""
        return [end for end in self.ends if end.code < 0]

    @property
    def own_errors(self) -> list[rank_errors.Failure]:
        """Return the errors that report more than the loss of another rank."""
        return [error for error in self.errors if not error.is_peers]

    @property
    def reporting(self) -> tuple[int, ...]:
        """Return the numbers of the nodes with any error."""
        nodes = {error.node for error in self.errors if error.node is not None}
        return tuple(sorted(nodes))

    @property
    def is_end_explained(self) -> bool:
        """Return whether a rank that exited by itself has reported its own error."""
        explained = {error.rank for error in self.own_errors}
        return any(end.rank in explained for end in self.exited)

    def host(self, node: int | None) -> str:
        """Return the name of the node with this number, "" if it is unknown."""
        if node is None or node >= len(self.hosts):
            return ""
        return self.hosts[node]


def gather(
    folder: pathlib.Path,
    job_id: int,
    *,
    hosts: list[str],
    attempt: str = "",
    max_lines: int = MAX_CHAIN,
) -> Evidence:
    """Gather the evidence of a job's last attempt. Raises OSError.

    Without the attempt's name the payload's outcome is left out.
    """
    log = attempt_files.attempt_log(folder, job_id)
    per_node = attempt_files.ranks_per_node(folder)
    errors, outputs = rank_errors.read(folder, job_id, max_lines)
    shortages = rank_ends.shortages(log)
    return Evidence(
        folder=folder,
        hosts=hosts,
        ranks_per_node=per_node,
        max_lines=max_lines,
        log=log,
        recorded=_read_recorded(folder, job_id, log),
        complaints=_find_complaints(log),
        lost=_find_all(_NODE_FAILURE, log),
        away=_find_away(log),
        started=set(_find_all(_STARTED, log)),
        left_early=[int(number) for number in _find_all(_LEFT_EARLY, log)],
        ends=rank_ends.parse(log, per_node),
        errors=[_with_shortage(error, shortages) for error in errors],
        outputs=outputs,
        outcome=_read_outcome(folder, attempt),
    )


def _find_all(pattern: re.Pattern[str], log: list[str]) -> list[str]:
    """Return the first group of each line that the pattern matches."""
    matches = (pattern.match(line) for line in log)
    return [found[1] for found in matches if found]


def _find_complaints(log: list[str]) -> dict[str, str]:
    """Return why nodes could not start their ranks, by name."""
    complaints: dict[str, str] = {}
    for line in log:
        if found := _COMPLAINT.match(line):
            complaints[found[1]] = found[2]
    return complaints


def _find_away(log: list[str]) -> dict[str, str]:
    """Return the nodes that missed the shared filesystem, each with the first reason."""
    away: dict[str, str] = {}
    for line in log:
        found = _AWAY.match(line)
        if found and found[2] not in _FULL:
            away.setdefault(found[1], found[2])
    return away


def _read_recorded(folder: pathlib.Path, job_id: int, log: list[str]) -> str:
    """Return the fault of filesystem or network that the job itself recorded, or ""."""
    path = folder / "control" / f"{int(job_id)}.failures"
    try:
        last = small_files.tail(path, _MAX_RECORDS_BYTES)[-1:]
    except OSError:
        return ""
    fields = last[0].split("\t") if last else []
    if len(fields) != 5 or not log:
        return ""
    _, attempt, kind, _, words = fields
    is_of_attempt = f" attempt={attempt} " in log[0]
    return words if is_of_attempt and kind in ("filesystem", "network") else ""


def _read_outcome(folder: pathlib.Path, attempt: str) -> small_files.Json:
    if attempt:
        with contextlib.suppress(OSError, ValueError):
            return small_files.read_object(folder / "control" / f"{attempt}.outcome")
    return {}


def _with_shortage(error: rank_errors.Failure, shortages: dict[int, str]) -> rank_errors.Failure:
    """Add the shortage of memory that killed a worker of DataLoader to its rank's error."""
    shortage = shortages.get(error.node or 0)
    if shortage is None or not messages.is_lost_worker(error.lines[-1]):
        return error
    line = f"DataLoader worker {rank_ends.describe(-signal.SIGKILL, shortage)}"
    return dataclasses.replace(error, lines=[*error.lines[:-1], line])
