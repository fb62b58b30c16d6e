"""One pod of a run on Kubernetes: waits for the others, runs torchrun for its ranks, and ends as all of them end.

A Job of Kubernetes replaces its pods one by one, and an index that exited with 0 never runs again; the ranks of a run
start together and end together. So every pod keeps a connection to pod 0 from before the start to the end: pod 0 starts
them all with one name for the attempt, notices a pod that is lost, and decides on the one exit code of all:

    0   done
    1   failed: counts as one of the run's restarts
    75  stopped by Kubernetes, or another pod was lost: runs again, and does not count (EX_TEMPFAIL of sysexits(3))
    78  a mistake in what was asked for: does not run again (EX_CONFIG)

Arguments: what torchrun runs. Variables: those of `settings`. A signal (SIGTERM: eviction, deletion, the deadline)
makes the file $STOP_FILE, which all ranks see; a program saves then and leaves {"outcome": "preempted"} in
$RUN_DIR/control/$RUN_ATTEMPT_ID.outcome. The image's Python runs this: the standard library, from 3.10 on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import pathlib
import pwd
import signal
import socket
import subprocess
import sys
import time
import types
import typing

DONE, FAILED, STOPPED, MISTAKE = 0, 1, 75, 78
_POLL_S = 0.2
_REPORT_S = 30.0  # between two lines of progress
_LOST_S = 10.0  # for the ranks to say themselves why they end, once a pod is lost
_KILL_S = 45.0  # torchrun gives its ranks 30 s
_END_S = 300.0  # for the other pods' ranks to end, once this pod's have
_FAILED_S = 30.0  # the same where this pod's ranks failed: the others may wait for them in vain
_WORD = 4096  # the longest line of the connection


@dataclasses.dataclass(frozen=True)
class Settings:
    """What the manifest says."""

    index: int
    nodes: int
    ranks_per_node: int
    head: str  # the name of pod 0
    port: int  # torchrun's; the pods' own is the next one
    job: str  # the uid of the Job
    name: str  # of this pod
    address: str
    run_dir: pathlib.Path
    folder: str  # where the program runs
    join_s: float  # how long to wait for the other pods


class Stop(Exception):
    """The pod is to leave before its ranks started, with this exit code."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


def settings(env: typing.Mapping[str, str]) -> Settings:
    """Read the settings from the environment. Raises KeyError or ValueError where the manifest lacks one."""
    nodes = int(env["NNODES"])
    return Settings(
        index=int(env["JOB_COMPLETION_INDEX"]),
        nodes=nodes,
        ranks_per_node=int(env["NPROC_PER_NODE"]),
        head=env["MASTER_ADDR"] if nodes > 1 else "127.0.0.1",
        port=int(env["MASTER_PORT"]),
        job=env["DDP_JOB_UID"],
        name=env["DDP_POD_NAME"],
        address=env.get("DDP_POD_IP", "") if nodes > 1 else "",
        run_dir=pathlib.Path(env["RUN_DIR"]),
        folder=env["DDP_FOLDER"],
        join_s=float(env.get("DDP_JOIN_S", "1800")),
    )


def main(argv: list[str]) -> int:
    """Run the pod and return its exit code."""
    pod = settings(os.environ)
    done = pod.run_dir / "control" / f"{pod.job}.done"
    stopping = _Stopping()
    try:
        _prepare(pod)
        if _exists(done):
            say("ENV", f"{pod.name}: this run is done")
            return DONE
        group = _meet(pod, done, stopping)
    except Stop as e:
        say("FATAL" if e.code in (FAILED, MISTAKE) else "PREEMPT", f"{pod.name}: {e}")
        return e.code
    stopping.file = pod.run_dir / "control" / f"{group.attempt}.stop"
    code = _run(pod, group, stopping, argv)
    code = group.conclude(code, _outcome(pod, group.attempt), done)
    say("RESULT", f"pod={pod.name} attempt={group.attempt} exit_code={code}")
    return code


def say(marker: str, text: str) -> None:
    """Print one line to the pod's log."""
    print(f"[{marker}] {text}", flush=True)


