"""Find why an attempt failed, from the files of its run.

The ranks' error files (TORCHELASTIC_ERROR_FILE, written by `@record` of torch.distributed.elastic and by the payload)
and the payload's outcome come first; logs are searched for kills, hangs and scripts without them.
"""

import collections.abc
import contextlib
import errno
import io
import itertools
import json
import os
import pathlib
import re
import signal
import stat
import typing

Json = dict[str, typing.Any]
MAX_TAIL_BYTES = 256 * 1024
MAX_JSON_BYTES = 4 * 1024 * 1024
MAX_RANK_LOGS = 2048
MAX_SEARCHED_BYTES = 64 * 1024 * 1024  # of a job's log
MAX_LAUNCHER_LINES = 10_000
# A consequence of another rank's end, as torch, gloo and NCCL print it; a download's ConnectionResetError is none. Two
# patterns, since one with a look-ahead takes the square of a long line's length.
_COLLECTIVE = re.compile(
    r"torch\.distributed|Dist\w+Error|gloo|nccl|c10d|TCPStore|ProcessGroup|\bRank \d", re.IGNORECASE
)
_PEER_LOST = re.compile(
    r"connection (closed|reset|refused)|broken pipe|remote process exited|collective operation timeout|connect timeout"
    r"|communicator was aborted|recvValue failed|heartbeat monitor",
    re.IGNORECASE,
)
_PEER_LEFT = re.compile(r"rank \d+ leaves:|SharedError|Signal(Exception| \d+)")
TELLING = re.compile(
    r"\[FATAL\]|Traceback \(most recent call last\)|^\S*(Error|Exception)\b|Segmentation fault|Killed|[Oo]ut of memory"
    r"|^\s*what\(\): "
)
# Faults of the machine rather than the program, anchored to who prints them: the kernel's NVRM, CUDA (driver_types.h),
# NCCL (nccl.h) within torch's exceptions, NVML, SIGBUS as this program reports it. A word anywhere proves nothing.
_BAD_NODE = re.compile(
    r"NVRM: Xid \(|fallen off the bus|uncorrectable (ECC|NVLink) error|CUDA error: (device not ready|hardware)"
    r"|no CUDA-capable device|CUDA-capable device\(s\) is/are busy|CUDA driver (version|initialization)"
    r"|NVMLError|NVML: |Can't initialize NVML|killed by signal 7 "
)
_BAD_LINK = re.compile(r"ncclSystemError|unhandled system error")
# Faults of a filesystem (errno.h): its client died or was restarted, or its server is not available.
_BAD_FILESYSTEM = re.compile(r"Stale file handle|Transport endpoint is not connected|Input/output error")
_ANY_OSERROR = re.compile(r"\[Errno \d+\]|OSError|Bus error|SIGBUS|signal 7 ")
_QUOTED_PATH = re.compile(r"['\"](/[^'\"]*)['\"]")
_GONE = re.compile(
    r"(?:\d+: )?\[ENV\] (\S+): (?:output cannot be written|\S+ does not respond) \(([^)]*)\)"
)  # printed by spool.py, storage.py and supervisor.py's _START
# Faults of the network, where no rank failed by itself: errors of gloo, NCCL and errno.h.
_CUT = re.compile(
    r"[Cc]onnection (closed|reset|timed out)|Broken pipe|remote process exited|No route to host|Network is unreachable"
)
_TASK_KILLED = re.compile(r"srun: error: \S+: task (\d+): (Killed|Segmentation fault|Bus error|Aborted|Out Of Memory)")
_TASK_EXITED = re.compile(r"srun: error: \S+: task (\d+): Exited with exit code (\d+)")
_RAN_OUT = re.compile(
    r"(?:(\d+): slurmstepd\S* error: Detected \d+ oom_kill event|srun: error: \S+: task (\d+): Out Of Memory)"
)  # of a task, by its number: a node's, or under srun a rank's
_NO_MEMORY = "killed: it took more memory than the job has; submit it with a larger memory"
_KILLERS = {"Killed": 9, "Segmentation fault": 11, "Bus error": 7, "Aborted": 6}  # strsignal(3), as srun prints it
_COMPLAINT = re.compile(r"(?:\d+: )?\[FATAL\] (\S+): (.*)")  # of node.py and what it starts, before any rank
_LEFT_EARLY = re.compile(r"(\d+): .*Error waiting on exit barrier")  # an agent whose ranks all exited with 0
_OF_LAUNCHER = (
    b"[ENV] job=",
    b"[ENV] node=",
    b"[FATAL] ",
    b"srun: error: ",
    b"failed (exitcode: ",
    b"Error waiting on exit ",
)
_NEVER_JOINED = re.compile(r"\d+ of \d+ ranks never joined within \d+ s: ([\d, ]*\d)")  # distributed.py
_TIMED_OUT = re.compile(
    r"[Tt]imed out after .* waiting for clients|wait timeout after|DistStoreError|the rendezvous at "
)  # torch's TCPStore (2.0 to 2.13), and the payload around it
_OURS = re.compile(
    r"srun: |slurmstepd(-\S+)?: |\[[\dT:.-]+\] error: \*\*\* (JOB|STEP) "
    r"|\[(RESULT|ENV|PREEMPT|REQUEUE|RESTART|FAILED)\]"
)  # 26.05 writes a time instead of slurmstepd
# Exceptions of Python, also within an exception group, and of C++, which end the process by SIGABRT, as NCCL's watchdog
# does; it then prints where they were thrown.
_REASON = re.compile(r"(\s*\| )?[\w.]*(Error|Exception|Interrupt|Exit)\b(?! raised from )|\s*what\(\): ")
_RANK = re.compile(r"^\[rank\d+\]: ?")  # torch's prefix of an exception's lines within a process group
_CRASH = "Fatal Python error: "  # of faulthandler, with the stack behind it, the innermost call first


