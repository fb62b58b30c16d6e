"""What is done inside the workspace, always in a child of its own and with the rights of the account it is done for.

The trainer runs this file's text as `python3 -I -c TEXT`, as the submit user: each line on standard input is a request
in JSON, each on standard output its answer. So a link that a user planted leads only where that user may go, a
filesystem that hangs hangs a child, and the charm's own folder need not be readable. Only the standard library is
imported.
"""

import collections.abc
import contextlib
import errno
import hashlib
import io
import json
import os
import pathlib
import re
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import tarfile
import tempfile
import time
import typing
import zipfile
import zlib

Json = dict[str, typing.Any]
MAX_TAIL_BYTES = 256 * 1024
MAX_JSON_BYTES = 4 * 1024 * 1024
MAX_LISTED = 1000
MAX_RANK_LOGS = 2048
HF_SUFFIX = ".hf-token"
RUN_FILES = {
    "logs", "control", "job.sbatch", "job.json", "node.sh", "rank.sh", "environment.sh", "fabric.sh", "explain.py",
    "sweep.jsonl", "args",
}  # fmt: skip

_PEER_GONE = re.compile(
    r"[Cc]onnection (closed|reset|refused)|Broken pipe|remote process exited|rank \d+ leaves:|SharedError"
    r"|Signal(Exception| \d+)|collective operation timeout|communicator was aborted|recvValue failed|heartbeat monitor"
)
_TELLING = re.compile(
    r"\[FATAL\]|Traceback \(most recent call last\)|^\S*(Error|Exception)\b|Segmentation fault|Killed|[Oo]ut of memory"
)
# What accuses the machine rather than the program: CUDA's and NCCL's words for broken devices and links
# (driver_types.h, nccl.h), and those of a filesystem that went away (errno.h).
_BAD_NODE = re.compile(
    r"uncorrectable (ECC|NVLink) error|CUDA error: (device not ready|hardware|an uncorrectable)|fallen off the bus|Xid"
    r"|no CUDA-capable device|CUDA-capable device\(s\) is/are busy|CUDA driver (version|initialization)|NVML"
    r"|ncclSystemError|unhandled system error|Stale file handle|Transport endpoint is not connected"
    r"|Input/output error|Bus error|SIGBUS",
    re.IGNORECASE,
)
_TASK_KILLED = re.compile(r"srun: error: \S+: task (\d+): (Killed|Segmentation fault|Bus error|Aborted|Out Of Memory)")
_KILLERS = {"Killed": 9, "Segmentation fault": 11, "Bus error": 7, "Aborted": 6}  # strsignal(3), as srun prints it
_COMPLAINT = re.compile(r"(?:\d+: )?\[FATAL\] (\S+): (.*)")  # of node.sh and what it starts, before any rank
_DID_NOT_COME = re.compile(r"\d+ of \d+ ranks did not come within \d+ s: ([\d, ]*\d)")  # distributed.py
_WAITED_IN_VAIN = re.compile(
    r"[Tt]imed out after .* waiting for clients|wait timeout after|DistStoreError|the rendezvous at "
)  # torch's TCPStore (2.0 to 2.13), and the payload around it
_OURS = re.compile(
    r"srun: |slurmstepd(-\S+)?: |\[[\dT:.-]+\] error: \*\*\* (JOB|STEP) "
    r"|\[(RESULT|ENV|PREEMPT|REQUEUE|RESTART|FAILED)\]"
)  # 26.05 writes a time instead of slurmstepd
_REASON = re.compile(r"(\[rank\d+\]: ?)?[\w.]*(Error|Exception|Interrupt|Exit)\b")


class RefusedError(Exception):
    """The request cannot be done; `str()` is one line for a person."""


OPERATIONS: dict[str, collections.abc.Callable[..., Json]] = {}


def operation(function: collections.abc.Callable[..., Json]) -> collections.abc.Callable[..., Json]:
    """Let a request name this function."""
    OPERATIONS[function.__name__] = function
    return function


@operation
def make_folders(workspace: str, names: list[str]) -> Json:
    """Make these folders of the workspace; `denied` are those that this account may not make or write."""
    denied: list[str] = []
    for name in names:
        path = pathlib.Path(workspace, name)
        try:
            path.mkdir(mode=0o755)
        except FileExistsError:
            pass
        except PermissionError:
            denied.append(name)
            continue
        if not path.is_dir() or not os.access(path, os.W_OK | os.X_OK):
            denied.append(name)
    return {"denied": denied}


@operation
def hand_over(workspace: str, names: list[str], uid: int, gid: int) -> Json:
    """Make folders in a workspace that belongs to root and give them to an account. Runs as root.

    Only root can have put anything directly into such a workspace, so nothing found there was planted. What is not a
    folder, or belongs to a third account, is left as it is.
    """
    top = os.open(workspace, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        about = os.fstat(top)
        if about.st_uid != 0 or about.st_mode & 0o022:
            raise RefusedError(f"{workspace} belongs to uid {about.st_uid}, mode {about.st_mode & 0o7777:o}")
        for name in names:
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, 0o755, dir_fd=top)
            folder = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=top)
            try:
                owner = os.fstat(folder).st_uid
                if owner == 0:
                    os.fchown(folder, uid, gid)
                elif owner != uid:
                    raise RefusedError(f"{workspace}/{name} belongs to uid {owner}")
            finally:
                os.close(folder)
    finally:
        os.close(top)
    return {}


@operation
def look(workspace: str) -> Json:
    """Return what the workspace holds: environments' manifests, datasets' names, and whether it can be written."""
    top = pathlib.Path(workspace)
    manifests: list[Json] = []
    for path in sorted((top / "environments").glob("*.json"))[:MAX_LISTED]:
        try:
            manifest = _read_json(path)
            if path.with_suffix(".tar.zst").lstat().st_size == manifest["size_bytes"] and path.stem == manifest["hash"]:
                manifests.append(manifest)
        except (OSError, ValueError, KeyError):
            continue  # half-written, damaged or somebody's note: as good as absent
    datasets = sorted(path.parent.name for path in (top / "datasets").glob("*/dataset.json"))
    writable = os.access(top / "runs", os.W_OK | os.X_OK)
    runs = top / "runs"
    room = os.statvfs(runs if runs.is_dir() else top)
    files = room.f_favail if room.f_files else 1 << 40  # a filesystem that does not count them
    free = {"free_bytes": room.f_bavail * room.f_frsize, "free_files": files}
    return {"environments": manifests, "datasets": datasets[:MAX_LISTED], "writable": writable, **free}


