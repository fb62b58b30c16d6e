"""Find why an attempt failed, from the files of its run.

The ranks' error files (TORCHELASTIC_ERROR_FILE, written by `@record` of torch.distributed.elastic and by the payload)
and the payload's outcome come first; logs are searched for kills, hangs and scripts without them.
"""

import contextlib
import dataclasses
import itertools
import os
import pathlib
import re
import signal
import typing

from ddp.node import small_files
from ddp.node.diagnosis import attempt_files, messages, rank_ends

MAX_CHAIN = 200  # lines of a rank that are searched for what led to its last error
TELLING = re.compile(
    r"\[FATAL\]|Traceback \(most recent call last\)|^\S*(Error|Exception)\b|Segmentation fault|Killed|[Oo]ut of memory"
    r"|^\s*what\(\): |^rank \d+ leaves: "
)

_GONE = re.compile(  # printed by spool.py and storage.py
    r"(?:\d+: )?\[ENV\] (\S+): "
    r"(?:output cannot be written|\S+ does not respond|\S+ lost the files that were open) \(([^)]*)\)"
)
_FULL = ("No space left on device", "Disk quota exceeded")  # strerror(3)'s, where nothing is lost
LOST = "Slurm lost the node"
# What the launchers print
_COMPLAINT = re.compile(
    r"(?:\d+: )?\[FATAL\] (\S+): (.*)"
)  # of node.py and what it starts, before any rank
_LEFT_EARLY = re.compile(
    r"(\d+): .*Error waiting on exit barrier"
)  # an agent whose ranks all exited with 0
_NEVER_JOINED = re.compile(
    r"(?:.*(?:\[FATAL\]|SharedError:|leaves:) )?(?:\d+ of \d+ ranks never joined within \d+ s: ([\d, ]*\d)"
    r"|rank 0 published no address in )"
)  # rendezvous.py
_TIMED_OUT = re.compile(
    r"[Tt]imed out after .* waiting for clients|wait timeout after|DistStoreError|the rendezvous at "
)  # torch's TCPStore (2.0 to 2.13), and the payload around it
_OURS = re.compile(
    r"srun: |slurmstepd(-\S+)?: |\[[\dT:.-]+\] error: \*\*\* (JOB|STEP) "
    r"|\[(RESULT|ENV|PREEMPT|REQUEUE|RESTART|FAILED)\]"
)  # 26.05 writes a time instead of slurmstepd
# Exceptions of Python, also within an exception group, and of C++, which end the process by SIGABRT, as NCCL's watchdog
# does; it then prints where they were thrown.
_REASON = re.compile(
    r"(\s*\| )?[\w.]*(Error|Exception|Interrupt|Exit|InvalidCxxCompiler)\b(?! raised from )|\s*what\(\): "
)
_CRASH = (
    "Fatal Python error: "  # of faulthandler, with the stack behind it, the innermost call first
)


@dataclasses.dataclass(frozen=True)
class Failure:
    """The rank that failed first, its node's number, and its last lines; without a rank the last lines of the log."""

    rank: int | None
    node: int | None
    lines: list[str]
    at: float = 0.0  # the time, in seconds
    is_peers: bool = False  # it reports the loss of another rank
    reporting: tuple[int, ...] = ()  # numbers of the nodes with any error
    refused: messages.Refusal | None = None  # by its error file


class Verdict(typing.NamedTuple):
    """What failed (program, parameters, node, filesystem, network, unknown), the node ("-": none), and the evidence."""

    kind: str
    node: str
    words: str
    comes_again: bool = False  # another attempt would fail, too


