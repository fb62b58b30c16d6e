"""What `doctor` runs on each node, all nodes at once: it is sent to `python3 -I - JSON`; its answer is JSON in lines.

Only the standard library, and nothing that may hang is done by this process itself: the filesystem is touched by a
child that is left behind when it gives no answer, commands have deadlines, and a peer is waited for only so long.
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
SEEN_S = 10.0  # how long a file that another node wrote may take to be seen; NFS caches that it is absent
PROC_SYS = pathlib.Path("/proc/sys")
USERNS = (
    "kernel/apparmor_restrict_unprivileged_userns",
    "kernel/unprivileged_userns_clone",
    "user/max_user_namespaces",
)
PORTS = 3  # so many ports after the first are tried, as the job script does
_WRITE_BYTES = 8 << 20


def versions() -> Json:
    """Collect the versions that must be the same on every node."""
    python, libc = "{}.{}".format(*sys.version_info), " ".join(platform.libc_ver())
    return {"python": python, "machine": platform.machine(), "libc": libc}


def limits() -> Json:
    """Read this process's limits (bytes or counts; None: unlimited), shared memory, outgoing ports, user namespaces."""
    found: Json = {}
    for name, number in {
        "memlock": resource.RLIMIT_MEMLOCK,
        "nofile": resource.RLIMIT_NOFILE,
    }.items():
        soft = resource.getrlimit(number)[0]
        found[name] = None if soft == resource.RLIM_INFINITY else soft
    with contextlib.suppress(OSError):
        found["shm"] = shutil.disk_usage("/dev/shm").total  # noqa: S108 - looked at only
    with contextlib.suppress(OSError):
        found["containers"] = [
            *filter(shutil.which, ("apptainer", "singularity", "enroot", "crun", "podman"))
        ]
        found["userns"] = {
            name: (PROC_SYS / name).read_text().strip()
            for name in USERNS
            if (PROC_SYS / name).exists()
        }
        found["ports"] = [
            *map(int, (PROC_SYS / "net/ipv4/ip_local_port_range").read_text().split())
        ]
    return found


def processors() -> Json:
    """Return the node's CPUs, and how many this task requested and got, as a rank would."""
    flags = re.findall(
        r"\b(?:avx512|amx)_bf16\b", pathlib.Path("/proc/cpuinfo").read_text(errors="replace")
    )
    return {
        "cpus": os.cpu_count(),
        "wanted": _counted("SLURM_CPUS_PER_TASK"),
        "affinity": len(os.sched_getaffinity(0)),
        "bf16": sorted(set(flags)),
    }


def _counted(variable: str) -> int | None:
    """Return the number in an environment variable, None if it has none."""
    text = os.environ.get(variable, "")
    return int(text) if text.isdecimal() else None


def disk(cache: str) -> Json:
    """Measure the free space on the disk that environments are unpacked to."""
    folder = path if (path := pathlib.Path(cache)).is_dir() else path.parent
    try:
        return {"free": shutil.disk_usage(folder).free}
    except OSError as e:
        return {"error": f"{folder}: {e.strerror}"}


def is_unpacked(cache: str, environment: Json | None) -> bool:
    """Whether a stored environment is unpacked here."""
    boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    if environment is None:
        return False
    path = pathlib.Path(cache)
    for folder in (path, *path.parent.glob(f"{path.name}.*")):
        with contextlib.suppress(OSError):
            if (folder / f"{environment['hash']}.complete").read_text().split() == [
                environment["sha256"],
                boot,
            ]:
                return True
    return False