@operation
def locate(workspace: str, path: str) -> Json:
    """Return what `path` is, where it really is, and whether that is in the workspace."""
    real, top = pathlib.Path(os.path.realpath(path)), pathlib.Path(os.path.realpath(workspace))
    kind = "absent"
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        mode = real.stat().st_mode
        kind = "file" if stat.S_ISREG(mode) else "folder" if stat.S_ISDIR(mode) else "other"
    inside = real.is_relative_to(top) and real != top
    return {"kind": kind, "real": str(real), "inside": inside, "readable": os.access(real, os.R_OK)}


@operation
def create_run(workspace: str, run: str, texts: dict[str, str], again: bool) -> Json:
    """Make a run's folder with its files. An existing run is refused unless `again`."""
    folder = pathlib.Path(workspace, "runs", run)
    try:
        folder.mkdir(mode=0o755)
    except FileExistsError:
        if not again:
            raise RefusedError(f"{folder} exists already") from None
    for name in ("logs", "control"):
        (folder / name).mkdir(mode=0o755, exist_ok=True)
    for name, text in texts.items():
        _replace(folder / name, text)
    return {}


@operation
def create_sweep(workspace: str, run: str, texts: dict[str, str], elements: list[dict[str, str]]) -> Json:
    """Make a sweep's folder and one for each of its runs, or none of them."""
    top = pathlib.Path(workspace, "runs")
    folders = [top / run, *(top / f"{run}-{number}" for number in range(len(elements)))]
    if taken := [path for path in folders if path.exists() or path.is_symlink()]:
        raise RefusedError(f"{taken[0]} exists already")
    made: list[pathlib.Path] = []
    try:
        for folder, files in zip(folders, [texts, *elements], strict=True):
            folder.mkdir(mode=0o755)
            made.append(folder)
            for name in ("logs", "control"):
                (folder / name).mkdir(mode=0o755)
            for name, text in files.items():
                _replace(folder / name, text)
    except BaseException:
        for folder in made:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    return {}


@operation
def remove_sweep(workspace: str, run: str, count: int) -> Json:
    """Remove the folders of a sweep that never started."""
    for name in [run, *(f"{run}-{number}" for number in range(count))]:
        remove_run(workspace, name)
    return {}


@operation
def number_sweep(workspace: str, run: str, count: int, job_id: int) -> Json:
    """Note in the sweep's and its runs' job.json as which job they were submitted."""
    for name in [run, *(f"{run}-{number}" for number in range(count))]:
        path = pathlib.Path(workspace, "runs", name, "job.json")
        _replace(path, json.dumps({**_read_json(path), "job_id": job_id}, indent=1, sort_keys=True) + "\n")
    return {}


@operation
def read_sweep(workspace: str, run: str) -> Json:
    """Return how each run of a sweep stands: its job once it has one, its last outcome and its last loss."""
    top = pathlib.Path(workspace, "runs")
    about = _read_json(top / run / "job.json")
    rows: list[Json] = []
    for number in range(min(int(about["count"]), MAX_LISTED)):
        told = read_run(workspace, f"{run}-{number}", None)
        job: Json = told["job"] or {}
        summary: Json = told["summary"] or {}
        metric: Json = told["metric"] or {}
        started = bool(job.get("started"))
        loss = summary.get("last_loss", metric.get("loss"))
        row: Json = {"run": f"{run}-{number}", "job_id": job.get("job_id") if started else None, "outcome": None}
        if started:
            outcomes = sorted((top / row["run"] / "control").glob(f"{int(row['job_id'])}.r*.outcome"), key=_attempt)
            with contextlib.suppress(OSError, ValueError, IndexError):
                row["outcome"] = _read_json(outcomes[-1]).get("outcome")
        rows.append({**row, "choice": job.get("choice", ""), "loss": loss, "step": metric.get("step")})
    return {"job_id": about.get("job_id"), "rows": rows}


@operation
def read_lines(path: str, limit: int) -> Json:
    """Return the lines of a file of at most `limit` bytes."""
    with _opened(pathlib.Path(path)) as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise RefusedError(f"{path} has more than {limit} bytes")
    return {"lines": data.decode(errors="replace").splitlines()}


@operation
def write(path: str, text: str) -> Json:
    """Replace a file."""
    _replace(pathlib.Path(path), text)
    return {}


@operation
def keep_token(secrets: str, owner: str, run: str, token: str) -> Json:
    """Write the file with the token for a run; nobody but this account can get at it."""
    folder = _private(pathlib.Path(secrets)) / owner
    folder.mkdir(mode=0o700, exist_ok=True)
    _replace(_private(folder) / f"{run}{HF_SUFFIX}", f"{token}\n", mode=0o600)
    return {}


@operation
def drop_token(secrets: str, owner: str, run: str) -> Json:
    """Remove a run's file with the token."""
    pathlib.Path(secrets, owner, f"{run}{HF_SUFFIX}").unlink(missing_ok=True)
    return {}


@operation
def sync_tokens(secrets: str, owner: str, token: str, active: list[str] | None) -> Json:
    """Make each file of an owner hold the token; remove those of runs that are not active, or all without a token.

    With `active` unknown none of these is removed. A file of the last two minutes stays: its job is being submitted.
    """
    counts = {"removed": 0, "replaced": 0}
    folder = pathlib.Path(secrets, owner)
    if not folder.is_dir():
        return counts
    for path in sorted(_private(folder).iterdir()):
        about = path.lstat()
        if not stat.S_ISREG(about.st_mode):
            continue  # none of ours
        run = path.name.removesuffix(HF_SUFFIX)
        is_ours = path.name.endswith(HF_SUFFIX) and not path.name.startswith(".")
        is_gone = not is_ours or (active is not None and run not in active)
        if not token or (is_gone and time.time() - about.st_mtime > 120):
            path.unlink()
            counts["removed"] += 1
        elif is_ours and _tail(path, 65536) != [token]:
            _replace(path, f"{token}\n", mode=0o600)
            counts["replaced"] += 1
    return counts


@operation
def remove_run(workspace: str, run: str) -> Json:
    """Remove the folder of a run that never started; one that holds more than `create_run` put there stays."""
    folder = pathlib.Path(workspace, "runs", run)
    held = {path.name for path in folder.iterdir()}
    used = any(any((folder / name).iterdir()) for name in held & {"logs", "control"})
    if held <= RUN_FILES and not used:
        shutil.rmtree(folder)
        return {"removed": True}
    return {"removed": False}


@operation
def list_runs(workspace: str) -> Json:
    """Return the names of the runs that hold a job, the last submitted first."""
    found: list[tuple[float, str]] = []
    for path in pathlib.Path(workspace, "runs").iterdir():
        with contextlib.suppress(OSError):
            found.append(((path / "job.json").lstat().st_mtime, path.name))
    return {"runs": [name for _, name in sorted(found, reverse=True)[:MAX_LISTED]]}