def blame(run_dir: str, job_id: str, attempt: str, hosts: list[str]) -> Verdict:
    """Classify the failure of a job's last attempt."""
    folder = pathlib.Path(run_dir)
    log = attempt_files.attempt_log(folder, int(job_id))
    complaints = {
        found[1]: found[2]
        for line in log
        if (found := _COMPLAINT.match(line)) and found[1] in hosts
    }
    if complaints:
        host, words = next(iter(complaints.items()))
        if len(complaints) == len(hosts) > 1:
            return Verdict("parameters", "-", words, comes_again=True)
        return Verdict("node", host, words)
    lost = [
        found[1] for line in log if (found := re.match(r"srun: error: Node failure on (\S+)", line))
    ]
    if lost and lost[0] in hosts:
        return Verdict("node", lost[0], LOST)
    failure = first_failure(folder, int(job_id), MAX_CHAIN)
    node = hosts[failure.node] if failure.node is not None and failure.node < len(hosts) else "-"
    if found := _filesystem_fault(folder, log, failure, node):
        return found if found.node in hosts else found._replace(node=node)
    with contextlib.suppress(OSError, ValueError):
        outcome = small_files.read_object(folder / "control" / f"{attempt}.outcome")
        if outcome.get("retry") is False:
            return Verdict("parameters", "-", str(outcome.get("error", "")), comes_again=True)
    ranks, absent = absentees(folder, int(job_id), failure.lines, hosts)
    if len(absent) == 1 < len(hosts):
        numbers = ", ".join(map(str, ranks[:16]))
        return Verdict(
            "node",
            absent[0],
            f"rank{'s' if len(ranks) > 1 else ''} {numbers} never joined the rendezvous",
        )
    words = failure.lines[-1] if failure.lines else ""
    if messages.proves_node(failure.lines) and node != "-":
        return Verdict("node", node, words)
    if failure.is_peers:
        missing = [host for number, host in enumerate(hosts) if number not in failure.reporting]
        if len(missing) == 1 and len(hosts) > 1:
            return Verdict("node", missing[0], f"it stopped responding; the others report: {words}")
        if not missing and len(hosts) > 1 and messages.CUT.search(words):
            return Verdict(
                "network",
                "-",
                f"the nodes lost their connections, and no rank failed by itself: {words}",
            )
    if found := messages.known(failure.lines):
        comes_again, remedy = found
        return Verdict("program", node, f"{words[:200]}; {remedy}", comes_again)
    return Verdict(
        "program" if words and words != rank_ends.words(-signal.SIGKILL, None) else "unknown",
        node,
        words,
    )


def _filesystem_fault(
    folder: pathlib.Path, log: list[str], failure: Failure, node: str
) -> Verdict | None:
    """Return the verdict on a fault of the shared filesystem; None where nothing proves one.

    An error of the operating system proves it by a path there. Without a path, as of a socket, it takes another sign
    from the same node; a lost peer, and an error that names no number, take one as well.
    """
    words = failure.lines[-1] if failure.lines else ""
    refused = failure.refused or messages.refusal(failure.lines)
    if refused and refused.node:
        node = refused.node
    paths = refused.paths if refused else ()
    if paths and not _are_shared(paths, folder):
        return None
    gone = _gone(log)
    if refused and paths and refused.is_of_filesystem:
        return Verdict("filesystem", node, _about(node, gone.get(node, ""), words))
    host = node
    if node not in gone and (node == "-" or failure.is_peers):
        host = next(iter(gone), node)
    if host not in gone:
        return None
    if failure.rank is None:
        return Verdict("filesystem", host, _about(host, gone[host], ""))
    is_of_files = refused.may_be_of_files if refused else messages.is_of_files(words)
    if failure.is_peers or is_of_files:
        return Verdict("filesystem", host, _about(host, gone[host], words))
    return None


def _gone(log: list[str]) -> dict[str, str]:
    """Return the nodes that missed the shared filesystem in this attempt, each with the first reason."""
    gone: dict[str, str] = {}
    for line in log:
        found = _GONE.match(line)
        if found and found[2] not in _FULL:
            gone.setdefault(found[1], found[2])
    return gone