def blame(run_dir: str, job_id: str, attempt: str, hosts: list[str]) -> tuple[str, str, str]:
    """Classify an attempt's failure; return its kind, the node at fault ("-": none), and the line that proves it.

    `mistake`: it would fail again. `node`: another node may work. `program`: another attempt may work. `filesystem` and
    `network`: no fault of the program.
    """
    folder = pathlib.Path(run_dir)
    with contextlib.suppress(OSError, ValueError):
        outcome = read_object(folder / "control" / f"{attempt}.outcome")
        if outcome.get("retry") is False:
            return "mistake", "-", str(outcome.get("error", ""))
    merged = _of_attempt(_merged_log(folder, int(job_id)), attempt)
    complaints = {found[1]: found[2] for line in merged if (found := _COMPLAINT.match(line)) and found[1] in hosts}
    if complaints:
        host, words = next(iter(complaints.items()))
        return ("mistake", "-", words) if len(complaints) == len(hosts) > 1 else ("node", host, words)
    lost = [found[1] for line in merged if (found := re.search(r"srun: error: Node failure on (\S+)", line))]
    if lost and lost[0] in hosts:
        return "node", lost[0], "Slurm lost the node"
    failure = first_failure(folder, int(job_id), 20)
    ranks, absent = absentees(folder, int(job_id), failure["lines"], hosts)
    if len(absent) == 1 < len(hosts):
        numbers = ", ".join(map(str, ranks[:16]))
        return "node", absent[0], f"rank{'s' if len(ranks) > 1 else ''} {numbers} never joined the rendezvous"
    number: int | None = failure["node"]
    node = hosts[number] if number is not None and number < len(hosts) else "-"
    words = str(failure["lines"][-1]) if failure["lines"] else ""
    if found := _filesystem_fault(folder, merged, failure):
        host, reason = found
        return "filesystem", host if host in hosts else node, reason
    if any(map(_is_of_node, failure["lines"])) and node != "-":
        return "node", node, words
    if failure["peer"]:
        missing = [host for number, host in enumerate(hosts) if number not in failure["reporting"]]
        if len(missing) == 1 and len(hosts) > 1:
            return "node", missing[0], f"it stopped responding; the others report: {words}"
        if not missing and len(hosts) > 1 and _CUT.search(words):
            return "network", "-", f"the nodes lost their connections, and no rank failed by itself: {words}"
    return "program", node, words


def _is_peers(line: str) -> bool:
    """Return whether a line reports the loss of another rank."""
    return bool(_PEER_LEFT.search(line) or (_PEER_LOST.search(line) and _COLLECTIVE.search(line)))


