"""The program that `doctor` runs on all nodes, `python3 -I - JSON`; it answers with lines of JSON.

Only the standard library, and this process does nothing that may hang: a child touches the
filesystem and is left behind if it gives no answer, commands have deadlines, and a peer is waited
for only so long.
"""

import base64
import contextlib
import ctypes
import json
import multiprocessing
import os
import pathlib
import platform
import re
import resource
import shutil
import socket
import socketserver
import statistics
import subprocess
import sys
import threading
import time
import typing
import zlib

Json = dict[str, typing.Any]
PREFIX = "DOCTOR "
GREETING = "slurm-ddp-doctor"
MEET_S = 15.0  # how long a peer's server is tried: tasks of one step start within seconds
LEAVE_S = 30.0  # how long this node's own server stays, at most
REACH_S = 5.0  # how long a server may take to be connected to
SEEN_S = 10.0  # how long another node's file may take to be seen; NFS caches that it is absent
PORTS = 3  # so many ports after the first are tried, as the job script does
_WRITE_BYTES = 8 << 20
_CONTAINERS = ("apptainer", "singularity", "enroot", "crun", "podman")
_PROC_SYS = pathlib.Path("/proc/sys")
_USERNS = (
    "kernel/apparmor_restrict_unprivileged_userns",
    "kernel/unprivileged_userns_clone",
    "user/max_user_namespaces",
)
_TCP = ("tcp_slow_start_after_idle", "tcp_rmem", "tcp_wmem")


def versions() -> Json:
    """Collect the versions that must be the same on every node."""
    return {"python": "{}.{}".format(*sys.version_info), "machine": platform.machine()}


def limits() -> Json:
    """Read this process's limits (None: unlimited), shared memory, and what containers need."""
    found: Json = {}
    for name, number in (("memlock", resource.RLIMIT_MEMLOCK), ("nofile", resource.RLIMIT_NOFILE)):
        soft = resource.getrlimit(number)[0]
        found[name] = None if soft == resource.RLIM_INFINITY else soft
    with contextlib.suppress(OSError):
        found["shm"] = shutil.disk_usage("/dev/shm").total  # noqa: S108 - looked at only
    found["containers"] = [name for name in _CONTAINERS if shutil.which(name)]
    found["userns"] = {}
    for name in _USERNS:
        with contextlib.suppress(OSError):
            found["userns"][name] = (_PROC_SYS / name).read_text().strip()
    return found


def tcp() -> dict[str, int]:
    """Read the kernel's settings of TCP: of a buffer's sizes, the last one, the largest."""
    found: dict[str, int] = {}
    for name in _TCP:
        with contextlib.suppress(OSError, ValueError, IndexError):
            found[name] = int((_PROC_SYS / "net/ipv4" / name).read_text().split()[-1])
    return found


def relays() -> dict[str, str]:
    """Return the relay of each machine that Tailscale reaches through one, by address.

    `tailscale status --json` shows the address of a machine that it reaches directly in CurAddr,
    and otherwise the relay. {} without Tailscale.
    """
    try:
        text = subprocess.check_output(("tailscale", "status", "--json"), timeout=10)
        peers = json.loads(text)["Peer"].values()
    except (OSError, ValueError, LookupError, AttributeError, subprocess.SubprocessError):
        return {}
    found: dict[str, str] = {}
    for peer in peers:
        relay = peer.get("PeerRelay") or peer.get("Relay")
        if peer.get("Active") and relay and not peer.get("CurAddr"):
            found |= dict.fromkeys(peer.get("TailscaleIPs") or (), str(relay))
    return found


def disk(cache: str) -> Json:
    """Return the free space of the environments' disk, and whether it is mounted noexec."""
    folder = pathlib.Path(cache)
    if not folder.is_dir():
        folder = folder.parent
    try:
        about = os.statvfs(folder)
        if not os.access(folder, os.W_OK | os.X_OK):
            return {"error": f"{folder}: not writable"}
        return {"free": shutil.disk_usage(folder).free, "noexec": bool(about.f_flag & os.ST_NOEXEC)}
    except OSError as e:
        return {"error": f"{folder}: {e.strerror}"}


def is_unpacked(cache: str, environment: Json | None) -> bool:
    """Return whether an environment is unpacked here since the node started."""
    if environment is None:
        return False
    boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    path = pathlib.Path(cache)
    for folder in (path, *path.parent.glob(f"{path.name}.*")):
        with contextlib.suppress(OSError):
            marked = (folder / f"{environment['hash']}.complete").read_text().split()
            if marked == [environment["sha256"], boot]:
                return True
    return False