def _are_shared(paths: tuple[str, ...], folder: pathlib.Path) -> bool:
    """Return whether one of the paths is on the filesystem of a run's folder; relative ones begin in the workspace."""
    workspace = os.path.realpath(folder.parent.parent)
    top = workspace
    while not os.path.ismount(top):
        top = os.path.dirname(top)
    if top == "/":
        top = workspace
    for path in paths:
        whole = os.path.normpath(os.path.join(workspace, path))
        if f"{whole}/".startswith(f"{top}/") or f"{os.path.realpath(whole)}/".startswith(f"{top}/"):
            return True
    return False


def _about(host: str, reason: str, words: str) -> str:
    about = (
        f"the shared filesystem did not respond on {host} ({reason})"
        if reason
        else "the shared filesystem failed"
    )
    return f"{about}: {words}" if words else about


def first_failure(folder: pathlib.Path, job_id: int, lines: int) -> Failure:
    """Return the rank that failed first in a job's last attempt.

    A rank that only reports a lost peer counts less than one that reports its own error, and than one that exited
    with no error, as with `sys.exit("why")`; among equals the earliest counts. Where the launcher reports that ranks
    exited, but none of those with an error, these errors did not end their ranks.
    """
    log = attempt_files.attempt_log(folder, job_id)
    if noted := _noted(folder, job_id, log):
        return Failure(None, None, [noted])
    short = rank_ends.shortages(log)
    suspects, quiet = _suspects(folder, job_id, lines)
    suspects = [_with_memory(one, short.get(one.node or 0)) for one in suspects]
    failed_ranks = {suspect.rank for suspect in suspects}
    own = {suspect.rank for suspect in suspects if not suspect.is_peers}
    reporting = tuple(sorted({suspect.node for suspect in suspects if suspect.node is not None}))

    def found(rank: int, node: int, last: list[str]) -> Failure:
        return Failure(rank, node, last, reporting=tuple(sorted({*reporting, node})))

    reported = _reported_by_others(suspects, attempt_files.per_node(folder), reporting)
    ended = rank_ends.parse(log, attempt_files.per_node(folder))
    left = [end for end in ended if end.code >= 0]
    is_clear = any(end.rank in own for end in left)
    aborted = [end for end in ended if end.code == -signal.SIGABRT]
    aborted = [end for end in aborted if messages.was_not_destroyed(quiet.get(end.rank, []))]
    if aborted and not is_clear:
        return found(aborted[0].rank, aborted[0].node, [messages.NOT_DESTROYED])
    # The agent ends the others by TERM; a rank that aborts has printed the reason before, if any.
    own_end = (-signal.SIGTERM, -signal.SIGABRT) if suspects else (-signal.SIGTERM,)
    killed = next((end for end in ended if end.code < 0 and end.code not in own_end), None)
    if killed and not is_clear:
        mine = [suspect.lines for suspect in suspects if suspect.rank == killed.rank]
        crashes = [last for last in mine if last[-1].startswith(_CRASH)]
        return Failure(killed.rank, killed.node, [*crashes, [killed.words]][0], reporting=reporting)
    text = [re.sub(r"^\d+: ", "", line) for line in log if line.strip()]
    others = [line for line in text if not _OURS.match(line)]
    for end in () if is_clear else left:
        if end.rank not in failed_ranks:
            tag = f"[rank{end.rank}]: "
            printed = [
                line.removeprefix(tag) for line in text if line.startswith(tag)
            ]  # its own file may lack the end
            if any(map(TELLING.search, printed)):
                return found(end.rank, end.node, _gist(printed, lines))
            if end.rank in reported:
                return reported[end.rank]
            return found(end.rank, end.node, quiet.get(end.rank, [])[-lines:] or [end.words])
    if not own and reported:
        return min(reported.values(), key=lambda failure: failure.at)
    if (
        suspects
        and not own
        and (early := next((match for line in log if (match := _LEFT_EARLY.match(line))), None))
    ):
        words = (
            "exited with code 0 while others went on; do all ranks get the same number of batches?"
        )
        return found(int(early[1]) * attempt_files.per_node(folder), int(early[1]), [words])
    if suspects:
        first = min(suspects, key=lambda suspect: (suspect.is_peers, suspect.at))
        return dataclasses.replace(first, is_peers=not own, reporting=reporting)
    return Failure(None, None, _gist(others or text, lines))