def _is_of_node(line: str) -> bool:
    """Return whether a line proves a fault of the machine."""
    return bool(_BAD_NODE.search(line) or (_BAD_LINK.search(line) and _COLLECTIVE.search(line)))


def _filesystem_fault(folder: pathlib.Path, merged: list[str], failure: Json) -> tuple[str, str] | None:
    """Return the node ("-": unknown) and the reason of a fault of the shared filesystem; None where it is none."""
    gone = {found[1]: found[2] for line in merged if (found := _GONE.match(line))}
    host, reason = next(iter(gone.items()), ("-", ""))
    lines = [str(line) for line in failure["lines"]]
    words = lines[-1] if lines else ""
    about = f"the shared filesystem did not respond on {host} ({reason})" if gone else "the shared filesystem failed"
    if any(_BAD_FILESYSTEM.search(line) for line in lines[-1:]):
        paths = _QUOTED_PATH.findall(words)
        workspace = f"{folder.parent.parent}/"
        is_elsewhere = bool(paths) and not any(str(path).startswith(workspace) for path in paths)
        return None if is_elsewhere and not gone else (host, f"{about}: {words}")
    if gone and (failure["peer"] or failure["rank"] is None or _ANY_OSERROR.search(words)):
        return host, f"{about}: {words}" if words and failure["rank"] is not None else about
    return None


def first_failure(folder: pathlib.Path, job_id: int, lines: int) -> Json:
    """Return the rank that failed first in a job's last attempt, its node's number and its last lines.

    A rank that only reports a lost peer (`peer`) counts less than one that reports an error of its own, and than one
    that exited with no error, as with `sys.exit("why")`; among equals the earliest counts. Where the launcher reports
    that ranks exited, but none of those with an error, these errors did not end their ranks. `reporting` are the
    numbers of the nodes with any error.
    """
    if (noted := _noted(folder, job_id)) is not None:
        return noted
    suspects: list[tuple[bool, float, Json]] = []
    quiet: dict[int, list[str]] = {}
    for error in _error_files(folder, job_id):
        gist = _gist(error["text"], lines)
        is_peers = _is_peers(gist[-1]) or _is_peers(error["message"])
        suspects.append((is_peers, error["at"], {"rank": error["rank"], "node": error["node"], "lines": gist}))
    recorded = {suspect["rank"] for _, _, suspect in suspects}
    logs = rank_logs(folder, job_id)[:MAX_RANK_LOGS]
    logs = [log for log in logs if log["rank"] not in recorded]
    for log in sorted(logs, key=lambda log: log["path"].endswith("/stderr.log")):  # sys.exit("why") writes there
        text = [line for line in tail(pathlib.Path(log["path"]), 32768) if line.strip()]
        if any(TELLING.search(line) for line in text):
            gist = _gist(text, lines)
            lost_a_peer = _is_peers(gist[-1]) or _is_peers(text[-1])
            suspects.append((lost_a_peer, log["written"], {"rank": log["rank"], "node": log["node"], "lines": gist}))
        else:
            quiet.setdefault(log["rank"], []).extend(text)
    merged = _last_attempt(_merged_log(folder, job_id))
    own = {suspect["rank"] for lost_a_peer, _, suspect in suspects if not lost_a_peer}
    reporting = sorted({suspect["node"] for _, _, suspect in suspects})
    # The agent ends the others by TERM; a rank that aborts has printed the reason before, if any.
    own_end = (signal.SIGTERM, signal.SIGABRT) if suspects else (signal.SIGTERM,)
    failed_ranks = {suspect["rank"] for _, _, suspect in suspects}
    left = _exited(folder, merged, failed_ranks | quiet.keys())
    is_clear = bool(own & {rank for rank, _, _ in left})
    if not is_clear and (killed := _killed(folder, merged, own_end)):
        mine = [suspect["lines"] for _, _, suspect in suspects if suspect["rank"] == killed["rank"]]
        crashes = [lines for lines in mine if lines[-1].startswith(_CRASH)]
        return {**killed, "lines": [*crashes, killed["lines"]][0], "peer": False, "reporting": reporting}
    text = [re.sub(r"^\d+: ", "", line) for line in merged if line.strip()]
    others = [line for line in text if not _OURS.match(line)]
    if not (suspects or others):
        left = _exited(folder, merged, range(1 << 30))  # no rank printed anything
    for rank, node, code in () if is_clear else left:
        if rank not in failed_ranks:
            last = quiet.get(rank, [])[-lines:] or [f"exited with code {code} and no error output"]
            return {"rank": rank, "node": node, "lines": last, "peer": False, "reporting": sorted({*reporting, node})}
    if suspects and not own and (early := next((found for line in merged if (found := _LEFT_EARLY.match(line))), None)):
        node = int(early[1])
        last = ["exited with code 0 while others went on; do all ranks get the same number of batches?"]
        rank = node * _per_node(folder)
        return {"rank": rank, "node": node, "lines": last, "peer": False, "reporting": sorted({*reporting, node})}
    if suspects:
        return {**min(suspects, key=lambda suspect: suspect[:2])[2], "peer": not own, "reporting": reporting}
    return {"rank": None, "node": None, "lines": _gist(others or text, lines), "peer": False, "reporting": reporting}