@operation
def find_element(workspace: str, array: int, element: int) -> Json:
    """Return the run that this element of an array is, or is a part of; None where there is no such element."""
    for run in list_runs(workspace)["runs"]:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            job = _read_json(pathlib.Path(workspace, "runs", run, "job.json"))
            if job.get("kind") == "sweep" and job["job_id"] == array:
                return {"run": f"{run}-{element}" if element < int(job["count"]) else None, "of": run}
            if job.get("kind") == "prepare" and job["array_job_id"] == array:
                return {"run": run if element < int(job["elements"]) else None, "of": run}
    return {"run": None, "of": None}


@operation
def find_run(workspace: str, job_id: int) -> Json:
    """Return the run that this job is, or was, an attempt at."""
    for path in pathlib.Path(workspace, "runs").glob(f"*/logs/{int(job_id)}.out"):
        return {"run": path.parent.parent.name}
    for run in list_runs(workspace)["runs"]:
        with contextlib.suppress(OSError, ValueError):
            if _read_json(pathlib.Path(workspace, "runs", run, "job.json")).get("job_id") == job_id:
                return {"run": run}
    return {"run": None}


@operation
def read_run(workspace: str, run: str, job_id: int | None) -> Json:
    """Return what a run says of itself: job.json, summary.json, the job's last outcome and the last step's metric."""
    folder = pathlib.Path(workspace, "runs", run)
    answer: Json = {"job": None, "summary": None, "outcome": None, "metric": None, "summary_written": 0.0}
    with contextlib.suppress(OSError, ValueError):
        answer["job"] = _read_json(folder / "job.json")
        if "sweep" in answer["job"]:  # the job of one task of an array is known when it has started
            with contextlib.suppress(OSError, ValueError, IndexError):
                answer["job"]["job_id"] = int(_tail(folder / "control" / "job", 100)[-1])
                answer["job"]["started"] = True
    with contextlib.suppress(OSError, ValueError):
        answer["summary"] = _read_json(folder / "summary.json")
        answer["summary_written"] = (folder / "summary.json").stat().st_mtime
    if job_id is not None:
        outcomes = sorted((folder / "control").glob(f"{int(job_id)}.r*.outcome"), key=_attempt)
        with contextlib.suppress(OSError, ValueError, IndexError):
            answer["outcome"] = _read_json(outcomes[-1])
    with contextlib.suppress(OSError):
        for line in reversed(_tail(folder / "metrics.jsonl", 65536)):
            with contextlib.suppress(ValueError):
                metric = json.loads(line)
                if isinstance(metric, dict) and "step" in metric:
                    answer["metric"] = metric
                    break
    return answer


@operation
def read_log(
    workspace: str, run: str, job_id: int, *, lines: int, rank: int | None, element: int | None = None
) -> Json:
    """Return the last lines of a job's merged log, or of one rank's own output in its last attempt."""
    logs = pathlib.Path(workspace, "runs", run, "logs")
    if rank is None:
        path = logs / _log_name(job_id, element)
        return {"path": str(path), "lines": _tail(path, MAX_TAIL_BYTES)[-lines:]}
    found = [log for log in _rank_logs(pathlib.Path(workspace, "runs", run), job_id) if log["rank"] == rank]
    if not found:
        raise FileNotFoundError(errno.ENOENT, f"no output of rank {rank}", str(logs / f"{job_id}.r*"))
    found.sort(key=lambda log: log["written"])
    text = [line for log in found for line in _tail(pathlib.Path(log["path"]), MAX_TAIL_BYTES)]
    return {"path": str(pathlib.Path(found[0]["path"]).parent), "lines": text[-lines:]}


@operation
def follow_log(
    workspace: str, run: str, job_id: int, *, rank: int | None, offsets: dict[str, int], element: int | None = None
) -> Json:
    """Return whole lines that a log has gained since `offsets`, and the new offsets; of a new file the lines so far."""
    folder = pathlib.Path(workspace, "runs", run)
    paths = [str(folder / "logs" / _log_name(job_id, element))]
    if rank is not None:
        paths = [log["path"] for log in _rank_logs(folder, job_id) if log["rank"] == rank]
    lines: list[str] = []
    after = dict(offsets)
    for path in paths:
        with contextlib.suppress(FileNotFoundError), _opened(pathlib.Path(path)) as file:
            size = os.fstat(file.fileno()).st_size
            begin = offsets.get(path, max(0, size - MAX_TAIL_BYTES))
            file.seek(begin if begin <= size else 0)
            data = file.read(MAX_TAIL_BYTES)
            whole = data.rfind(b"\n") + 1 or (len(data) if len(data) == MAX_TAIL_BYTES else 0)
            lines += data[:whole].decode(errors="replace").splitlines()
            after[path] = (begin if begin <= size else 0) + whole
    return {"lines": lines, "offsets": after}


@operation
def find_failure(workspace: str, run: str, job_id: int, lines: int) -> Json:
    """Return the last lines of the rank that failed first, or else of the job's log; and what failed before that."""
    folder = pathlib.Path(workspace, "runs", run)
    history: list[str] = []
    with contextlib.suppress(OSError):
        history = _tail(folder / "control" / f"{int(job_id)}.failures", 65536)
    failure = _first_failure(folder, job_id, lines)
    hosts: list[str] = []
    with contextlib.suppress(OSError):  # in the order of the ranks, which is not that of the names
        hosts = " ".join(_tail(folder / "control" / f"{int(job_id)}.hosts", 1 << 20)).split()
    node: int | None = failure["node"]
    ranks, nodes = _absent(folder, int(job_id), failure["lines"], hosts)
    host = hosts[node] if node is not None and node < len(hosts) else ""
    return {**failure, "host": host, "history": history, "absent_ranks": ranks, "absent_nodes": nodes}


def blame(run_dir: str, job_id: str, attempt: str, hosts: list[str]) -> tuple[str, str, str]:
    """Return for a job's script whose fault an attempt's failure is, on which node ("-"), and the words that say so.

    `mistake`: it would fail again. `node`: it may work elsewhere. `program`: it may work again.
    """
    folder = pathlib.Path(run_dir)
    with contextlib.suppress(OSError, ValueError):
        outcome = _read_json(folder / "control" / f"{attempt}.outcome")
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
    failure = _first_failure(folder, int(job_id), 20)
    ranks, absent = _absent(folder, int(job_id), failure["lines"], hosts)
    if len(absent) == 1 < len(hosts):
        return "node", absent[0], f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:16]))} did not come"
    number: int | None = failure["node"]
    node = hosts[number] if number is not None and number < len(hosts) else "-"
    words = str(failure["lines"][-1]) if failure["lines"] else ""
    if any(_BAD_NODE.search(line) for line in failure["lines"]) and node != "-":
        return "node", node, words
    if failure["peer"]:
        silent = [host for number, host in enumerate(hosts) if number not in failure["told"]]
        if len(silent) == 1 and len(hosts) > 1:
            return "node", silent[0], f"it fell silent; the others say: {words}"
    return "program", node, words


