"""The process that copies a job's finished checkpoints to a bucket (`--mirror`).

It runs on the first node, at the lowest priority, and touches neither the ranks nor their files.
It copies the newest checkpoint; one that a newer one replaces before its turn is left out. The
copy itself, and its verification, is a command of the payload, which runs in the jobs' environment.
"""

import contextlib
import functools
import json
import os
import pathlib
import signal
import subprocess
import threading
import time
import typing

from ddp.node import (
    checkpoints,
    exit_codes,
    foreign_checkpoints,
    small_files,
    spec,
    spool,
    srun,
    started_job,
    storage,
    unpacking,
)

FILE = "mirror.json"  # in control/: what is copied, and why the rest is not
LOOK_S = 10.0
QUIET_S = 30.0  # a program's checkpoint counts as complete when it has not changed for this long
AGAIN_S = 60.0  # after a failure
END_S = 900.0  # for the last checkpoint, once the ranks have ended
_RESERVE_S = 60.0  # of the time limit


class Checkpoint(typing.NamedTuple):
    """A finished checkpoint."""

    path: str
    name: str  # below the run's folder, or below the one that the ranks start in
    key: str  # another one if the same files are written again


class Mirror:
    """Copies the checkpoints of one start of a job."""

    def __init__(
        self,
        job: started_job.StartedJob,
        copy: typing.Callable[[str, str], str],
    ) -> None:
        assert job.spec.mirror is not None
        self._job = job
        self._url = f"{job.spec.mirror.url.rstrip('/')}/{os.path.basename(job.run_dir)}"
        self._copy = copy  # of a folder or file to a URL; returns why it failed, or ""
        self._began = time.time()
        self._path = f"{job.control}/{FILE}"
        self._state = _read(self._path)

    def look(self, quiet_s: float = QUIET_S) -> bool:
        """Copy the newest checkpoint unless it is copied; return False if that failed.

        A program's checkpoint counts once it has not changed for `quiet_s`.
        """
        find = functools.partial(self._newest, quiet_s)
        try:
            newest = storage.within(find, storage.CALL_S)
        except OSError as e:
            return self._report(error=f"the checkpoints cannot be read: {storage.reason(e)}")
        if newest is None or newest.key == self._state.get("key"):
            return True
        target = f"{self._url}/{newest.name}"
        self._report(copying=newest.name)
        began = time.monotonic()
        if why := self._copy(newest.path, target):
            return self._report(error=f"{newest.name}: {why}")
        took_s = time.monotonic() - began
        spool.write(f"[MIRROR] {newest.name} is at {target}, verified, after {took_s:.0f} s")
        self._state["key"] = newest.key
        self._state["name"] = newest.name
        self._state["url"] = target
        self._state["time"] = time.time()
        return self._report()

    def _newest(self, quiet_s: float) -> "Checkpoint | None":
        run_dir = pathlib.Path(self._job.run_dir)
        own = checkpoints.complete(run_dir)
        if own:
            path = own[-1]
            changed = (path / checkpoints.MANIFEST).stat().st_mtime_ns
            return Checkpoint(str(path), path.name, f"{path.name}@{changed}")

        places = list(dict.fromkeys((self._job.run_dir, self._job.spec.workdir)))
        written = [one for one in foreign_checkpoints.find(places) if one.changed >= self._began]
        if not written:
            return None
        one = written[-1]
        changed = _last_change(one.path)
        if time.time() - changed < quiet_s:
            return None
        for place in reversed(places):
            if one.path.is_relative_to(place):
                name = one.path.relative_to(place).as_posix()
                return Checkpoint(str(one.path), name, f"{name}@{changed}")
        return None

    def _report(self, *, copying: str = "", error: str = "") -> bool:
        """Write the state for `ddp watch`; return False if there is an error."""
        if error and error != self._state.get("error"):
            spool.write(f"[MIRROR] {error}")
        self._state["copying"] = copying
        self._state["error"] = error
        with contextlib.suppress(OSError):
            storage.within(functools.partial(_write, self._path, self._state), storage.CALL_S)
        return not error


def _last_change(path: pathlib.Path) -> float:
    """Return when a file, or one of a folder's files, changed last."""
    times = [path.stat().st_mtime]
    for folder, _, names in os.walk(path):
        times += [os.lstat(os.path.join(folder, name)).st_mtime for name in names]
    return max(times)


def _read(path: str) -> "dict[str, typing.Any]":
    try:
        return small_files.read_object(pathlib.Path(path))
    except (OSError, ValueError):  # nothing is copied yet, as far as is known
        return {}


def _write(path: str, state: "dict[str, typing.Any]") -> None:
    partial = f"{path}.{os.getpid()}"
    with open(partial, "w", encoding="utf-8") as file:
        json.dump(state, file)
    os.replace(partial, path)


# -- the process -----------------------------------------------------------------------------------


def main(spec_path: str) -> int:
    """Mirror until this process gets SIGTERM, then once more; return the exit code."""
    env = dict(os.environ)
    job = started_job.read(spec.load(spec.JobSpec, spec_path), spec_path, env)
    is_over = threading.Event()
    signal.signal(signal.SIGTERM, lambda _number, _frame: is_over.set())
    with contextlib.suppress(OSError):
        os.nice(19)
    mirror = Mirror(job, functools.partial(_upload, job, env))
    pause_s = LOOK_S
    while not is_over.wait(pause_s):
        pause_s = LOOK_S if mirror.look() else AGAIN_S
    return 0 if mirror.look(quiet_s=0) else 1


def _upload(job: started_job.StartedJob, env: "dict[str, str]", path: str, url: str) -> str:
    """Copy a checkpoint by the payload's command; return why it failed, or ""."""
    assert job.spec.mirror is not None
    try:
        python, locks = unpacking.use(job.spec.mirror.environment, job.host)
    except exit_codes.FatalError as e:
        return str(e)
    argv = [python, "-I", "-m", "ddptrain", "mirror", path, "--url", url]
    done = subprocess.run(
        argv,
        env=env,
        cwd="/",
        capture_output=True,
        text=True,
        errors="replace",
        pass_fds=locks,
        check=False,
    )
    for lock in locks:
        os.close(lock)
    if done.returncode == 0:
        return ""
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    fatal = [line.partition("[FATAL] ")[2] for line in lines if "[FATAL] " in line]
    return (fatal or lines[-1:] or [f"exit code {done.returncode}"])[0]


# -- the supervisor's side -------------------------------------------------------------------------


def start(job: started_job.StartedJob, env: "dict[str, str]") -> "subprocess.Popen[bytes] | None":
    """Start the process if the job has a mirror."""
    if job.spec.mirror is None:
        return None
    argv = [srun.PYTHON, "-I", "-S", "-B", job.program, "mirror", job.spec_path]
    return subprocess.Popen(argv, env=env, cwd="/", stdin=subprocess.DEVNULL)


def end(
    process: "subprocess.Popen[bytes] | None",
    job: started_job.StartedJob,
    is_urgent: storage.Claim,
) -> None:
    """Let the process copy the last checkpoint, unless the job has to leave its nodes."""
    if process is None:
        return
    process.terminate()
    until = min(time.time() + END_S, job.end - _RESERVE_S)
    while process.poll() is None and time.time() < until and not is_urgent():
        time.sleep(0.2)
    if process.poll() is None:
        spool.write("[MIRROR] the last checkpoint is not copied: the job's time is over")
        process.kill()
        process.wait()
