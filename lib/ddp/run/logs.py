"""The logs of a run: last lines, new lines, and why a job failed. Call it in `Workspace.do`."""

import contextlib
import dataclasses
import errno
import os
import pathlib
import re

from ddp.node import small_files
from ddp.node.diagnosis import absent_ranks, attempt_files, evidence, excerpts, first_failure
from ddp.run import folder, untrusted
from ddp.run.model import Run

_LOG_BYTES = 256 * 1024
_MAX_FRAMES = 200  # lines of a traceback
_MAX_ELEMENTS = 10


def read_log(
    path: pathlib.Path, job_id: int, *, lines: int, rank: int | None
) -> tuple[str, list[str]]:
    """Return the path of a job's output, or of one rank's in its last attempt, and its last lines.

    The lines name the user's own paths.
    """
    found = _outputs(path, job_id, rank)
    if not found:
        raise FileNotFoundError(
            errno.ENOENT, f"no output of rank {rank}", str(path / "logs" / f"{job_id}.r*")
        )
    text: list[str] = []
    for place in found:
        text += small_files.tail(place, small_files.MAX_TAIL_BYTES)
    where = found[0] if rank is None else found[0].parent
    translate = folder.read_code_paths(path).translate
    return str(where), [translate(line) for line in text[-lines:]]


def follow_log(
    path: pathlib.Path, job_id: int, *, rank: int | None, offsets: dict[str, int]
) -> tuple[list[str], dict[str, int]]:
    """Read the whole lines behind `offsets`, and return them with the offsets behind them.

    A new file begins with its last lines.
    """
    lines: list[str] = []
    after = dict(offsets)
    for place in _outputs(path, job_id, rank):
        new, after[str(place)] = _new_lines(place, offsets.get(str(place)))
        lines += new
    translate = folder.read_code_paths(path).translate
    return [translate(line) for line in lines], after


def _new_lines(path: pathlib.Path, begin: int | None) -> tuple[list[str], int]:
    """Read the whole lines behind `begin`, or the last ones, at most MAX_TAIL_BYTES.

    Returns them and the offset behind them.
    """
    limit = small_files.MAX_TAIL_BYTES
    with contextlib.suppress(OSError), small_files.opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        last = max(0, size - limit)
        if begin is None or not 0 <= begin <= size:  # a new file, or one that was replaced
            begin = last
        begin = max(begin, last)
        file.seek(begin)
        data = file.read(limit)
        whole = data.rfind(b"\n") + 1
        if whole == 0 and len(data) == limit:  # one very long line
            whole = limit
        return data[:whole].decode(errors="replace").splitlines(), begin + whole
    return [], begin or 0


def last_lines(run: Run, lines: int = 40) -> list[str]:
    """Read the last lines of the log of a run's last job; [] if it is unreadable."""
    translate = folder.read_code_paths(run.folder).translate
    return [translate(line) for line in untrusted.tail(run.log_path, _LOG_BYTES)[-lines:]]


def _outputs(path: pathlib.Path, job_id: int, rank: int | None) -> list[pathlib.Path]:
    """Return a job's merged log, or the files of one rank in its last attempt, newest last."""
    if rank is None:
        return [path / "logs" / f"{job_id}.out"]
    found = [log for log in attempt_files.rank_logs(path, job_id) if log.rank == rank]
    return [log.path for log in sorted(found, key=lambda log: log.written)]


@dataclasses.dataclass(frozen=True)
class FirstFailure:
    """The rank that failed first with its last lines, or the ranks that never joined."""

    rank: int | None
    host: str
    lines: list[str]
    place: str  # in the user's code, such as train.py:21
    absent_ranks: list[int]
    absent_nodes: list[str]


def find_failure(path: pathlib.Path, job_id: int, lines: int) -> FirstFailure:
    """Find why a job failed, with the user's own paths."""
    in_order = untrusted.tail(path / "control" / f"{int(job_id)}.hosts", 1 << 20)
    hosts = " ".join(in_order).split()  # of the ranks
    found = evidence.gather(path, job_id, hosts=hosts, max_lines=_MAX_FRAMES)
    failure = first_failure.find(found)
    absent = absent_ranks.find(found, failure.lines)

    known = folder.read_code_paths(path)
    return FirstFailure(
        rank=failure.rank,
        host=found.host(failure.node),
        lines=[known.translate(line) for line in failure.lines[-lines:]],
        place=known.find(failure.lines),
        absent_ranks=absent.ranks,
        absent_nodes=absent.hosts,
    )


def find_failed_elements(path: pathlib.Path, array: int) -> list[tuple[int, str]]:
    """Find the elements of an array whose logs end with an error, with that line; at most ten."""
    logs: dict[int, pathlib.Path] = {}
    for log in (path / "logs").glob(f"{int(array)}_*.out"):
        number = log.stem.rpartition("_")[2]
        if number.isdecimal():
            logs[int(number)] = log

    failed: list[tuple[int, str]] = []
    for number, log in sorted(logs.items()):
        error = _error_of(log)
        if error:
            failed.append((number, error))
    return failed[:_MAX_ELEMENTS]


def _error_of(log: pathlib.Path) -> str:
    """Return the last error in the log of an element, or "" if it is done."""
    lines = [line.strip() for line in untrusted.tail(log, 65536) if line.strip()]
    errors = [line for line in lines if excerpts.is_error(line)]
    if not errors or lines[-1].startswith("[DONE]"):
        return ""
    return re.sub(r"^\w+:ddptrain:\[FATAL\] ", "", errors[-1])[:500]