def gpus() -> Json:
    """Count the GPUs: device files, those that the driver shows, those that this step asked for."""
    devices = list(pathlib.Path("/dev").glob("nvidia[0-9]*"))
    wanted = os.environ.get("SLURM_GPUS_ON_NODE", "")
    return {
        "devices": len(devices),
        "seen": _seen_by_driver(),
        "wanted": int(wanted) if wanted.isdecimal() else None,
    }


def _seen_by_driver() -> int:
    count = ctypes.c_int()
    with contextlib.suppress(OSError, AttributeError):
        cuda = ctypes.CDLL("libcuda.so.1")
        if not cuda.cuInit(0):
            cuda.cuDeviceGetCount(ctypes.byref(count))
    return count.value


def infiniband() -> list[Json]:
    """Return the ports of InfiniBand, RoCE and EFA devices."""
    found: list[Json] = []
    for port in sorted(pathlib.Path("/sys/class/infiniband").glob("*/ports/*")):
        with contextlib.suppress(OSError):
            state = (port / "state").read_text().split(":")[-1].strip()
            kind = (port / "link_layer").read_text().strip()
            name = f"{port.parents[1].name}:{port.name}"
            found.append({"device": name, "state": state, "kind": kind})
    return found


def reach(server: list[typing.Any] | None) -> str:
    """Return why host:port cannot be reached, or ""."""
    if server is None:
        return ""
    try:
        socket.create_connection((str(server[0]), int(server[1])), timeout=REACH_S).close()
    except OSError as e:
        return e.strerror or str(e)
    return ""


class Filesystem:
    """The workspace, touched by a child process. `facts` grows as the child answers."""

    def __init__(self, workspace: str, folder: str, node: str, nonce: str) -> None:
        self.facts: Json = {}
        self.written = threading.Event()  # or has failed to
        fork = multiprocessing.get_context("fork")
        self._pipe, theirs = fork.Pipe()
        self._child = fork.Process(target=_touch, args=(theirs, workspace, folder, node, nonce))
        self._child.start()
        theirs.close()

    def write(self, deadline: float) -> None:
        """Wait until the child has looked at the mount and written."""
        for key in ("mount", "space", "written"):
            answer = self._answer(deadline) or {"hung": key}
            self.facts |= answer
            if "hung" in answer or "error" in answer:
                break
        self.written.set()

    def read(self, name: str, deadline: float) -> Json:
        """Return how long it took until another node's file could be read here."""
        # The child answers one thing after the other
        self.written.wait(max(0.0, deadline - time.monotonic()))
        if "hung" in self.facts or "error" in self.facts or not self.written.is_set():
            return {}
        self._pipe.send(name)
        return self._answer(deadline) or {"hung": "read"}

    def close(self) -> None:
        """Leave the child behind."""
        self._child.kill()

    def _answer(self, deadline: float) -> Json | None:
        try:
            if self._pipe.poll(max(0.0, deadline - time.monotonic())):
                return self._pipe.recv()
        except EOFError:
            return {"error": "the examination of the filesystem was interrupted"}
        return None


def _touch(pipe: typing.Any, workspace: str, folder: str, node: str, nonce: str) -> None:
    """In a child: look at the mount, write, and read what other nodes wrote when asked to."""
    nothing = os.open("/dev/null", os.O_RDWR)
    for number in (0, 1, 2):  # a child that hangs must not hold srun's pipes open
        os.dup2(nothing, number)
    try:
        pipe.send({"mount": _mount(workspace)})
        about = os.statvfs(workspace)
        is_read_only = bool(about.f_flag & os.ST_RDONLY)
        pipe.send({"free": about.f_bavail * about.f_frsize, "read_only": is_read_only})
        pipe.send(_write(pathlib.Path(folder), node, nonce))
        while True:
            pipe.send(_see(pathlib.Path(folder, pipe.recv()), nonce))
    except EOFError:
        return
    except OSError as e:
        pipe.send({"error": f"{e.filename or workspace}: {e.strerror or e}"})


def _mount(workspace: str) -> Json:
    """Return the mount that the workspace lies on (proc(5), mountinfo), without touching it."""
    best: Json = {"mountpoint": "/", "type": "", "source": "", "options": ""}
    for line in pathlib.Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        fields = left.split()
        point = fields[4].encode().decode("unicode_escape")
        is_above = point in ("/", workspace) or workspace.startswith(f"{point}/")
        if not is_above or len(point) < len(best["mountpoint"]):
            continue
        kind, source, options = [*right.split(), "", ""][:3]
        best = {"mountpoint": point, "type": kind, "source": source}
        best["options"] = f"{fields[5]},{options}"
    return best


