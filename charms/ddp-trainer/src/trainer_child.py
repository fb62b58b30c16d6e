"""What is done inside the workspace, always in a child of its own and with the rights of the account it is done for.

The trainer runs this file's text as `python3 -I -c TEXT`, as the submit user, with one JSON request on standard input
and one JSON answer on standard output. So a link that a user planted leads only where that user may go, a filesystem
that hangs hangs a child, and the charm's own folder need not be readable. Only the standard library is imported.
"""

import collections.abc
import contextlib
import errno
import hashlib
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
import tempfile
import time
import typing

Json = dict[str, typing.Any]
MAX_TAIL_BYTES = 256 * 1024
MAX_JSON_BYTES = 4 * 1024 * 1024
MAX_LISTED = 1000
MAX_RANK_LOGS = 2048
RUN_FILES = {"logs", "control", "job.sbatch", "job.json", "node.sh", "environment.sh"}

_PEER_GONE = re.compile(
    r"[Cc]onnection (closed|reset|refused)|Broken pipe|remote process exited|rank \d+ leaves:|SharedError"
    r"|Signal(Exception| \d+)|collective operation timeout|communicator was aborted|recvValue failed|heartbeat monitor"
)
_TELLING = re.compile(
    r"\[FATAL\]|Traceback \(most recent call last\)|^\S*(Error|Exception)\b|Segmentation fault|Killed|[Oo]ut of memory"
)
_REASON = re.compile(r"(\[rank\d+\]: ?)?[\w.]*(Error|Exception|Interrupt|Exit)\b")


class RefusedError(Exception):
    """The request cannot be done; `str()` is one line for a person."""


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
    return {"environments": manifests, "datasets": datasets[:MAX_LISTED], "writable": writable}


def locate(workspace: str, path: str) -> Json:
    """Return what `path` is, where it really is, and whether that is in the workspace."""
    real, top = pathlib.Path(os.path.realpath(path)), pathlib.Path(os.path.realpath(workspace))
    kind = "absent"
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        mode = real.stat().st_mode
        kind = "file" if stat.S_ISREG(mode) else "folder" if stat.S_ISDIR(mode) else "other"
    inside = real.is_relative_to(top) and real != top
    return {"kind": kind, "real": str(real), "inside": inside, "readable": os.access(real, os.R_OK)}


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


def write(path: str, text: str) -> Json:
    """Replace a file."""
    _replace(pathlib.Path(path), text)
    return {}


def remove_run(workspace: str, run: str) -> Json:
    """Remove the folder of a run that never started; one that holds more than `create_run` put there stays."""
    folder = pathlib.Path(workspace, "runs", run)
    held = {path.name for path in folder.iterdir()}
    used = any(any((folder / name).iterdir()) for name in held & {"logs", "control"})
    if held <= RUN_FILES and not used:
        shutil.rmtree(folder)
        return {"removed": True}
    return {"removed": False}


def list_runs(workspace: str) -> Json:
    """Return the names of the runs that hold a job, the last submitted first."""
    found: list[tuple[float, str]] = []
    for path in pathlib.Path(workspace, "runs").iterdir():
        with contextlib.suppress(OSError):
            found.append(((path / "job.json").lstat().st_mtime, path.name))
    return {"runs": [name for _, name in sorted(found, reverse=True)[:MAX_LISTED]]}


def find_run(workspace: str, job_id: int) -> Json:
    """Return the run that this job is, or was, an attempt at."""
    for path in pathlib.Path(workspace, "runs").glob(f"*/logs/{int(job_id)}.out"):
        return {"run": path.parent.parent.name}
    for run in list_runs(workspace)["runs"]:
        with contextlib.suppress(OSError, ValueError):
            if _read_json(pathlib.Path(workspace, "runs", run, "job.json")).get("job_id") == job_id:
                return {"run": run}
    return {"run": None}


def read_run(workspace: str, run: str, job_id: int | None) -> Json:
    """Return what a run says of itself: job.json, summary.json, the job's last outcome and the last step's metric."""
    folder = pathlib.Path(workspace, "runs", run)
    answer: Json = {"job": None, "summary": None, "outcome": None, "metric": None, "summary_written": 0.0}
    with contextlib.suppress(OSError, ValueError):
        answer["job"] = _read_json(folder / "job.json")
    with contextlib.suppress(OSError, ValueError):
        answer["summary"] = _read_json(folder / "summary.json")
        answer["summary_written"] = (folder / "summary.json").stat().st_mtime
    if job_id is not None:
        outcomes = sorted((folder / "control").glob(f"{int(job_id)}.r*.outcome"), key=_restarts)
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


def read_log(workspace: str, run: str, job_id: int, lines: int, rank: int | None) -> Json:
    """Return the last lines of a job's merged log, or of one rank's own output in its last attempt."""
    logs = pathlib.Path(workspace, "runs", run, "logs")
    if rank is None:
        path = logs / f"{int(job_id)}.out"
        return {"path": str(path), "lines": _tail(path, MAX_TAIL_BYTES)[-lines:]}
    found = [log for log in _rank_logs(workspace, run, job_id) if log["rank"] == rank]
    if not found:
        raise FileNotFoundError(errno.ENOENT, f"no output of rank {rank}", str(logs / f"{job_id}.r*"))
    found.sort(key=lambda log: log["written"])
    text = [line for log in found for line in _tail(pathlib.Path(log["path"]), MAX_TAIL_BYTES)]
    return {"path": str(pathlib.Path(found[0]["path"]).parent), "lines": text[-lines:]}


