"""The errors that ranks report in their error files, or without one in their output."""

import contextlib
import dataclasses
import pathlib
import typing

from ddp.node import small_files
from ddp.node.diagnosis import attempt_files, excerpts, messages, refusals

_LOG_BYTES = 32768


@dataclasses.dataclass(frozen=True)
class Failure:
    """The last lines of a rank that failed; without a rank, of the job's log."""

    rank: int | None
    node: int | None
    lines: list[str]
    at: float = 0.0  # in seconds since 1970
    is_peers: bool = False  # it reports the loss of another rank
    reporting: tuple[int, ...] = ()  # numbers of the nodes with any error
    refused: refusals.Refusal | None = None  # by its error file


def read(
    folder: pathlib.Path, job_id: int, max_lines: int
) -> tuple[list[Failure], dict[int, list[str]]]:
    """Return the errors that ranks of the last attempt report, and the others' output by rank."""
    errors: list[Failure] = []
    for path, rank, node in attempt_files.rank_files(folder, job_id, "error.json"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            errors.append(_read_error_file(path, rank, node, max_lines))

    outputs: dict[int, list[str]] = {}
    recorded = {error.rank for error in errors}
    logs = attempt_files.rank_logs(folder, job_id)[: attempt_files.MAX_RANK_LOGS]
    for log in sorted(logs, key=_is_stderr):  # sys.exit("why") writes there
        if log.rank in recorded:
            continue
        text = [line for line in small_files.tail(log.path, _LOG_BYTES) if line.strip()]
        if excerpts.has_error(text):
            errors.append(_read_output(log, text, max_lines))
        else:
            outputs.setdefault(log.rank, []).extend(text)
    return errors, outputs


def _is_stderr(log: attempt_files.RankLog) -> bool:
    return log.path.name == "stderr.log"


def _read_error_file(path: pathlib.Path, rank: int, node: int, max_lines: int) -> Failure:
    """Read an error file. Raises OSError, and other errors if its content is unexpected.

    torch has written this format since 1.9
    (torch/distributed/elastic/multiprocessing/errors/error_handler.py); the payload's files have
    more (error_file.py).
    """
    held = small_files.read_object(path)["message"]
    about = typing.cast(small_files.Json, held) if isinstance(held, dict) else {"message": held}
    message = str(about["message"])
    more: small_files.Json = about.get("extraInfo") or {}

    text = str(more.get("py_callstack") or message).splitlines()
    if not any(line.strip() for line in text):
        text = [message or "an error without a message"]
    lines = excerpts.last_error(text, max_lines)

    at = float(more.get("timestamp") or path.lstat().st_mtime)
    is_peers = (
        more.get("of_peer") is True
        or messages.reports_peer(lines[-1])
        or messages.reports_peer(message)
    )
    return Failure(rank, node, lines, at, is_peers, refused=_read_refusal(more))


def _read_refusal(more: small_files.Json) -> refusals.Refusal | None:
    """Return the refusal of the operating system in the payload's error file."""
    number = more.get("errno")
    path = more.get("path")
    node = more.get("node")
    if not isinstance(number, int):
        return None
    paths = (path,) if isinstance(path, str) and path else ()
    return refusals.Refusal(number, paths, node if isinstance(node, str) else "")


def _read_output(log: attempt_files.RankLog, text: list[str], max_lines: int) -> Failure:
    lines = excerpts.last_error(text, max_lines)
    if messages.is_lost_worker(lines[-1]):
        lines = excerpts.last_error(messages.until_worker_failed(text), max_lines)
    is_peers = messages.reports_peer(lines[-1]) or messages.has_left(text[-1])
    return Failure(log.rank, log.node, lines, log.written, is_peers)