def gpus() -> Json:
    """Return the driver's CUDA version, and the number of GPUs that this step may use and that it requested."""
    devices = len(list(pathlib.Path("/dev").glob("nvidia[0-9]*")))
    found: Json = {
        "devices": devices,
        "cuda": None,
        "seen": 0,
        "wanted": _counted("SLURM_GPUS_ON_NODE"),
    }
    with contextlib.suppress(OSError, AttributeError):
        cuda = ctypes.CDLL("libcuda.so.1")
        version, count = ctypes.c_int(), ctypes.c_int()
        if not cuda.cuInit(0) and not cuda.cuDriverGetVersion(ctypes.byref(version)):
            found["cuda"] = f"{version.value // 1000}.{version.value % 1000 // 10}"
            cuda.cuDeviceGetCount(ctypes.byref(count))
            found["seen"] = count.value
    return found


def infiniband() -> list[Json]:
    """Return the ports of InfiniBand, RoCE and EFA devices."""
    found: list[Json] = []
    for port in sorted(pathlib.Path("/sys/class/infiniband").glob("*/ports/*")):
        with contextlib.suppress(OSError):
            state = (port / "state").read_text().split(":")[-1].strip()
            kind = (port / "link_layer").read_text().strip()
            found.append(
                {"device": f"{port.parents[1].name}:{port.name}", "state": state, "kind": kind}
            )
    return found


class Filesystem:
    """The workspace, touched by a child process. `facts` grows as it answers."""

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
        self.written.wait(
            max(0.0, deadline - time.monotonic())
        )  # the child answers one thing after the other
        if "hung" in self.facts or "error" in self.facts or not self.written.is_set():
            return {}
        self._pipe.send(name)
        return self._answer(deadline) or {"hung": "read"}

    def close(self) -> None:
        """Leave the child."""
        self._child.kill()

    def _answer(self, deadline: float) -> Json | None:
        try:
            return (
                self._pipe.recv()
                if self._pipe.poll(max(0.0, deadline - time.monotonic()))
                else None
            )
        except EOFError:
            return {"error": "the examination of the filesystem was interrupted"}


def _touch(pipe: typing.Any, workspace: str, folder: str, node: str, nonce: str) -> None:
    """Look at the workspace's mount, write, and read what other nodes wrote when asked to; in a child."""
    nothing = os.open("/dev/null", os.O_RDWR)
    for number in (0, 1, 2):  # a child that hangs must not hold srun's pipes open
        os.dup2(nothing, number)
    try:
        pipe.send(_mount(workspace))
        about = os.statvfs(workspace)
        inodes = about.f_favail if about.f_files else None
        is_read_only = bool(about.f_flag & os.ST_RDONLY)
        pipe.send(
            {"free": about.f_bavail * about.f_frsize, "inodes": inodes, "read_only": is_read_only}
        )
        pipe.send(_written(pathlib.Path(folder), node, nonce))
        while True:
            pipe.send(_seen(pathlib.Path(folder, pipe.recv()), nonce))
    except EOFError:
        return
    except OSError as e:
        pipe.send({"error": f"{e.filename or workspace}: {e.strerror or e}"})


def _mount(workspace: str) -> Json:
    """Return the mount that the workspace lies on (proc(5), mountinfo); asked before anything touches it."""
    best: Json = {"mountpoint": "/", "type": "", "source": "", "options": ""}
    for line in pathlib.Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        point = left.split()[4].encode().decode("unicode_escape")
        inside = point in ("/", workspace) or workspace.startswith(f"{point}/")
        if inside and len(point) >= len(best["mountpoint"]):
            kind, source, options = [*right.split(), "", ""][:3]
            best = {
                "mountpoint": point,
                "type": kind,
                "source": source,
                "options": f"{left.split()[5]},{options}",
            }
    return {"mount": best}


def _written(folder: pathlib.Path, node: str, nonce: str) -> Json:
    """Measure writing: MB/s of one file with fsync, the milliseconds of making and renaming a small one."""
    big, partial = folder / f"big-{node}", folder / f".{node}"
    began = time.perf_counter()
    _store(big, os.urandom(_WRITE_BYTES))
    took = time.perf_counter() - began
    big.unlink()
    renames: list[float] = []
    for _ in range(5):
        began = time.perf_counter()
        _store(partial, nonce.encode())
        partial.replace(folder / f"file-{node}")
        renames.append((time.perf_counter() - began) * 1e3)
    return {"write_mb_s": _WRITE_BYTES / took / 1e6, "rename_ms": statistics.median(renames)}


