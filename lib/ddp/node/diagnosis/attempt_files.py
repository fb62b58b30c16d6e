"""The files that an attempt leaves in its run's folder: the job's log, and each rank's files."""

import collections.abc
import contextlib
import dataclasses
import itertools
import os
import pathlib
import re
import stat

from ddp.node import small_files
from ddp.node.diagnosis import rank_ends

MAX_RANK_LOGS = 2048
MAX_SEARCHED_BYTES = 64 * 1024 * 1024  # of a job's log
MAX_LAUNCHER_LINES = 10_000
_LONGEST_LINE = 4000
_OF_LAUNCHER = re.compile(
    rb"\[ENV\] (job|node)=|\[FATAL\] |srun: error: |failed \(exitcode: |Error waiting on exit |"
    + re.escape(rank_ends.SHORTAGE.encode())
)
_ATTEMPT = re.compile(r"(\d{1,18})\.r(\d{1,18})(?:t(\d{1,18}))?", re.ASCII)
_BEGIN = "[ENV] job="  # the supervisor's first line of an attempt


@dataclasses.dataclass(frozen=True)
class RankLog:
    """A file with a rank's output."""

    path: pathlib.Path
    rank: int
    node: int  # its number
    written: float  # when it was last written, in seconds since 1970


def attempt_log(folder: pathlib.Path, job_id: int) -> list[str]:
    """Return the lines of a job's last attempt.

    They are the end of its log, after earlier lines of the job and its launcher: a rank that
    prints much goes on after another one has failed, so its output lies between that and the
    log's end.
    """
    lines: list[str] = []
    with contextlib.suppress(OSError):
        lines = _read_log(folder / "logs" / f"{int(job_id)}.out")
    begins = [index for index, line in enumerate(lines) if line.startswith(_BEGIN)]
    return lines[begins[-1] :] if begins else lines


def _read_log(path: pathlib.Path) -> list[str]:
    """Return the last lines of a log, after the launchers' earlier lines. Raises OSError."""
    last = small_files.tail(path, small_files.MAX_TAIL_BYTES)
    with small_files.opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        begin = file.seek(max(0, size - MAX_SEARCHED_BYTES))
        data = file.read(max(0, size - begin - small_files.MAX_TAIL_BYTES))

    of_launcher = filter(_OF_LAUNCHER.search, data.splitlines())
    early = itertools.islice(of_launcher, MAX_LAUNCHER_LINES)
    return [*(line[:_LONGEST_LINE].decode(errors="replace") for line in early), *last]


def ranks_per_node(folder: pathlib.Path) -> int:
    """Return how many ranks each node has, by the run's record; 1 if that is unreadable."""
    try:
        number = small_files.read_object(folder / "job.json").get("ranks_per_node")
    except (OSError, ValueError):
        return 1
    return number if isinstance(number, int) and number > 0 else 1


def rank_logs(folder: pathlib.Path, job_id: int) -> list[RankLog]:
    """List the files with the ranks' output in the job's last attempt, by rank and name."""
    found: list[RankLog] = []
    for path, rank, node in rank_files(folder, job_id, "std*.log"):
        with contextlib.suppress(OSError):
            about = path.lstat()
            if about.st_size and stat.S_ISREG(about.st_mode):
                found.append(RankLog(path, rank, node, about.st_mtime))
    return sorted(found, key=lambda log: (log.rank, str(log.path)))


def rank_files(
    folder: pathlib.Path, job_id: int, name: str
) -> collections.abc.Iterator[tuple[pathlib.Path, int, int]]:
    """Yield the ranks' files of a name in the last attempt, with rank and node's number."""
    attempts = [path for path in (folder / "logs").glob(f"{int(job_id)}.r*") if path.is_dir()]
    if not attempts:
        return
    last = max(attempts, key=lambda path: attempt_order(path.name))

    per_node = ranks_per_node(folder)
    paths = last.glob(f"node-*/*/attempt_*/*/{name}")
    for path in itertools.islice(paths, 2 * MAX_RANK_LOGS):
        with contextlib.suppress(ValueError):
            node = int(path.parents[3].name.removeprefix("node-"))
            yield path, node * per_node + int(path.parent.name), node


def attempt_order(name: str) -> tuple[int, int, int]:
    """Return job, requeues and restarts of a name such as 12.r1t2; -1 for other names."""
    found = _ATTEMPT.fullmatch(name)
    if found is None:
        return -1, -1, -1
    return int(found[1]), int(found[2]), int(found[3] or 0)