class _Stopping:
    """Whether Kubernetes wants the pod to leave; tells the ranks by a file."""

    def __init__(self) -> None:
        self.is_wanted = False
        self.file: pathlib.Path | None = None
        self._is_reported = False
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)

    def _on_signal(self, _number: int, _frame: types.FrameType | None) -> None:
        self.is_wanted = True

    def tell(self) -> None:
        """Make the file, once it is known and wanted; where the volume fails, try again at the next call."""
        if not self.is_wanted or self.file is None or self._is_reported:
            return
        try:
            self.file.touch()
        except OSError as e:
            say("PREEMPT", f"{self.file} cannot be made ({e.strerror}); trying again")
            return
        self._is_reported = True
        say("PREEMPT", "asking the ranks to save and leave")


def _prepare(pod: Settings) -> None:
    """Make the run's folders, go to the program's, and repair what an account without an entry lacks."""
    try:
        for name in ("control", "logs"):
            (pod.run_dir / name).mkdir(parents=True, exist_ok=True)
        os.chdir(pod.folder)
    except OSError as e:
        is_mistake = e.errno in (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.EROFS)
        how = f"does the claim hold the workspace, and may uid {os.getuid()} write there?"
        text = f"{e.filename or pod.run_dir}: {e.strerror}; {how}"
        raise Stop(MISTAKE if is_mistake else FAILED, text) from e
    if not os.access(os.environ.get("HOME", ""), os.W_OK):
        os.environ["HOME"] = "/tmp"  # noqa: S108 - torch and Hugging Face keep caches below it
    try:
        pwd.getpwuid(os.getuid())
    except KeyError:  # getpass.getuser() of torch would fail
        for name in ("USER", "LOGNAME"):
            os.environ.setdefault(name, f"uid-{os.getuid()}")


def _exists(path: pathlib.Path) -> bool:
    try:
        return path.exists()
    except OSError:
        return False


# --- the other pods --------------------------------------------------------------------------------------------------


class _Line:
    """A connection that carries lines of words."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket, self._buffer = connected, b""
        self.is_lost = False
        self.since = time.monotonic()
        connected.setblocking(False)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        # A node that lost its power closes nothing: 15 s of silence, then 6 questions 5 s apart.
        for option, value in (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 6)):
            with contextlib.suppress(AttributeError, OSError):
                connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)

    def take(self) -> list[list[str]]:
        """Return the lines that came, as words."""
        while not self.is_lost:
            try:
                block = self._socket.recv(_WORD)
            except (BlockingIOError, InterruptedError):
                break
            except OSError:
                block = b""
            self._buffer += block
            self.is_lost = not block or len(self._buffer) > 2 * _WORD
        *lines, self._buffer = self._buffer.split(b"\n")
        return [line.decode(errors="replace").split() for line in lines]

    def send(self, *words: object) -> None:
        """Send a line; a connection that does not take it is lost."""
        try:
            self._socket.settimeout(10)
            self._socket.sendall(" ".join(str(word) for word in words).encode() + b"\n")
            self._socket.setblocking(False)
        except OSError:
            self.is_lost = True

    def close(self) -> None:
        self._socket.close()


class _Group(typing.Protocol):
    """The pods of an attempt, as one of them sees them."""

    attempt: str

    def poll(self) -> list[str]:
        """Return the pods without which the ranks cannot go on, in words."""
        ...

    def conclude(self, code: int, outcome: _Outcome, done: pathlib.Path) -> int:
        """Return the exit code of all pods, from that of this pod's ranks and what the program left."""
        ...