def _write(folder: pathlib.Path, node: str, nonce: str) -> Json:
    """Measure writing with fsync (MB/s), and making and renaming a small file (ms)."""
    big = folder / f"big-{node}"
    began = time.perf_counter()
    _store(big, os.urandom(_WRITE_BYTES))
    took_s = time.perf_counter() - began
    big.unlink()

    partial = folder / f".{node}"
    renames_ms: list[float] = []
    for _ in range(5):
        began = time.perf_counter()
        _store(partial, nonce.encode())
        partial.replace(folder / f"file-{node}")
        renames_ms.append((time.perf_counter() - began) * 1e3)
    return {"write_mb_s": _WRITE_BYTES / took_s / 1e6, "rename_ms": statistics.median(renames_ms)}


def _store(path: pathlib.Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _see(path: pathlib.Path, nonce: str) -> Json:
    """Return how long it took until a file had the nonce; None: too long."""
    began = time.monotonic()
    while time.monotonic() - began < SEEN_S:
        with contextlib.suppress(OSError):
            if path.read_text() == nonce:
                return {"seen_ms": (time.monotonic() - began) * 1e3}
        time.sleep(0.02)
    return {"seen_ms": None}


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True  # an ended connection does not hold a port
    daemon_threads = True
    request_queue_size = 256


class Meeting:
    """Every node's server, and every node's visits to the others: routes, ports, clocks."""

    def __init__(self, node: str, spec: Json, filesystem: Filesystem) -> None:
        self.node = node
        self.nonce = str(spec["nonce"])
        self.addresses: dict[str, str] = dict(spec["hosts"])  # Slurm's names need not resolve
        self.hosts = list(self.addresses)
        self.ports = [int(spec["port"]) + offset for offset in range(PORTS)]
        self.filesystem = filesystem
        self.facts: Json = {"peers": {}, "port": None, "taken": []}
        self._farewells: set[str] = set()
        self._changed = threading.Condition()
        self._listen()

    def _listen(self) -> None:
        meeting = self

        class Handler(socketserver.StreamRequestHandler):
            timeout = LEAVE_S

            def handle(self) -> None:
                with contextlib.suppress(OSError, ValueError):
                    meeting.answer(self.rfile, self.wfile)

        for port in self.ports:
            try:
                server = _Server(("", port), Handler)
            except OSError as e:  # also if another took the port at the same moment
                self.facts["taken"].append([port, e.strerror])
                continue
            self.facts["port"] = port
            threading.Thread(target=server.serve_forever, daemon=True).start()
            return

    def visit(self) -> None:
        """Speak to every other node at once, then stay until they have spoken to this one."""
        until = time.monotonic() + LEAVE_S
        others = [host for host in self.hosts if host != self.node]
        visits = [
            threading.Thread(target=self._visit, args=(host,), daemon=True) for host in others
        ]
        for thread in visits:
            thread.start()
        for thread in visits:
            thread.join(max(0.0, until - time.monotonic()))
        with self._changed:
            self._changed.wait_for(
                lambda: self._farewells >= set(others), max(0.0, until - time.monotonic())
            )

    def results(self) -> Json:
        """Copy the facts: a thread that still waits for a peer may add to them."""
        peers = {host: dict(peer) for host, peer in list(self.facts["peers"].items())}
        return {**self.facts, "peers": peers}

    def answer(self, asked: typing.Any, reply: typing.Any) -> None:
        """Answer a peer, line by line."""
        text = f"{GREETING} {self.nonce} {self.node}"
        while True:
            reply.write(f"{text}\n".encode())
            line = asked.readline(256).decode().split()
            if not line:
                return
            text = self._answer_to(*line)

    def _answer_to(self, word: str, who: str = "") -> str:
        if word == "time":
            return repr(time.time())
        if word == "file":
            self.filesystem.written.wait(LEAVE_S)
            return f"file-{self.node}" if "rename_ms" in self.filesystem.facts else "none"
        if word == "bye":
            with self._changed:
                self._farewells.add(who)
                self._changed.notify_all()
        return "ok"

    def _visit(self, host: str) -> None:
        facts: Json = {}
        self.facts["peers"][host] = facts
        facts |= _resolve(self.addresses[host])
        if "address" not in facts:
            return
        facts |= _route(facts["address"])
        talk = self._reach(facts["address"], host, facts)
        if talk is None:
            return
        with contextlib.suppress(OSError, ValueError), talk:
            stream = talk.makefile("rwb")
            facts |= _compare_clocks(stream)
            if host == self._next_host():
                name = _ask(stream, "file")
                if re.fullmatch(r"file-[A-Za-z0-9._-]+", name):
                    facts |= self.filesystem.read(name, time.monotonic() + SEEN_S + 5)
            _ask(stream, f"bye {self.node}")

    def _next_host(self) -> str:
        return self.hosts[(self.hosts.index(self.node) + 1) % len(self.hosts)]

    def _reach(self, address: str, host: str, facts: Json) -> socket.socket | None:
        """Connect to the host's server, whose port may be any of three."""
        until = time.monotonic() + MEET_S
        reason = "no answer"
        while time.monotonic() < until:
            for port in self.ports:
                try:
                    talk = socket.create_connection((address, port), timeout=3)
                except OSError as e:
                    reason = e.strerror or str(e)
                    continue
                talk.settimeout(LEAVE_S)
                greeting: list[str] = []
                with contextlib.suppress(OSError):
                    greeting = talk.recv(256).decode(errors="replace").split()
                if greeting == [GREETING, self.nonce, host]:
                    facts["port"] = port
                    return talk
                talk.close()
                if greeting:
                    who = " ".join(greeting[2:]) or "something else"
                    reason = f"port {port} is answered by {who}"
            time.sleep(0.2)
        facts["unreachable"] = reason
        return None


def _resolve(given: str) -> Json:
    """Return the IPv4 address of what Slurm has as a node's address, or why there is none."""
    try:
        found = socket.getaddrinfo(given, None, socket.AF_INET, socket.SOCK_STREAM)
        return {"address": str(found[0][4][0])}
    except OSError as e:
        facts: Json = {"given": given, "unresolved": e.strerror}
    with contextlib.suppress(OSError):
        facts["ipv6"] = socket.getaddrinfo(given, None, socket.AF_INET6)[0][4][0]
    return facts


def _compare_clocks(stream: typing.Any) -> Json:
    """Return the shortest of five round trips, and the peer's clock against ours at its middle."""
    trips: list[tuple[float, float]] = []
    for _ in range(5):
        sent = time.time()
        theirs = float(_ask(stream, "time"))
        trip_s = time.time() - sent
        trips.append((trip_s, theirs - sent - trip_s / 2))
    trip_s, clock_s = min(trips)
    return {"trip_ms": trip_s * 1e3, "clock_s": clock_s}


def _ask(stream: typing.Any, text: str) -> str:
    stream.write(f"{text}\n".encode())
    stream.flush()
    return stream.readline(256).decode().strip()


def _route(address: str) -> Json:
    """Return the interface on the way to another node, and its MTU; {} without iproute2."""
    try:
        routes = subprocess.check_output(("ip", "-json", "route", "get", address), timeout=10)
        route = json.loads(routes)[0]
        name = route["dev"]
        own = route["prefsrc"]
        on_lo = ("ip", "-o", "address", "show", "dev", "lo", "to", own)
        is_on_lo = bool(subprocess.check_output(on_lo, timeout=10))
        mtu = int(pathlib.Path("/sys/class/net", name, "mtu").read_text())
    except (OSError, ValueError, LookupError, subprocess.SubprocessError):
        return {}
    return {"iface": name, "mtu": mtu, "on_lo": own if is_on_lo else None}


def examine(spec: Json) -> Json:
    """Return everything about this node."""
    node = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    filesystem = Filesystem(spec["workspace"], spec["folder"], node, spec["nonce"])
    port = int(spec["port"]) or 20000 + (int(os.environ.get("SLURM_JOB_ID", "0")) * 8) % 10000
    meeting = Meeting(node, {**spec, "port": port}, filesystem)
    until = time.monotonic() + LEAVE_S - 5
    writing = threading.Thread(target=filesystem.write, args=(until,), daemon=True)
    writing.start()
    meeting.visit()
    writing.join(LEAVE_S)
    answer: Json = {
        "node": node,
        "uid": os.getuid(),
        "versions": versions(),
        "limits": limits(),
        "tcp": tcp(),
        "relays": relays(),
        "gpus": gpus(),
        "infiniband": infiniband(),
        "disk": disk(spec["cache"]),
        "filesystem": dict(filesystem.facts),
        "network": meeting.results(),
        "unpacked": is_unpacked(spec["cache"], spec["environment"]),
        "tracking": reach(spec.get("tracking")),
    }
    filesystem.close()
    return answer


def lines(answer: Json) -> list[str]:
    """Return the answer in lines below 1 KiB: srun mixes longer ones of several tasks."""
    packed = zlib.compress(json.dumps(answer).encode())
    text = base64.b64encode(packed).decode()
    pieces = [text[at : at + 700] for at in range(0, len(text), 700)]
    head = f"{PREFIX}{answer['node']}"
    total = len(pieces)
    return [f"{head} {number} {total} {piece}" for number, piece in enumerate(pieces)]


if __name__ == "__main__":
    for text in lines(examine(json.loads(sys.argv[1]))):
        print(text, flush=True)
    os._exit(0)  # threads that wait for peers must not hold the step