def _reported_by_others(
    suspects: list[Failure], per_node: int, reporting: tuple[int, ...]
) -> dict[int, Failure]:
    """Return, by rank, the failures that only other ranks tell of: with its node a rank loses its own report."""
    reported: dict[int, Failure] = {}
    for suspect in suspects:
        rank = messages.reported_of(suspect.lines[-1]) if suspect.is_peers else None
        if rank is not None:
            of_rank = dataclasses.replace(suspect, rank=rank, node=rank // per_node)
            reported.setdefault(
                rank, dataclasses.replace(of_rank, is_peers=False, reporting=reporting)
            )
    return reported


def _with_memory(failure: Failure, shortage: str | None) -> Failure:
    """Return a failure by a lost worker of DataLoader with the shortage of memory that its task was killed for."""
    if shortage is None or not messages.LOST_WORKER.match(failure.lines[-1]):
        return failure
    line = f"DataLoader worker {rank_ends.words(-signal.SIGKILL, shortage)}"
    return dataclasses.replace(failure, lines=[*failure.lines[:-1], line])


def _noted(folder: pathlib.Path, job_id: int, log: list[str]) -> str:
    """Return the fault of filesystem or network that the job itself recorded of its last attempt, or ""."""
    with contextlib.suppress(OSError):
        last = small_files.tail(folder / "control" / f"{int(job_id)}.failures", 65536)[-1:]
        _, attempt, kind, _, words = (
            last[0].split("\t") if last and last[0].count("\t") == 4 else ("",) * 5
        )
        if kind in ("filesystem", "network") and log and f" attempt={attempt} " in log[0]:
            return words
    return ""


def _suspects(
    folder: pathlib.Path, job_id: int, lines: int
) -> tuple[list[Failure], dict[int, list[str]]]:
    """Return the ranks of the last attempt that report an error, and the output of the others by rank.

    The error files' format is that of torch/distributed/elastic/multiprocessing/errors/error_handler.py, since 1.9;
    the payload's have more (error_file.py).
    """
    suspects: list[Failure] = []
    quiet: dict[int, list[str]] = {}
    for path, rank, node in attempt_files.rank_files(folder, job_id, "error.json"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            held = small_files.read_object(path)["message"]
            about = (
                typing.cast(small_files.Json, held) if isinstance(held, dict) else {"message": held}
            )
            more: small_files.Json = about.get("extraInfo") or {}
            message = str(about["message"])
            text = str(more.get("py_callstack") or message).splitlines()
            text = (
                text
                if any(line.strip() for line in text)
                else [message or "an error without a message"]
            )
            gist = _gist(text, lines)
            at = float(more.get("timestamp") or path.lstat().st_mtime)
            is_peers = more.get("of_peer") is True or any(
                map(messages.reports_peer, (gist[-1], message))
            )
            suspects.append(Failure(rank, node, gist, at, is_peers, refused=_refused(more)))
    recorded = {suspect.rank for suspect in suspects}
    logs = [
        log
        for log in attempt_files.rank_logs(folder, job_id)[: attempt_files.MAX_RANK_LOGS]
        if log["rank"] not in recorded
    ]
    for log in sorted(
        logs, key=lambda log: log["path"].endswith("/stderr.log")
    ):  # sys.exit("why") writes there
        text = [line for line in small_files.tail(pathlib.Path(log["path"]), 32768) if line.strip()]
        if any(TELLING.search(line) for line in text):
            gist = _gist(text, lines)
            lost_a_peer = messages.reports_peer(gist[-1]) or messages.has_left(text[-1])
            suspects.append(Failure(log["rank"], log["node"], gist, log["written"], lost_a_peer))
        else:
            quiet.setdefault(log["rank"], []).extend(text)
    return suspects, quiet


def _refused(more: small_files.Json) -> messages.Refusal | None:
    """Read the refusal of the operating system from the payload's error file."""
    number, path, node = more.get("errno"), more.get("path"), more.get("node")
    if not isinstance(number, int):
        return None
    paths = (path,) if isinstance(path, str) and path else ()
    return messages.Refusal(number, paths, node if isinstance(node, str) else "")


def absentees(
    folder: pathlib.Path, job_id: int, lines: list[str], hosts: list[str]
) -> tuple[list[int], list[str]]:
    """Return the ranks that never joined the rendezvous, and their nodes; none where that is not why it failed.

    The payload names the ranks. torch's rendezvous only reports a timeout: then they are those of the nodes that
    started no rank.
    """
    text = lines[-1] if lines else ""
    per_node = attempt_files.per_node(folder)
    ranks: list[int] = []
    if found := _NEVER_JOINED.match(text):
        ranks = [int(number) for number in re.findall(r"\d+", found[1] or "0")]
    elif _TIMED_OUT.search(text):
        log = attempt_files.attempt_log(folder, job_id)
        started = {
            found[1] for line in log if (found := re.match(r"(?:\d+: )?\[ENV\] node=(\S+) ", line))
        }
        absent = [number for number, host in enumerate(hosts) if started and host not in started]
        ranks = [
            rank for number in absent for rank in range(number * per_node, (number + 1) * per_node)
        ]
    numbers = sorted({rank // per_node for rank in ranks})
    return ranks, [hosts[number] for number in numbers if number < len(hosts)]


def _gist(text: list[str], lines: int) -> list[str]:
    """Return the lines up to the last `[FATAL]`, exception or crash, without those after it.

    The last line holds the whole message: with the indented lines below it, or the place of a crash.
    """
    text = [line for line in text if messages.RANK.sub("", line, count=1).strip()]
    bare = [messages.RANK.sub("", line, count=1) for line in text]
    reason = crash = -1
    is_raising = is_ignored = False
    for index, line in enumerate(bare):
        if line.startswith("Traceback (most recent call last)"):
            is_raising = True
        elif line.startswith(
            "Exception ignored "
        ):  # Python's, of a destructor or the last flush; its error follows
            is_ignored = True
        elif "[FATAL]" in line or _REASON.match(line) or (is_raising and not line[0].isspace()):
            reason, is_raising, is_ignored = reason if is_ignored else index, False, False
        elif line.startswith(_CRASH):
            crash = index
    if crash > reason and (
        reason < 0 or not bare[crash].startswith(f"{_CRASH}Aborted")
    ):  # an abort follows its reason
        at = next(
            (
                index
                for index in range(crash, len(bare))
                if bare[index].startswith("Current thread")
            ),
            len(bare),
        )
        frames = list(itertools.takewhile(lambda line: line.startswith("  File "), bare[at + 1 :]))
        return [
            *frames[: lines - 1][::-1],
            ", ".join([bare[crash], *(frame.strip() for frame in frames[:1])]),
        ]
    if reason < 0:
        return text[-lines:]
    more: list[str] = []
    if not bare[reason][0].isspace():  # as in an exception group
        more = list(itertools.takewhile(lambda line: line[0].isspace(), bare[reason + 1 :]))
    if bare[reason].startswith("nccl") and bare[reason + 1 : reason + 2] == ["Last error:"]:
        more = bare[reason + 1 : reason + 3]
    last = " ".join([text[reason], *map(str.strip, more)])
    return [*text[max(0, reason + 1 - lines) : reason], last]