def _noted(folder: pathlib.Path, job_id: int) -> Json | None:
    """Return the fault of filesystem or network that the job itself recorded of its last attempt."""
    with contextlib.suppress(OSError):
        last = tail(folder / "control" / f"{int(job_id)}.failures", 65536)[-1:]
        _, attempt, kind, _, words = last[0].split("\t") if last and last[0].count("\t") == 4 else ("",) * 5
        if kind in ("filesystem", "network"):
            merged = _last_attempt(_merged_log(folder, job_id))
            if merged and f" attempt={attempt} " in merged[0]:
                return {"rank": None, "node": None, "lines": [words], "peer": False, "reporting": []}
    return None


def _error_files(folder: pathlib.Path, job_id: int) -> list[Json]:
    """Return the error files of the last attempt: rank, node, time, message, and its text with the stack.

    The format is torch/distributed/elastic/multiprocessing/errors/error_handler.py's, since torch 1.9.
    """
    found: list[Json] = []
    per_node = _per_node(folder)
    for attempt in _last_attempts(folder, job_id):
        for path in itertools.islice(attempt.glob("node-*/*/attempt_*/*/error.json"), MAX_RANK_LOGS):
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
                node, local = int(path.parents[3].name.removeprefix("node-")), int(path.parent.name)
                held = read_object(path)["message"]
                about = typing.cast(Json, held) if isinstance(held, dict) else {"message": held}
                more: Json = about.get("extraInfo") or {}
                message = str(about["message"])
                text = str(more.get("py_callstack") or message).splitlines()
                at = float(more.get("timestamp") or path.lstat().st_mtime)
                text = text if any(line.strip() for line in text) else [message or "an error without a message"]
                rank = node * per_node + local
                found.append({"rank": rank, "node": node, "at": at, "message": message, "text": text})
    return sorted(found, key=lambda error: error["at"])