def _store(path: pathlib.Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _seen(path: pathlib.Path, nonce: str) -> Json:
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
        self.node, self.nonce = node, str(spec["nonce"])
        self.addresses: dict[str, str] = dict(
            spec["hosts"]
        )  # by Slurm's names, which need not resolve
        self.hosts = list(self.addresses)
        self.ports = [int(spec["port"]) + offset for offset in range(PORTS)]
        self.filesystem = filesystem
        self.facts: Json = {"peers": {}, "port": None, "taken": []}
        self._farewells: set[str] = set()
        self._changed = threading.Condition()
        meeting = self

        class Handler(socketserver.StreamRequestHandler):
            timeout = LEAVE_S

            def handle(self) -> None:
                with contextlib.suppress(OSError, ValueError):
                    meeting.answer(self.rfile, self.wfile)

        for port in self.ports:
            try:
                server = _Server(
                    ("", port), Handler
                )  # listening fails if another took the port at the same moment
            except OSError as e:
                self.facts["taken"].append([port, e.strerror])
                continue
            self.facts["port"] = port
            threading.Thread(target=server.serve_forever, daemon=True).start()
            break

    def visit(self) -> None:
        """Speak to every other node at once, then stay until they have spoken to this one."""
        began = time.monotonic()
        others = [host for host in self.hosts if host != self.node]
        visits = [
            threading.Thread(target=self._visit, args=(host, began), daemon=True) for host in others
        ]
        for thread in visits:
            thread.start()
        for thread in visits:
            thread.join(max(0.0, began + LEAVE_S - time.monotonic()))
        with self._changed:
            self._changed.wait_for(
                lambda: self._farewells >= set(others), max(0.0, began + LEAVE_S - time.monotonic())
            )

    def results(self) -> Json:
        """Copy the facts, since a thread that still waits for a peer may add to them."""
        return self.facts | {
            "peers": {host: dict(peer) for host, peer in list(self.facts["peers"].items())}
        }

    def answer(self, asked: typing.Any, reply: typing.Any) -> None:
        """Answer a peer, line by line."""
        text = f"{GREETING} {self.nonce} {self.node}"
        while True:
            reply.write(f"{text}\n".encode())
            line = asked.readline(256).decode().split()
            if not line:
                return
            text = "ok"
            if line[0] == "time":
                text = repr(time.time())
            elif line[0] == "file":
                self.filesystem.written.wait(LEAVE_S)
                text = f"file-{self.node}" if "rename_ms" in self.filesystem.facts else "none"
            elif line[0] == "bye":
                with self._changed:
                    self._farewells.add(line[1])
                    self._changed.notify_all()

    def _visit(self, host: str, began: float) -> None:
        facts: Json = {}
        self.facts["peers"][host] = facts
        try:
            found = socket.getaddrinfo(
                self.addresses[host], None, socket.AF_INET, socket.SOCK_STREAM
            )
        except OSError as e:
            facts |= {"given": self.addresses[host], "unresolved": e.strerror}
            with contextlib.suppress(OSError):
                facts["ipv6"] = socket.getaddrinfo(self.addresses[host], None, socket.AF_INET6)[0][
                    4
                ][0]
            return
        address = str(found[0][4][0])
        facts["address"] = address
        facts |= _route(address)
        talk = self._reach(address, host, began, facts)
        if talk is None:
            return
        with contextlib.suppress(OSError, ValueError), talk:
            stream = talk.makefile("rwb")
            offsets: list[tuple[float, float]] = []
            for _ in range(5):
                sent = time.time()
                theirs = float(_asked(stream, "time"))
                trip = time.time() - sent
                offsets.append((trip, theirs - sent - trip / 2))
            trip, offset = min(offsets)
            facts |= {"trip_ms": trip * 1e3, "clock_s": offset}
            if (
                host == self.hosts[(self.hosts.index(self.node) + 1) % len(self.hosts)]
            ):  # the next one
                name = _asked(stream, "file")
                if re.fullmatch(r"file-[A-Za-z0-9._-]+", name):
                    facts |= self.filesystem.read(name, time.monotonic() + SEEN_S + 5)
            _asked(stream, f"bye {self.node}")

    def _reach(self, address: str, host: str, began: float, facts: Json) -> socket.socket | None:
        """Return a connection to the host's server, whose port may be any of three."""
        reason = "no answer"
        while time.monotonic() - began < MEET_S:
            for port in self.ports:
                try:
                    talk = socket.create_connection((address, port), timeout=3)
                except OSError as e:
                    reason = e.strerror or str(e)
                    continue
                talk.settimeout(LEAVE_S)
                with contextlib.suppress(OSError):
                    greeting = talk.recv(256).decode(errors="replace").split()
                    if greeting == [GREETING, self.nonce, host]:
                        facts["port"] = port
                        return talk
                    reason = (
                        f"port {port} is answered by {' '.join(greeting[2:]) or 'something else'}"
                    )
                talk.close()
            time.sleep(0.2)
        facts["unreachable"] = reason
        return None


def _asked(stream: typing.Any, text: str) -> str:
    stream.write(f"{text}\n".encode())
    stream.flush()
    return stream.readline(256).decode().strip()


def reach(server: list[typing.Any] | None) -> str:
    """Return why no connection to a server, host and port, can be made; nothing where it can or none is asked for."""
    if server is None:
        return ""
    try:
        socket.create_connection((str(server[0]), int(server[1])), timeout=REACH_S).close()
    except OSError as e:
        return e.strerror or str(e)
    return ""


def _route(address: str) -> Json:
    """Return the interface on the way to another node, and its MTU."""
    try:
        argv = ("ip", "-json", "route", "get", address)
        done = subprocess.run(argv, capture_output=True, text=True, timeout=10, check=False)
        if done.returncode:
            return {"route": done.stderr.strip()[-300:]}
        route = json.loads(done.stdout)[0]
        name, own = route["dev"], route["prefsrc"]
        on_lo = subprocess.check_output(
            ("ip", "-o", "address", "show", "dev", "lo", "to", own), timeout=10
        )
        mtu = int(pathlib.Path("/sys/class/net", name, "mtu").read_text())
        return {"iface": name, "mtu": mtu, "on_lo": own if on_lo else None}
    except (OSError, ValueError, LookupError, subprocess.SubprocessError):
        return {}  # without iproute2


def examine(spec: Json) -> Json:
    """Return everything about this node."""
    node = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    filesystem = Filesystem(spec["workspace"], spec["folder"], node, spec["nonce"])
    port = int(spec["port"]) or 20000 + (int(os.environ.get("SLURM_JOB_ID", "0")) * 8) % 10000
    meeting = Meeting(node, {**spec, "port": port}, filesystem)
    writing = threading.Thread(
        target=filesystem.write, args=(time.monotonic() + LEAVE_S - 5,), daemon=True
    )
    writing.start()
    meeting.visit()
    writing.join(LEAVE_S)
    answer: Json = {
        "node": node,
        "uid": os.getuid(),
        "versions": versions(),
        "limits": limits(),
        "processors": processors(),
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
    """Return the answer in lines short enough for srun, which mixes those of several tasks above 1 KiB."""
    text = base64.b64encode(zlib.compress(json.dumps(answer).encode())).decode()
    pieces = [text[at : at + 700] for at in range(0, len(text), 700)]
    return [
        f"{PREFIX}{answer['node']} {number} {len(pieces)} {piece}"
        for number, piece in enumerate(pieces)
    ]


if __name__ == "__main__":
    for text in lines(examine(json.loads(sys.argv[1]))):
        print(text, flush=True)
    os._exit(0)  # threads that wait for peers must not hold the step