def find_failure(workspace: str, run: str, job_id: int, lines: int) -> Json:
    """Return the last lines of the rank that failed first, or else of the job's log.

    A rank that only tells of a peer it lost comes after one that tells of a failure of its own; among equals the one
    that fell silent first is taken.
    """
    suspects: list[tuple[bool, float, Json]] = []
    for log in _rank_logs(workspace, run, job_id)[:MAX_RANK_LOGS]:
        text = [line for line in _tail(pathlib.Path(log["path"]), 32768) if line.strip()]
        if any(_TELLING.search(line) for line in text):
            gist = _gist(text, lines)
            lost_a_peer = bool(_PEER_GONE.search(gist[-1]) or _PEER_GONE.search(text[-1]))
            suspects.append((lost_a_peer, log["written"], {"rank": log["rank"], "node": log["node"], "lines": gist}))
    merged: list[str] = []
    with contextlib.suppress(OSError):
        merged = _tail(pathlib.Path(workspace, "runs", run, "logs", f"{int(job_id)}.out"), MAX_TAIL_BYTES)
    if all(lost_a_peer for lost_a_peer, _, _ in suspects) and (killed := _killed(workspace, run, merged)):
        return killed
    if suspects:
        return min(suspects, key=lambda suspect: suspect[:2])[2]
    text = [re.sub(r"^\d+: ", "", line) for line in merged if line.strip()]
    telling = [line for line in text if not re.match(r"srun: |slurmstepd: |\[(RESULT|ENV|PREEMPT)\]", line)]
    return {"rank": None, "node": None, "lines": _gist(telling or text, lines)}


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


def remove_build(build: str) -> Json:
    """Remove a build's folder."""
    shutil.rmtree(build, ignore_errors=True)
    return {}


def last_step(path: str) -> Json:
    """Return what pip's log, which may not exist yet, says that pip does now."""
    with contextlib.suppress(OSError):
        for line in reversed(_tail(pathlib.Path(path), 65536)):
            if found := re.search(
                r"\b(Collecting|Downloading|Using cached|Building|Installing|Attempting|Successfully) .*", line
            ):
                return {"step": found[0]}
    return {"step": ""}


def _folders_of_tests(site: pathlib.Path) -> list[pathlib.Path]:
    packages = [path for path in site.iterdir() if path.is_dir() and path.name not in ("torch", "ddptrain")]
    return [folder for package in packages for folder in package.rglob("tests") if folder.is_dir()]


def _gist(text: list[str], lines: int) -> list[str]:
    """Return the lines that say why: up to the last `[FATAL]` or exception, without what came after it."""
    for index in range(len(text) - 1, -1, -1):
        if "[FATAL]" in text[index] or _REASON.match(text[index]):
            return text[max(0, index + 1 - lines) : index + 1]
    return text[-lines:]


def _killed(workspace: str, run: str, merged: list[str]) -> Json | None:
    """Return the rank that died of a signal, of which only its node's agent tells."""
    for line in merged:
        found = re.match(r"(\d+): .*\bfailed \(exitcode: -(\d+)\) local_rank: (\d+)", line)
        if found and int(found[2]) != signal.SIGTERM:  # TERM is how the agent ends the others
            node, number, local = (int(value) for value in found.groups())
            names = {member.value: member.name for member in signal.Signals}
            hint = "; the kernel does that to a process when memory runs out" if number == signal.SIGKILL else ""
            text = f"killed by signal {number} ({names.get(number, 'unknown')}){hint}"
            return {"rank": node * _per_node(workspace, run) + local, "node": node, "lines": [text]}
    return None


def _per_node(workspace: str, run: str) -> int:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return max(1, int(_read_json(pathlib.Path(workspace, "runs", run, "job.json"))["ranks_per_node"]))
    return 1


def _rank_logs(workspace: str, run: str, job_id: int) -> list[Json]:
    """Return the files into which torchrun led each rank's output, of the job's last attempt."""
    folder = pathlib.Path(workspace, "runs", run)
    per_node = _per_node(workspace, run)
    attempts = sorted((folder / "logs").glob(f"{int(job_id)}.r*"), key=_restarts)
    found: list[Json] = []
    for attempt in attempts[-1:]:
        for path in attempt.glob("node-*/*/attempt_*/*/std*.log"):
            with contextlib.suppress(ValueError, OSError):
                node, local = int(path.parents[3].name.removeprefix("node-")), int(path.parent.name)
                about = path.lstat()
                if about.st_size and stat.S_ISREG(about.st_mode):
                    record = {"node": node, "rank": node * per_node + local, "written": about.st_mtime}
                    found.append({"path": str(path), **record})
    return sorted(found, key=lambda log: (log["rank"], log["path"]))


def _restarts(path: pathlib.Path) -> int:
    match = re.search(r"\.r(\d+)(\.outcome)?$", path.name)
    return int(match[1]) if match else -1


def _read_json(path: pathlib.Path) -> Json:
    with _opened(path) as file:
        value: object = json.loads(file.read(MAX_JSON_BYTES))
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


def _opened(path: pathlib.Path) -> typing.BinaryIO:
    """Open a regular file: never a pipe that would not answer, never through a last link."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return os.fdopen(descriptor, "rb")


def _replace(path: pathlib.Path, text: str) -> None:
    """Write a file so that a reader sees the old or the new one."""
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    partial = pathlib.Path(name)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
            os.fchmod(file.fileno(), 0o644)
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


OPERATIONS: dict[str, collections.abc.Callable[..., Json]] = {
    function.__name__: function
    for function in (
        make_folders, hand_over, look, locate, create_run, write, remove_run, list_runs, find_run, read_run, read_log,
        find_failure, open_cache, finish_environment, store_environment, remove_build, last_step,
    )
}  # fmt: skip


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


if __name__ == "__main__":
    os.umask(0o022)
    json.dump(answer(json.load(sys.stdin)), sys.stdout)