class _Head:
    """Pod 0: knows all others."""

    def __init__(self, pod: Settings, stopping: _Stopping) -> None:
        self._pod, self._stopping = pod, stopping
        self.attempt = pod.name
        self._lines: dict[int, _Line] = {}
        self._ends: dict[int, int] = {}
        self._server: socket.socket | None = None
        if pod.nodes > 1:
            self._gather()

    def _gather(self) -> None:
        pod = self._pod
        self._server = _listen(pod.port + 1, pod.nodes)
        waiting: list[_Line] = []
        clock = _Clock(pod.join_s)
        while len(self._lines) < pod.nodes - 1 or not _resolves(pod.head):
            _leave_if(self._stopping)
            with contextlib.suppress(BlockingIOError, ConnectionError):
                waiting.append(_Line(self._server.accept()[0]))
            for line in list(waiting):
                for words in line.take():
                    if len(words) == 3 and words[:2] == ["hello", pod.job] and words[2].isdecimal():
                        self._lines[int(words[2])] = line
                if line.is_lost or line in self._lines.values() or time.monotonic() - line.since > 10:
                    waiting.remove(line)
                    if line not in self._lines.values():
                        line.close()
            for index in [index for index, line in self._lines.items() if line.take() or line.is_lost]:
                self._lines.pop(index).close()
            absent = [index for index in range(1, pod.nodes) if index not in self._lines]
            what = f"pods with index {_listed(absent)}" if absent else f"the name {pod.head} to resolve"
            clock.tick(f"waiting for {what}; see: kubectl get pods")
        for line in self._lines.values():
            line.send("start", self.attempt)

    def poll(self) -> list[str]:
        if (
            self._server is not None
        ):  # a pod that came again belongs to the next attempt: it asks until this one has ended
            with contextlib.suppress(BlockingIOError, ConnectionError):
                self._server.accept()[0].close()
        for index, line in self._lines.items():
            for words in line.take():
                if len(words) == 2 and words[0] == "end":
                    self._ends[index] = int(words[1])
        failed = [f"pod {index} (exit code {code})" for index, code in self._ends.items() if code]
        return [f"pod {index}" for index in self._lost()] + failed

    def _lost(self) -> list[int]:
        return [index for index, line in self._lines.items() if line.is_lost and index not in self._ends]

    def conclude(self, code: int, outcome: _Outcome, done: pathlib.Path) -> int:
        until = time.monotonic() + (_FAILED_S if code else _END_S)
        self.poll()
        while len(self._ends) + len(self._lost()) < len(self._lines) and time.monotonic() < until:
            self._stopping.tell()
            time.sleep(_POLL_S)
            self.poll()
        codes = [code, *self._ends.values()]
        if outcome.what == "done" or (not outcome.what and not any(codes) and len(self._ends) == len(self._lines)):
            verdict = DONE
        elif outcome.what == "preempted":
            verdict = STOPPED
        elif outcome.is_mistake:
            verdict = MISTAKE
        else:
            verdict = STOPPED if self._lost() else FAILED  # the pod that was lost counts by itself
        if verdict == DONE:
            _mark(done)
        for line in self._lines.values():
            line.send("verdict", verdict)
        return verdict


class _Member:
    """Any other pod: knows pod 0."""

    def __init__(self, pod: Settings, done: pathlib.Path, stopping: _Stopping) -> None:
        clock = _Clock(pod.join_s)
        self.attempt = ""
        self._stopping = stopping
        self._verdict: int | None = None
        while True:
            reason = "not all pods are there"
            try:
                line = _Line(socket.create_connection((pod.head, pod.port + 1), timeout=5))
            except OSError as e:
                line, reason = None, e.strerror or str(e)
            if line is not None:
                line.send("hello", pod.job, pod.index)
            while line is not None and not line.is_lost:
                for words in line.take():
                    if len(words) == 2 and words[0] == "start":
                        self._line, self.attempt = line, words[1]
                        return
                clock.tick(f"waiting for {pod.head}:{pod.port + 1} ({reason})")
                _leave_if(stopping)
            if line is not None:
                line.close()
                reason = "pod 0 closed the connection"
            if _exists(done):
                raise Stop(DONE, "this run is done")
            for _ in range(5):
                clock.tick(f"waiting for {pod.head}:{pod.port + 1} ({reason}); see: kubectl get pods")
                _leave_if(stopping)

    def poll(self) -> list[str]:
        for words in self._line.take():
            if len(words) == 2 and words[0] == "verdict":
                self._verdict = int(words[1])
        if self._verdict is not None:
            return [f"pod 0 (exit code {self._verdict})"]
        return ["pod 0"] if self._line.is_lost else []

    def conclude(self, code: int, outcome: _Outcome, done: pathlib.Path) -> int:
        del outcome
        self._line.send("end", code)
        until = time.monotonic() + _END_S + 30
        while self._verdict is None and not self.poll() and time.monotonic() < until:
            self._stopping.tell()
            time.sleep(_POLL_S)
        if self._verdict is not None:
            return self._verdict
        return DONE if _exists(done) else STOPPED