def _first_failure(folder: pathlib.Path, job_id: int, lines: int) -> Json:
    """Return the rank that failed first in a job's last attempt, its node's number and its last lines.

    A rank that only tells of a peer it lost (`peer`) comes after one that tells of a failure of its own; among equals
    the one that fell silent first is taken. `told` are the nodes that tell anything.
    """
    suspects: list[tuple[bool, float, Json]] = []
    for log in _rank_logs(folder, job_id)[:MAX_RANK_LOGS]:
        text = [line for line in _tail(pathlib.Path(log["path"]), 32768) if line.strip()]
        if any(_TELLING.search(line) for line in text):
            gist = _gist(text, lines)
            lost_a_peer = bool(_PEER_GONE.search(gist[-1]) or _PEER_GONE.search(text[-1]))
            suspects.append((lost_a_peer, log["written"], {"rank": log["rank"], "node": log["node"], "lines": gist}))
    merged = _merged_log(folder, job_id)
    only_peers = all(lost_a_peer for lost_a_peer, _, _ in suspects)
    told = sorted({suspect["node"] for _, _, suspect in suspects})
    if only_peers and (killed := _killed(folder, merged)):
        return {**killed, "peer": False, "told": told}
    if suspects:
        return {**min(suspects, key=lambda suspect: suspect[:2])[2], "peer": only_peers, "told": told}
    text = [re.sub(r"^\d+: ", "", line) for line in merged if line.strip()]
    telling = [line for line in text if not _OURS.match(line)]
    return {"rank": None, "node": None, "lines": _gist(telling or text, lines), "peer": False, "told": told}