def absentees(folder: pathlib.Path, job_id: int, lines: list[str], hosts: list[str]) -> tuple[list[int], list[str]]:
    """Return the ranks that never joined the rendezvous, and their nodes; none where that is not why it failed.

    The payload names the ranks. torch's rendezvous only reports a timeout: then they are those of the nodes that
    started no rank.
    """
    text = "\n".join(lines)
    per_node = _per_node(folder)
    ranks: list[int] = []
    if found := _NEVER_JOINED.search(text):
        ranks = [int(number) for number in re.findall(r"\d+", found[1])]
    elif "rank 0 published no address" in text:
        ranks = [0]
    elif _TIMED_OUT.search(text):
        lines_now = _last_attempt(_merged_log(folder, job_id))
        started = {found[1] for line in lines_now if (found := re.match(r"(?:\d+: )?\[ENV\] node=(\S+) ", line))}
        absent = [number for number, host in enumerate(hosts) if started and host not in started]
        ranks = [rank for number in absent for rank in range(number * per_node, (number + 1) * per_node)]
    numbers = sorted({rank // per_node for rank in ranks})
    return ranks, [hosts[number] for number in numbers if number < len(hosts)]


def _merged_log(folder: pathlib.Path, job_id: int) -> list[str]:
    """Return the last lines of a job's log, after the earlier lines of the job itself and its launcher.

    A rank that prints much goes on after another one has failed, so its output lies between that and the log's end.
    """
    path = folder / "logs" / f"{int(job_id)}.out"
    with contextlib.suppress(OSError):
        last = tail(path, MAX_TAIL_BYTES)
        with opened(path) as file:
            size = os.fstat(file.fileno()).st_size
            begin = max(0, size - MAX_SEARCHED_BYTES)
            file.seek(begin)
            data = file.read(max(0, size - begin - MAX_TAIL_BYTES))
        starts: set[int] = set()
        for word in _OF_LAUNCHER:
            at = data.find(word)
            while at >= 0 and len(starts) < MAX_LAUNCHER_LINES:
                starts.add(data.rfind(b"\n", 0, at) + 1)
                at = data.find(word, at + len(word))
        lines = [data[start : data.find(b"\n", start)] for start in sorted(starts)]
        return [*(line[:4000].decode(errors="replace") for line in lines), *last]
    return []


def _last_attempt(merged: list[str]) -> list[str]:
    begins = [index for index, line in enumerate(merged) if line.startswith("[ENV] job=")]
    return merged[begins[-1] :] if begins else merged


def _of_attempt(merged: list[str], attempt: str) -> list[str]:
    """Return a log's lines from the beginning of an attempt."""
    begins = [i for i, line in enumerate(merged) if line.startswith("[ENV] job=") and f" attempt={attempt} " in line]
    return merged[begins[-1] :] if begins else merged


def _gist(text: list[str], lines: int) -> list[str]:
    """Return the lines up to the last `[FATAL]`, exception or crash, without those after it.

    The last line holds the whole message: with the indented lines below it, or the place of a crash.
    """
    text = [line for line in text if _RANK.sub("", line, count=1).strip()]
    bare = [_RANK.sub("", line, count=1) for line in text]
    reason = crash = -1
    is_raising = False
    for index, line in enumerate(bare):
        if line.startswith("Traceback (most recent call last)"):
            is_raising = True
        elif "[FATAL]" in line or _REASON.match(line) or (is_raising and not line[0].isspace()):
            reason, is_raising = index, False
        elif line.startswith(_CRASH):
            crash = index
    if crash > reason and (reason < 0 or not bare[crash].startswith(f"{_CRASH}Aborted")):  # an abort follows its reason
        at = next((index for index in range(crash, len(bare)) if bare[index].startswith("Current thread")), len(bare))
        frames = list(itertools.takewhile(lambda line: line.startswith("  File "), bare[at + 1 :]))
        return [*frames[: lines - 1][::-1], ", ".join([bare[crash], *(frame.strip() for frame in frames[:1])])]
    if reason < 0:
        return text[-lines:]
    more: list[str] = []
    if not bare[reason][0].isspace():  # as in an exception group
        more = list(itertools.takewhile(lambda line: line[0].isspace(), bare[reason + 1 :]))
    last = " ".join([text[reason], *map(str.strip, more)])
    return [*text[max(0, reason + 1 - lines) : reason], last]


def _killed(folder: pathlib.Path, merged: list[str], but_by: tuple[signal.Signals, ...]) -> Json | None:
    """Return the rank that a signal other than those ended, as torchrun's agent or srun reports it."""
    per_node = _per_node(folder)
    names = {member.value: member.name for member in signal.Signals}
    ran_out = {int(found[1] or found[2]) for line in merged if (found := _RAN_OUT.match(line))}
    is_rank, is_first = _launcher(folder) == "srun", True  # what a task is: else a node's agent
    for line in merged:
        found = re.match(r"(\d+): .*\bfailed \(exitcode: -(\d+)\) local_rank: (\d+)", line)
        if found and int(found[2]) not in but_by:
            node, number, local = (int(value) for value in found.groups())
            words = _NO_MEMORY if number == signal.SIGKILL and node in ran_out else _signal_text(number, names)
            return {"rank": node * per_node + local, "node": node, "lines": [words]}
        if found := _TASK_KILLED.search(line):
            task, number = int(found[1]), _KILLERS.get(found[2])
            if number in but_by:
                continue
            words = _NO_MEMORY if number is None or task in ran_out else _signal_text(number, names)
            if is_rank:
                return {"rank": task, "node": task // per_node, "lines": [words]}
            return {"rank": task * per_node, "node": task, "lines": [words]}
        if is_first and (found := _TASK_EXITED.match(line)):
            task, number = int(found[1]), int(found[2]) - 128
            if number in _KILLERS.values() and number not in but_by:  # no other had failed, so node.py did not do it
                words = _signal_text(number, names)
                if is_rank:
                    return {"rank": task, "node": task // per_node, "lines": [words]}
                words = f"its torchrun was {words}"
                return {"rank": task * per_node, "node": task, "lines": [words]}
            is_first = False
    return None


def _exited(
    folder: pathlib.Path, merged: list[str], known: collections.abc.Collection[int]
) -> list[tuple[int, int, int]]:
    """Return rank, node and exit code of the ranks that exited by themselves, as torchrun's agents report it, in order.

    srun reports tasks, which need not have become ranks: those count that are `known`, since they printed something.
    """
    per_node = _per_node(folder)
    found: list[tuple[int, int, int]] = []
    for line in merged:
        if match := re.match(r"(\d+): .*\bfailed \(exitcode: (\d+)\) local_rank: (\d+)", line):
            node, code, local = (int(value) for value in match.groups())
            found.append((node * per_node + local, node, code))
        elif match := _TASK_EXITED.match(line):
            rank, code = int(match[1]), int(match[2])
            if rank in known and _launcher(folder) == "srun" and code < 128:  # above: a signal, such as srun's TERM
                found.append((rank, rank // per_node, code))
    return found


def _signal_text(number: int, names: dict[int, str]) -> str:
    hint = "; the kernel does that to a process when memory runs out" if number == signal.SIGKILL else ""
    return f"killed by signal {number} ({names.get(number, 'unknown')}){hint}"


def _launcher(folder: pathlib.Path) -> str:
    with contextlib.suppress(OSError, ValueError, KeyError):
        return str(read_object(folder / "job.json")["launcher"])
    return "torchrun"


def _per_node(folder: pathlib.Path) -> int:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return max(1, int(read_object(folder / "job.json")["ranks_per_node"]))
    return 1


def rank_logs(folder: pathlib.Path, job_id: int) -> list[Json]:
    """List the files with each rank's output in the job's last attempt."""
    per_node = _per_node(folder)
    found: list[Json] = []
    for attempt in _last_attempts(folder, job_id):
        for path in attempt.glob("node-*/*/attempt_*/*/std*.log"):
            with contextlib.suppress(ValueError, OSError):
                node, local = int(path.parents[3].name.removeprefix("node-")), int(path.parent.name)
                about = path.lstat()
                if about.st_size and stat.S_ISREG(about.st_mode):
                    record = {"node": node, "rank": node * per_node + local, "written": about.st_mtime}
                    found.append({"path": str(path), **record})
    return sorted(found, key=lambda log: (log["rank"], log["path"]))


def _last_attempts(folder: pathlib.Path, job_id: int) -> list[pathlib.Path]:
    """Return the log folders of a job's last attempt."""
    attempts = sorted((folder / "logs").glob(f"{int(job_id)}.r*"), key=attempt_of)
    return [path for path in attempts if attempt_of(path) == attempt_of(attempts[-1])]


def attempt_of(path: pathlib.Path) -> tuple[int, int]:
    """Parse the numbers of requeues and of restarts since the last, from a name like 12.r1t2.outcome."""
    match = re.search(r"\.r(\d+)(?:t(\d+))?(\.|$)", path.name)
    return (int(match[1]), int(match[2] or 0)) if match else (-1, 0)


def read_object(path: pathlib.Path) -> Json:
    """Read the JSON object in a file. Raises ValueError where the file holds no object."""
    with opened(path) as file:
        try:
            value: object = json.loads(file.read(MAX_JSON_BYTES))
        except RecursionError:
            raise ValueError("nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return typing.cast(Json, value)


def tail(path: pathlib.Path, limit: int) -> list[str]:
    """Return the lines in the last `limit` bytes of a file, or in more where most of those are of one long line."""
    with opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        while True:
            file.seek(max(0, size - limit))
            lines = file.read(limit).decode(errors="replace").splitlines()
            if size <= limit:
                return lines
            if len(lines[0]) < limit // 2 or limit >= MAX_JSON_BYTES:
                return lines[1:] or lines
            limit = min(4 * limit, MAX_JSON_BYTES)


def opened(path: pathlib.Path) -> io.BufferedReader:
    """Open a regular file: never a pipe, which would block, and never through a link."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return os.fdopen(descriptor, "rb")