def _meet(pod: Settings, done: pathlib.Path, stopping: _Stopping) -> _Group:
    """Wait for all pods. Raises Stop when some never join, or when this one is to leave."""
    return _Member(pod, done, stopping) if pod.index else _Head(pod, stopping)


class _Clock:
    """A bounded wait that shows progress."""

    def __init__(self, limit_s: float) -> None:
        self._began = self._reported = time.monotonic()
        self._limit_s = limit_s

    def tick(self, text: str) -> None:
        """Wait a little. Raises Stop after the limit."""
        now = time.monotonic()
        if now - self._began > self._limit_s:
            raise Stop(FAILED, f"gave up after {now - self._began:.0f} s {text}")
        if now - self._reported > _REPORT_S:
            self._reported = now
            say("ENV", f"{text}, {now - self._began:.0f} s")
        time.sleep(_POLL_S)


def _listen(port: int, backlog: int) -> socket.socket:
    try:
        if socket.has_dualstack_ipv6():
            server = socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=backlog)
        else:
            server = socket.create_server(("", port), backlog=backlog)
    except OSError as e:
        raise Stop(FAILED, f"port {port}: {e.strerror}") from e
    server.setblocking(False)
    return server


def _resolves(name: str) -> bool:
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        return False
    return True


def _leave_if(stopping: _Stopping) -> None:
    if stopping.is_wanted:
        raise Stop(STOPPED, "stopped before the ranks started")


def _listed(indices: list[int]) -> str:
    return ", ".join(str(index) for index in indices[:8]) + (", ..." if len(indices) > 8 else "")


# --- this pod's ranks ------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Outcome:
    """What the program left about its end; a program need not."""

    what: str = ""  # done, preempted or failed
    is_mistake: bool = False  # it would fail the same way again


def _run(pod: Settings, group: _Group, stopping: _Stopping, argv: list[str]) -> int:
    """Return how torchrun ended; it is ended when another pod is lost, since its ranks wait for that pod's in vain."""
    env = os.environ | {
        "RUN_ATTEMPT_ID": group.attempt,
        "STOP_FILE": str(stopping.file),
        "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "[rank${rank}]: ",
    }
    logs = pod.run_dir / "logs" / group.attempt / f"node-{pod.index}"
    command = [sys.executable, "-m", "torch.distributed.run"]
    command += [f"--nnodes={pod.nodes}", f"--nproc-per-node={pod.ranks_per_node}", f"--node-rank={pod.index}"]
    command += ["--rdzv-backend=static", f"--master-addr={pod.head}", f"--master-port={pod.port}"]
    command += [f"--rdzv-id={group.attempt}", "--max-restarts=0", f"--log-dir={logs}", "--redirects=3", "--tee=3"]
    command += [f"--local-addr={pod.address}"] if pod.address else []
    say("ENV", f"pod={pod.name} attempt={group.attempt} node={pod.index}/{pod.nodes} head={pod.head}:{pod.port}")
    child = subprocess.Popen([*command, *argv], env=env, start_new_session=True)
    lost_at: float | None = None
    ended: signal.Signals | None = None
    while child.poll() is None:
        stopping.tell()
        lost = group.poll()
        if lost and lost_at is None:
            lost_at = time.monotonic()
            say("FAILED", f"attempt={group.attempt}: lost {', '.join(lost)}")
        silence = time.monotonic() - lost_at if lost_at is not None else 0.0
        if silence > _LOST_S + _KILL_S and ended != signal.SIGKILL:
            ended = signal.SIGKILL
            _end(child, ended)
        elif silence > _LOST_S and ended is None:
            ended = signal.SIGTERM
            child.terminate()  # torchrun passes it on
        time.sleep(_POLL_S)
    _end(child, signal.SIGKILL)  # what the ranks left behind
    return child.returncode


def _end(child: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, number)


def _outcome(pod: Settings, attempt: str) -> _Outcome:
    try:
        found = json.loads((pod.run_dir / "control" / f"{attempt}.outcome").read_text())
        return _Outcome(str(found["outcome"]), found["outcome"] == "failed" and found.get("retry") is False)
    except (OSError, ValueError, KeyError, TypeError):
        return _Outcome()


def _mark(path: pathlib.Path) -> None:
    try:
        path.touch()
    except OSError as e:
        say("ENV", f"{path}: {e.strerror}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
