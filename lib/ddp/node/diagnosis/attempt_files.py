"""The files of an attempt in its run's folder: the job's log and the ranks' files."""

import collections.abc
import contextlib
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


_OF_LAUNCHER = re.compile(
    rb"\[ENV\] (job|node)=|\[FATAL\] |srun: error: |failed \(exitcode: |Error waiting on exit |"
    + re.escape(rank_ends.SHORTAGE.encode())
)


_ATTEMPT = re.compile(r"(\d{1,18})\.r(\d{1,18})(?:t(\d{1,18}))?", re.ASCII)


def attempt_log(folder: pathlib.Path, job_id: int) -> list[str]:
    """Return the lines of a job's last attempt: the end of its log, after earlier lines of the job and its launcher.

    A rank that prints much goes on after another one has failed, so its output lies between that and the log's end.
    """
    path = folder / "logs" / f"{int(job_id)}.out"
    lines: list[str] = []
    with contextlib.suppress(OSError):
        last = small_files.tail(path, small_files.MAX_TAIL_BYTES)
        with small_files.opened(path) as file:
            size = os.fstat(file.fileno()).st_size
            begin = file.seek(max(0, size - MAX_SEARCHED_BYTES))
            data = file.read(max(0, size - begin - small_files.MAX_TAIL_BYTES))
        early = itertools.islice(filter(_OF_LAUNCHER.search, data.splitlines()), MAX_LAUNCHER_LINES)
        lines = [*(line[:4000].decode(errors="replace") for line in early), *last]
    begins = [index for index, line in enumerate(lines) if line.startswith("[ENV] job=")]
    return lines[begins[-1] :] if begins else lines


def per_node(folder: pathlib.Path) -> int:
    """Return how many ranks each node has; 1 if the run's record is unreadable."""
    with contextlib.suppress(OSError, ValueError):
        number = small_files.read_object(folder / "job.json").get("ranks_per_node")
        return number if isinstance(number, int) and number > 0 else 1
    return 1


def rank_logs(folder: pathlib.Path, job_id: int) -> list[small_files.Json]:
    """List the files with each rank's output in the job's last attempt."""
    found: list[small_files.Json] = []
    for path, rank, node in rank_files(folder, job_id, "std*.log"):
        with contextlib.suppress(OSError):
            about = path.lstat()
            if about.st_size and stat.S_ISREG(about.st_mode):
                found.append(
                    {"path": str(path), "node": node, "rank": rank, "written": about.st_mtime}
                )
    return sorted(found, key=lambda log: (log["rank"], log["path"]))


def rank_files(
    folder: pathlib.Path, job_id: int, name: str
) -> collections.abc.Iterator[tuple[pathlib.Path, int, int]]:
    """Yield the ranks' files of a name in the last attempt, each with its rank and its node's number."""
    ranks_per_node = per_node(folder)
    attempts = [path for path in (folder / "logs").glob(f"{int(job_id)}.r*") if path.is_dir()]
    for attempt in sorted(attempts, key=lambda path: attempt_order(path.name))[-1:]:
        for path in itertools.islice(
            attempt.glob(f"node-*/*/attempt_*/*/{name}"), 2 * MAX_RANK_LOGS
        ):
            with contextlib.suppress(ValueError):
                node = int(path.parents[3].name.removeprefix("node-"))
                yield path, node * ranks_per_node + int(path.parent.name), node


def attempt_order(name: str) -> tuple[int, int, int]:
    """Parse job, requeues and restarts since the last, of an attempt's name such as 12.r1t2; -1 for other names."""
    found = _ATTEMPT.fullmatch(name)
    return (int(found[1]), int(found[2]), int(found[3] or 0)) if found else (-1, -1, -1)