def _absent(folder: pathlib.Path, job_id: int, lines: list[str], hosts: list[str]) -> tuple[list[int], list[str]]:
    """Return the ranks that never came to where all meet, and their nodes; none where that is not why it failed.

    The payload names them. A script's own meeting only says that it waited in vain: then the nodes are meant that never
    got so far as to start ranks.
    """
    text = "\n".join(lines)
    per_node = _per_node(folder)
    ranks: list[int] = []
    if found := _DID_NOT_COME.search(text):
        ranks = [int(number) for number in re.findall(r"\d+", found[1])]
    elif "rank 0 published no address" in text:
        ranks = [0]
    elif _WAITED_IN_VAIN.search(text):
        merged = _merged_log(folder, job_id)
        begins = [index for index, line in enumerate(merged) if line.startswith("[ENV] job=")]
        lines_now = merged[begins[-1] :] if begins else merged
        came = {found[1] for line in lines_now if (found := re.match(r"(?:\d+: )?\[ENV\] node=(\S+) ", line))}
        late = [number for number, host in enumerate(hosts) if came and host not in came]
        ranks = [rank for number in late for rank in range(number * per_node, (number + 1) * per_node)]
    numbers = sorted({rank // per_node for rank in ranks})
    return ranks, [hosts[number] for number in numbers if number < len(hosts)]


def _merged_log(folder: pathlib.Path, job_id: int) -> list[str]:
    with contextlib.suppress(OSError):
        return _tail(folder / "logs" / f"{int(job_id)}.out", MAX_TAIL_BYTES)
    return []


def _of_attempt(merged: list[str], attempt: str) -> list[str]:
    """Return a log's lines from where the attempt begins."""
    begins = [i for i, line in enumerate(merged) if line.startswith("[ENV] job=") and f" attempt={attempt} " in line]
    return merged[begins[-1] :] if begins else merged


@operation
def list_results(workspace: str, limit: int) -> Json:
    """Return the runs, the newest first, each with job.json, summary.json, its last outcome and its last metric.

    What cannot be read counts as not there; a folder with none of our files is foreign.
    """
    found: list[tuple[float, pathlib.Path]] = []
    foreign = 0
    with os.scandir(pathlib.Path(workspace, "runs")) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                if entry.name.startswith(".") or not entry.is_dir(follow_symlinks=False):
                    continue
                times = [
                    _time(pathlib.Path(entry.path, name)) for name in ("job.json", "metrics.jsonl", "summary.json")
                ]
                if any(times):
                    found.append((times[0] or max(times), pathlib.Path(entry.path)))
                else:
                    foreign += 1
    found.sort(reverse=True, key=lambda pair: (pair[0], pair[1].name))
    runs: list[Json] = []
    for _, folder in found[: max(1, limit)]:
        one = read_run(workspace, folder.name, None)
        whole: Json = one["summary"] or {}
        summary: Json = {key: value for key, value in whole.items() if not isinstance(value, dict | list)}
        told: Json = {"name": folder.name, "job": one["job"], "metric": one["metric"]}
        runs.append(told | {"summary": summary, "outcome": _outcome(folder)})
    return {"runs": runs, "count": len(found), "foreign": foreign}


@operation
def read_result(workspace: str, run: str) -> Json:
    """Return all that a run left: what was asked, settings, figures, checkpoints, attempts, the curve in points."""
    folder = pathlib.Path(workspace, "runs", run)
    if not folder.is_dir():
        raise FileNotFoundError(errno.ENOENT, "no such run", str(folder))
    one = read_run(workspace, run, None)
    answer: Json = {"name": run, "job": one["job"], "summary": one["summary"], "outcome": _outcome(folder)}
    for key, name in (("config", "config.json"), ("tracking", "tracking.json")):
        answer[key] = None
        with contextlib.suppress(OSError, ValueError):
            answer[key] = _read_json(folder / name)
    answer |= {"steps": [], "evals": [], "lines": 0}
    with contextlib.suppress(OSError):
        answer |= _curve(folder / "metrics.jsonl")
    checkpoints: list[Json] = []
    for path in sorted(folder.glob("epoch-*"))[-MAX_LISTED:]:
        with contextlib.suppress(OSError, ValueError):
            manifest = _read_json(path / "manifest.json")
            meta: Json = manifest["meta"] if isinstance(manifest.get("meta"), dict) else manifest
            checkpoints.append({"name": path.name, "step": meta.get("step")})
    answer["checkpoints"] = checkpoints[-20:]
    for link in ("latest", "best"):
        answer[link] = None
        with contextlib.suppress(OSError):
            answer[link] = (folder / link).readlink().name
    attempts: list[Json] = []
    for path in sorted((folder / "control").glob("*.outcome"), key=_time)[-20:]:
        with contextlib.suppress(OSError, ValueError):
            told = _read_json(path)
            name = path.name.removesuffix(".outcome")
            attempts.append({"attempt": name, "outcome": str(told.get("outcome"))[:40], "step": told.get("step")})
    answer["attempts"] = attempts
    png = folder / "loss.png"
    answer["png"] = str(png) if _time(png) else None
    return answer


@operation
def read_curve(workspace: str, run: str) -> Json:
    """Return (step, loss) of training and validation; nothing where a run has no metrics."""
    with contextlib.suppress(OSError):
        return _curve(pathlib.Path(workspace, "runs", run, "metrics.jsonl"))
    return {"steps": [], "evals": [], "lines": 0}


@operation
def read_briefly(workspace: str, runs: list[str]) -> Json:
    """Return of each run job.json, config.json, summary.json, its last outcome and its last metric."""
    found: list[Json] = []
    for run in runs:
        one = read_run(workspace, run, None)
        folder = pathlib.Path(workspace, "runs", run)
        config: Json | None = None
        with contextlib.suppress(OSError, ValueError):
            config = _read_json(folder / "config.json")
        found.append({**one, "name": run, "config": config, "outcome": _outcome(folder)})
    return {"runs": found}


@operation
def measure_source(path: str, part_bytes: int) -> Json:
    """Return the bytes below a path and into how many parts they are cut; of a very large folder a part."""
    total = parts = files = 0
    began = time.monotonic()
    top = pathlib.Path(path)
    found = [top] if top.is_file() else top.rglob("*")
    for file in found:
        with contextlib.suppress(OSError):
            about = file.lstat()
            if not stat.S_ISREG(about.st_mode):
                continue
            packed = file.suffix.lower() in (".tar", ".tgz", ".gz", ".xz", ".bz2")
            files += 1
            total += about.st_size
            parts += 1 if packed else -(-about.st_size // part_bytes)
        if files >= 200_000 or time.monotonic() - began > 20:
            break
    return {"bytes": total, "parts": parts, "files": files}


@operation
def count_parts(output: str) -> Json:
    """Return how many parts of a dataset are done."""
    return {"parts": sum(1 for _ in pathlib.Path(output, "parts").glob("part-*.json"))}


@operation
def find_failed_elements(workspace: str, run: str, array: int) -> Json:
    """Return the elements of an array whose logs say why they failed, each with that line, at most ten."""
    failed: list[Json] = []
    logs = pathlib.Path(workspace, "runs", run, "logs")
    numbered = [(path.stem.rpartition("_")[2], path) for path in logs.glob(f"{int(array)}_*.out")]
    for number, path in sorted((int(number), path) for number, path in numbered if number.isdecimal()):
        with contextlib.suppress(OSError):
            lines = [line.strip() for line in _tail(path, 65536) if line.strip()]
            telling = [line for line in lines if _TELLING.search(line)]
            if telling and not any(line.startswith("[DONE]") for line in lines[-1:]):
                line = re.sub(r"^\w+:ddptrain:\[FATAL\] ", "", telling[-1])
                failed.append({"element": number, "line": line[:500]})
    return {"failed": failed[:10]}


@operation
def read_json(path: str) -> Json:
    """Return the object in a file."""
    try:
        return _read_json(pathlib.Path(path))
    except ValueError as e:
        raise RefusedError(f"{path} is not a JSON object: {e}") from e


@operation
def read_baseline(path: str) -> Json:
    """Return the entries of a baseline that are whole; none where there is no file."""
    entries: list[Json] = []
    with contextlib.suppress(OSError, ValueError):
        held: typing.Any = _read_json(pathlib.Path(path)).get("entries")
        for entry in _objects(held):
            with contextlib.suppress(KeyError, TypeError, ValueError):
                points = [{"bytes": int(p["bytes"]), "busbw": float(p["busbw"])} for p in entry["points"]]
                names = ("collective", "backend", "created")
                numbers = {name: int(entry[name]) for name in ("nodes", "world_size")}
                if points and min(numbers.values()) > 0:
                    texts = {name: str(entry[name])[:80] for name in names}
                    entries.append(texts | numbers | {"points": points, "average_busbw": float(entry["average_busbw"])})
    return {"entries": entries}


@operation
def store_baseline(path: str, entries: list[Json]) -> Json:
    """Put entries into the baseline, each in place of the one of its shape."""
    file = pathlib.Path(path)
    known: list[Json] = []
    with contextlib.suppress(OSError, ValueError):
        known = _objects(_read_json(file).get("entries"))

    def shape(entry: Json) -> list[str]:
        return [str(entry.get(name)) for name in ("collective", "backend", "nodes", "world_size")]

    fresh = [shape(entry) for entry in entries]
    kept = [entry for entry in known if shape(entry) not in fresh]
    _replace(file, json.dumps({"format": 1, "entries": [*kept, *entries][-500:]}, indent=1) + "\n")
    return {}


@operation
def measured_rates(workspace: str) -> Json:
    """Return the rates that the newest finished trainings left, with what they depend on."""
    rates: list[Json] = []
    for run in list_runs(workspace)["runs"][:100]:
        folder = pathlib.Path(workspace, "runs", run)
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, IndexError):
            config, summary = _read_json(folder / "config.json"), _read_json(folder / "summary.json")
            device = str(summary["ranks"][0]["device"])
            rate, world = float(summary["tokens_per_second"]), int(summary["world_size"])
            if rate > 0 and world > 0:
                about = {name: config.get(name) for name in ("model", "seq_len", "batch", "grad_accum", "precision")}
                about["nodes"] = summary.get("nodes")
                rates.append(
                    about | {"run": run, "tokens_per_second": rate, "world_size": world, "on_gpu": device != "cpu"}
                )
    return {"rates": rates}


@operation
def open_examination(workspace: str, nonce: str) -> Json:
    """Make the folder in which the nodes prove that they share the workspace; a day-old leftover goes."""
    runs = pathlib.Path(workspace, "runs")
    for path in runs.glob(".doctor-*"):
        if time.time() - path.lstat().st_mtime > 86400:
            shutil.rmtree(path, ignore_errors=True)
    folder = runs / f".doctor-{nonce}"
    folder.mkdir(mode=0o755)
    return {"folder": str(folder), "nonce": nonce}


@operation
def close_examination(folder: str) -> Json:
    """Remove that folder."""
    if pathlib.Path(folder).name.startswith(".doctor-"):
        shutil.rmtree(folder, ignore_errors=True)
    return {}


@operation
def verify_environments(folder: str) -> Json:
    """Return the archives whose bytes are not what their manifests say, of the newest eight."""
    manifests = sorted(pathlib.Path(folder).glob("*.json"), key=lambda path: path.lstat().st_mtime, reverse=True)
    damaged: list[str] = []
    for path in manifests[:8]:
        with contextlib.suppress(ValueError, KeyError):
            manifest = _read_json(path)
            if path.stem != manifest["hash"]:
                continue
            archive = path.with_suffix(".tar.zst")
            try:
                with _opened(archive) as found:
                    file: typing.Any = found
                    right = hashlib.file_digest(file, "sha256").hexdigest() == manifest["sha256"]
            except OSError:
                right = False
            if not right:
                damaged.append(str(archive))
    return {"damaged": damaged}


@operation
def open_cache(base: str, store: str) -> Json:
    """Return a fresh folder for a build below `base`, which is private to this account; a day-old leftover goes.

    Also return the bytes that are free there and in the folder `store`.
    """
    top = pathlib.Path(base)
    with contextlib.suppress(FileExistsError):
        top.mkdir(mode=0o700)
    about = top.lstat()
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid():
        raise RefusedError(f"{base} is not a folder of this account (uid {os.geteuid()}); remove it")
    top.chmod(0o700)
    for path in top.glob("build-*"):
        if time.time() - path.lstat().st_mtime > 86400:
            shutil.rmtree(path, ignore_errors=True)
    free = {"free_bytes": shutil.disk_usage(base).free, "store_free_bytes": shutil.disk_usage(store).free}
    return {"folder": tempfile.mkdtemp(prefix="build-", dir=base), **free}


@operation
def digest_wheelhouse(path: str) -> Json:
    """Return a hash of what a folder or an archive of wheels holds."""
    place = pathlib.Path(path)
    if not place.is_dir():
        with _opened(place) as file:
            return {"sha256": hashlib.file_digest(file, "sha256").hexdigest()}
    whole = hashlib.sha256()
    for wheel in _wheels(place):
        with _opened(wheel) as file:
            whole.update(f"{wheel.name}\0{hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return {"sha256": whole.hexdigest()}


@operation
def open_wheelhouse(path: str, target: str) -> Json:
    """Return the folder of the wheels: `path` itself, or `target`, where an archive's are put. Raises RefusedError.

    An archive with a member that would lead outside, or is a link or a device, is refused as a whole; what is no wheel
    is left out.
    """
    place, folder = pathlib.Path(path), pathlib.Path(target)
    if place.is_dir():
        return {"folder": path, "wheels": len(_wheels(place))}
    folder.mkdir(mode=0o700)
    room = shutil.disk_usage(folder).free - (256 << 20)
    with _opened(place) as file:
        magic = file.read(4)
    unpack = _unzip if magic[:2] == b"PK" else _untar
    try:
        for name, size, source in unpack(place):
            if (room := room - size) < 0:
                raise RefusedError(f"{path} does not fit into {folder.parent}")
            try:
                with (folder / name).open("xb") as wheel:
                    shutil.copyfileobj(source, wheel, 1 << 20)
            except FileExistsError:
                raise RefusedError(f"{path} holds {name} twice") from None
    except (tarfile.TarError, zipfile.BadZipFile, EOFError, zlib.error, RuntimeError) as e:
        raise RefusedError(f"{path} is damaged: {e}") from e
    return {"folder": target, "wheels": len(_wheels(folder))}


@operation
def finish_environment(build: str, payload: str) -> Json:
    """Put the payload into a built environment, take out what no run reads, and return the environment's size."""
    environment = pathlib.Path(build, "env")
    (site,) = environment.glob("lib/python3.*/site-packages")
    target = site / "ddptrain"
    shutil.copytree(pathlib.Path(payload, "ddptrain"), target, ignore=shutil.ignore_patterns("__pycache__"))
    compiled = [str(environment / "bin" / "python"), "-m", "compileall", "-q", str(target)]
    subprocess.run(compiled, check=True, timeout=300, capture_output=True)
    for folder in [site / "torch" / "test", *_folders_of_tests(site)]:
        shutil.rmtree(folder, ignore_errors=True)
    for path in (site / "torch" / "bin").glob("*"):
        if re.search(r"(^|_)[tT]est|Test$|^protoc", path.name):  # what is needed there is torch_shm_manager
            path.unlink()
    sizes = [path.lstat().st_size for path in environment.rglob("*") if path.is_file() and not path.is_symlink()]
    return {"size_bytes": sum(sizes), "files": len(sizes)}


@operation
def store_environment(build: str, folder: str, manifest: Json) -> Json:
    """Archive a built environment into `folder` under its own hash; its manifest comes last and makes it count."""
    descriptor, name = tempfile.mkstemp(prefix=".environment-", suffix=".tmp", dir=folder)
    os.close(descriptor)
    partial = pathlib.Path(name)
    try:
        environment = shlex.quote(str(pathlib.Path(build, "env")))
        script = f"tar -C {environment} --sort=name -cf - . | zstd -q -T0 -3 -f -o {shlex.quote(name)}"
        argv = ["/bin/bash", "-o", "pipefail", "-c", script]
        done = subprocess.run(argv, check=False, capture_output=True, text=True, timeout=3600)
        if done.returncode != 0:
            raise RefusedError(f"archiving the environment failed: {' '.join(done.stderr.split())[-300:]}")
        with partial.open("rb+") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            os.fsync(file.fileno())
        partial.chmod(0o644)
        size = partial.stat().st_size
        partial.replace(pathlib.Path(folder, f"{digest[:16]}.tar.zst"))
    finally:
        partial.unlink(missing_ok=True)
    complete = {**manifest, "hash": digest[:16], "sha256": digest, "size_bytes": size}
    _replace(pathlib.Path(folder, f"{digest[:16]}.json"), json.dumps(complete, indent=1, sort_keys=True) + "\n")
    return complete


@operation
def store_payload(source: str, target: str) -> Json:
    """Copy the payload's package to a folder that appears whole or not at all."""
    if pathlib.Path(target).is_dir():
        return {}
    partial = pathlib.Path(tempfile.mkdtemp(prefix=".payload-", dir=pathlib.Path(target).parent))
    try:
        unwanted = shutil.ignore_patterns("__pycache__")
        shutil.copytree(pathlib.Path(source, "ddptrain"), partial / "ddptrain", ignore=unwanted)
        partial.chmod(0o755)
        with contextlib.suppress(OSError):  # somebody else was quicker
            partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return {}


@operation
def prune_environments(workspace: str, keep: list[str], runs: list[str]) -> Json:
    """Remove environments that are neither kept, nor used by these runs, nor among the newest three of their build.

    The manifest goes first, so that nothing half removed is ever used. Leftovers of a day ago go too.
    """
    folder = pathlib.Path(workspace, "environments")
    used = set(keep)
    for run in runs:
        with contextlib.suppress(OSError, ValueError):
            used.add(
                str(
                    _read_json(pathlib.Path(workspace, "runs", pathlib.PurePath(run).name, "job.json")).get(
                        "environment"
                    )
                )
            )
    found: dict[str, list[tuple[str, str]]] = {}
    for path in folder.glob("*.json"):
        with contextlib.suppress(OSError, ValueError, KeyError):
            manifest = _read_json(path)
            if manifest["hash"] == path.stem and re.fullmatch(r"[0-9a-f]{16}", path.stem):
                found.setdefault(str(manifest["build"]), []).append((str(manifest["created"]), path.stem))
    removed: list[str] = []
    for made in found.values():
        for _, name in sorted(made, reverse=True)[3:]:
            if name not in used:
                (folder / f"{name}.json").unlink(missing_ok=True)
                (folder / f"{name}.tar.zst").unlink(missing_ok=True)
                removed.append(name)
    for path in [*folder.glob(".environment-*.tmp"), *folder.glob("*.tar.zst")]:
        with contextlib.suppress(OSError):
            alone = path.name.startswith(".") or not (folder / path.name.replace(".tar.zst", ".json")).exists()
            if alone and time.time() - path.lstat().st_mtime > 86400:
                path.unlink()
    return {"removed": removed}


@operation
def remove_build(build: str) -> Json:
    """Remove a build's folder."""
    shutil.rmtree(build, ignore_errors=True)
    return {}


@operation
def last_step(path: str) -> Json:
    """Return what pip's log, which may not exist yet, says that pip does now."""
    with contextlib.suppress(OSError):
        for line in reversed(_tail(pathlib.Path(path), 65536)):
            if found := re.search(
                r"\b(Collecting|Downloading|Using cached|Building|Installing|Attempting|Successfully) .*", line
            ):
                return {"step": found[0]}
    return {"step": ""}


def _log_name(job_id: int, element: int | None) -> str:
    return f"{int(job_id)}.out" if element is None else f"{int(job_id)}_{int(element)}.out"


def _objects(value: object) -> list[Json]:
    """Return the objects in what should be a list of them."""
    found = typing.cast(list[object], value) if isinstance(value, list) else []
    return [typing.cast(Json, entry) for entry in found if isinstance(entry, dict)]


def _time(path: pathlib.Path) -> float:
    """Return when a file was written; 0 where there is none."""
    with contextlib.suppress(OSError):
        about = path.lstat()
        return about.st_mtime if stat.S_ISREG(about.st_mode) else 0.0
    return 0.0


def _outcome(folder: pathlib.Path) -> Json | None:
    """Return what the last attempt of a run's last job wrote."""
    found = sorted((folder / "control").glob("*.outcome"), key=_time)
    with contextlib.suppress(OSError, ValueError, KeyError):
        job = _read_json(folder / "job.json").get("job_id")
        found = [path for path in found if job is None or path.name.startswith(f"{job}.")]
    for path in reversed(found):
        with contextlib.suppress(OSError, ValueError):
            return _read_json(path)
    return None


def _curve(path: pathlib.Path) -> Json:
    """Return (step, loss) of training and validation and how many records there are; of a large file a sample."""
    steps: dict[int, float] = {}
    evals: dict[int, float] = {}
    lines = 0
    with _opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        blocks = [(0, size)] if size <= MAX_JSON_BYTES else [(size * part // 64, 65536) for part in range(64)]
        if len(blocks) > 1:
            blocks.append((size - 65536, 65536))
        for at, length in blocks:
            file.seek(at)
            text = file.read(length).decode(errors="replace")
            pieces = text.split("\n")[1 if at else 0 :]
            lines += len(pieces)
            for piece in pieces:
                try:
                    record = json.loads(piece)
                    step = int(record["step"])
                    key, target = ("val_loss", evals) if record.get("kind") == "eval" else ("loss", steps)
                    value = float(record[key])
                except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
                    continue  # half a line, or somebody's own
                if abs(value) < 1e300:
                    target[step] = value
    known = len(steps) + len(evals)
    if len(blocks) > 1 and lines:
        known = int(known * size / sum(length for _, length in blocks))
    return {"steps": _thinned(steps), "evals": _thinned(evals), "lines": known}


def _thinned(points: dict[int, float]) -> list[tuple[int, float]]:
    ordered = sorted(points.items())
    every = -(-len(ordered) // 2000) or 1
    return ordered[::every] if not ordered or ordered[-1] in ordered[::every] else [*ordered[::every], ordered[-1]]


def _folders_of_tests(site: pathlib.Path) -> list[pathlib.Path]:
    packages = [path for path in site.iterdir() if path.is_dir() and path.name not in ("torch", "ddptrain")]
    return [folder for package in packages for folder in package.rglob("tests") if folder.is_dir()]


def _gist(text: list[str], lines: int) -> list[str]:
    """Return the lines that say why: up to the last `[FATAL]` or exception, without what came after it."""
    for index in range(len(text) - 1, -1, -1):
        if "[FATAL]" in text[index] or _REASON.match(text[index]):
            return text[max(0, index + 1 - lines) : index + 1]
    return text[-lines:]


def _killed(folder: pathlib.Path, merged: list[str]) -> Json | None:
    """Return the rank that died of a signal, of which only torchrun's agent or srun tells."""
    per_node = _per_node(folder)
    names = {member.value: member.name for member in signal.Signals}
    for line in merged:
        found = re.match(r"(\d+): .*\bfailed \(exitcode: -(\d+)\) local_rank: (\d+)", line)
        if found and int(found[2]) != signal.SIGTERM:  # TERM is how the agent ends the others
            node, number, local = (int(value) for value in found.groups())
            return {"rank": node * per_node + local, "node": node, "lines": [_signal_text(number, names)]}
        if found := _TASK_KILLED.search(line):
            task, number = int(found[1]), _KILLERS.get(found[2])
            words = _signal_text(number, names) if number else "killed: the job's memory ran out"
            if _launcher(folder) == "srun":  # a task is a rank
                return {"rank": task, "node": task // per_node, "lines": [words]}
            return {"rank": task * per_node, "node": task, "lines": [words]}  # a task is a node's agent
    return None


def _signal_text(number: int, names: dict[int, str]) -> str:
    hint = "; the kernel does that to a process when memory runs out" if number == signal.SIGKILL else ""
    return f"killed by signal {number} ({names.get(number, 'unknown')}){hint}"


def _launcher(folder: pathlib.Path) -> str:
    with contextlib.suppress(OSError, ValueError, KeyError):
        return str(_read_json(folder / "job.json")["launcher"])
    return "torchrun"


def _per_node(folder: pathlib.Path) -> int:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return max(1, int(_read_json(folder / "job.json")["ranks_per_node"]))
    return 1


def _rank_logs(folder: pathlib.Path, job_id: int) -> list[Json]:
    """Return the files that hold each rank's output, of the job's last attempt."""
    per_node = _per_node(folder)
    attempts = sorted((folder / "logs").glob(f"{int(job_id)}.r*"), key=_attempt)
    attempts = [path for path in attempts if _attempt(path) == _attempt(attempts[-1])]
    found: list[Json] = []
    for attempt in attempts:
        for path in attempt.glob("node-*/*/attempt_*/*/std*.log"):
            with contextlib.suppress(ValueError, OSError):
                node, local = int(path.parents[3].name.removeprefix("node-")), int(path.parent.name)
                about = path.lstat()
                if about.st_size and stat.S_ISREG(about.st_mode):
                    record = {"node": node, "rank": node * per_node + local, "written": about.st_mtime}
                    found.append({"path": str(path), **record})
    return sorted(found, key=lambda log: (log["rank"], log["path"]))


def _attempt(path: pathlib.Path) -> tuple[int, int]:
    """Return how often the job was queued again and started again within that, from a name like 12.r1t2.outcome."""
    match = re.search(r"\.r(\d+)(?:t(\d+))?(\.|$)", path.name)
    return (int(match[1]), int(match[2] or 0)) if match else (-1, 0)


def _read_json(path: pathlib.Path) -> Json:
    with _opened(path) as file:
        try:
            value: object = json.loads(file.read(MAX_JSON_BYTES))
        except RecursionError:
            raise ValueError("nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError("not an object")
    return typing.cast(Json, value)


def _tail(path: pathlib.Path, limit: int) -> list[str]:
    """Return the lines in the last `limit` bytes of a file."""
    with _opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(max(0, size - limit))
        lines = file.read(limit).decode(errors="replace").splitlines()
    return lines[1:] if size > limit else lines


def _opened(path: pathlib.Path) -> io.BufferedReader:
    """Open a regular file: never a pipe that would not answer, never through a last link."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return os.fdopen(descriptor, "rb")


def _wheels(folder: pathlib.Path) -> list[pathlib.Path]:
    """Return a folder's wheels. Raises RefusedError where there are none, or one is not a plain file."""
    wheels = sorted(folder.glob("*.whl"))
    if strange := [wheel for wheel in wheels if not stat.S_ISREG(wheel.lstat().st_mode)]:
        raise RefusedError(f"{strange[0]} is no plain file; put the wheel itself there")
    if not wheels:
        raise RefusedError(f"no .whl file is in {folder.name}")
    return wheels


Member = tuple[str, int, typing.IO[bytes]]  # the wheel's name, its size, its content


def _untar(path: pathlib.Path) -> collections.abc.Iterator[Member]:
    """Yield the wheels of a .tar or .tar.zst."""
    with _opened(path) as file:
        is_packed = file.read(4) == b"\x28\xb5\x2f\xfd"  # RFC 8878, 3.1.1
    argv = ["zstd", "-q", "-d", "-c"] if is_packed else ["cat"]
    with _opened(path) as file, subprocess.Popen(argv, stdin=file, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        with tarfile.open(fileobj=process.stdout, mode="r|") as archive:
            for member in archive:
                name = _member(path, member.name)
                if not (member.isfile() or member.isdir()):
                    raise RefusedError(f"{path}: {name} is a link or a device; pack plain files only")
                if name.endswith(".whl") and (source := archive.extractfile(member)) is not None:
                    yield name, member.size, source
        while process.stdout.read(1 << 20):  # what fills the last block
            pass
    if process.returncode:
        raise RefusedError(f"{path} is damaged: {argv[0]} cannot read it")


def _unzip(path: pathlib.Path) -> collections.abc.Iterator[Member]:
    """Yield the wheels of a .zip."""
    with _opened(path) as file, zipfile.ZipFile(file) as archive:
        for member in archive.infolist():
            name = _member(path, member.filename)
            kind = stat.S_IFMT(member.external_attr >> 16)
            if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
                raise RefusedError(f"{path}: {name} is a link or a device; pack plain files only")
            if name.endswith(".whl") and not member.is_dir():
                with archive.open(member) as source:
                    yield name, member.file_size, source


def _member(path: pathlib.Path, name: str) -> str:
    """Return the last part of a member's name. Raises RefusedError where the name leads out of the archive."""
    parts = name.replace("\\", "/").split("/")
    if parts[0] == "" or ".." in parts:
        raise RefusedError(
            f"{path}: the member {ascii(name)[:200]} leads outside; pack names without .. and a leading /"
        )
    return parts[-1]


def _private(folder: pathlib.Path) -> pathlib.Path:
    """Return a folder of this account that nobody else can enter."""
    about = folder.lstat()
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid():
        raise RefusedError(f"{folder} is not a folder of this account (uid {os.geteuid()}); as root: remove it")
    if about.st_mode & 0o7777 != 0o700:
        folder.chmod(0o700)
    return folder


def _replace(path: pathlib.Path, text: str, *, mode: int = 0o644) -> None:
    """Write a file so that a reader sees the old or the new one."""
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    partial = pathlib.Path(name)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
            os.fchmod(file.fileno(), mode)
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def answer(request: Json) -> Json:
    """Return the answer to one request: {"ok": ...}, or {"error": a line, "kind": an errno's name or "refused"}."""
    try:
        return {"ok": OPERATIONS[request["operation"]](**request["arguments"])}
    except RefusedError as e:
        return {"error": str(e), "kind": "refused"}
    except OSError as e:
        return {
            "error": f"{e.filename or 'workspace'}: {e.strerror or e}",
            "kind": errno.errorcode.get(e.errno or 0, "EIO"),
        }
    except subprocess.SubprocessError as e:
        return {"error": str(e), "kind": "refused"}


if __name__ == "__main__" and sys.argv[1:2] == ["blame"]:  # in a job's script, which has this file as explain.py
    answered = blame(sys.argv[2], sys.argv[3], sys.argv[4], sys.argv[5:])
    print("\t".join(" ".join(word.split())[:300] for word in answered))
elif __name__ == "__main__":
    os.umask(0o022)
    for one in sys.stdin:
        print(json.dumps(answer(json.loads(one))), flush=True)
