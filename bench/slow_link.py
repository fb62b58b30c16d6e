"""Two network namespaces joined by a link of a given rate and round trip.

Each namespace has a TAP device; the kernel's tbf limits its rate. netem adds the delay if the
kernel has it; otherwise the relay between the TAP devices holds each frame.
"""

# pyright: basic, reportPrivateImportUsage=false
import collections
import contextlib
import ctypes
import dataclasses
import fcntl
import multiprocessing
import os
import pathlib
import select
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator

from bench import row

NAMESPACES = ("slow-a", "slow-b")
ADDRESSES = ("10.213.0.1", "10.213.0.2")
DEVICE = "wan"
_MTU = 16000  # large, so that the relay has few frames to carry
_QUEUE = 1000  # frames
_NICE = -10  # of the relay: ranks that compute hold up no frame
_BURST = 64 << 10
_TUNSETIFF = 0x400454CA  # linux/if_tun.h
_IFF_TAP = 0x0002
_IFF_NO_PI = 0x1000
# The advice of `ddp doctor` for such a link: no slow start after a pause, buffers above rate times
# round trip
_SYSCTLS = {
    "net.ipv4.tcp_slow_start_after_idle": "0",
    "net.ipv4.tcp_rmem": "4096 131072 33554432",
    "net.ipv4.tcp_wmem": "4096 131072 33554432",
}


@dataclasses.dataclass(frozen=True)
class Link:
    """A rate in Mbit/s each way, and the round trip in ms; 0 is without a limit."""

    mbit_s: int
    trip_ms: int

    def __str__(self) -> str:
        if not self.mbit_s:
            return "no limit"
        rate = f"{self.mbit_s // 1000} Gbit/s" if self.mbit_s >= 1000 else f"{self.mbit_s} Mbit/s"
        return f"{rate}, {self.trip_ms} ms"


@contextlib.contextmanager
def laid(link: Link) -> Iterator[str]:
    """Lay a link between the namespaces, and yield what delays it. Raises NotHere without root."""
    if os.geteuid():
        raise row.NotHere("root, to make network namespaces")
    _remove()
    relay: _Relay | None = None
    try:
        for name, address in zip(NAMESPACES, ADDRESSES, strict=True):
            _run("ip", "netns", "add", name)
            settings = [f"{key}={value}" for key, value in _SYSCTLS.items()]
            _run("ip", "netns", "exec", name, "sysctl", "-q", "-w", *settings)
            _run("ip", "-n", name, "link", "set", "lo", "up")
            _run("ip", "-n", name, "tuntap", "add", "dev", DEVICE, "mode", "tap")
            _run("ip", "-n", name, "address", "add", f"{address}/24", "dev", DEVICE)
            _run("ip", "-n", name, "link", "set", DEVICE, "mtu", str(_MTU))
            _run("ip", "-n", name, "link", "set", DEVICE, "txqueuelen", str(_QUEUE), "up")
        has_netem = _limit(link)
        relay = _Relay(0.0 if has_netem else link.trip_ms / 2000)
        yield "netem" if has_netem else "a relay between TAP devices"
    finally:
        if relay is not None:
            relay.close()
        _remove()


def _limit(link: Link) -> bool:
    """Limit the rate of both ends, and delay by netem; return whether it could."""
    if not link.mbit_s:
        return True
    has_netem = True
    for name in NAMESPACES:
        about = f"rate {link.mbit_s}mbit burst {_BURST} latency 400ms".split()
        _run("tc", "-n", name, "qdisc", "add", "dev", DEVICE, "root", "handle", "1:", "tbf", *about)
        delay = f"parent 1:1 netem delay {link.trip_ms / 2}ms limit 10000".split()
        added = ("tc", "-n", name, "qdisc", "add", "dev", DEVICE, *delay)
        has_netem &= subprocess.run(added, capture_output=True, check=False).returncode == 0
    return has_netem


class Counters:
    """The counters of both ends, read without another process."""

    def __init__(self) -> None:
        self._files = [_inside(name, _open_counters) for name in NAMESPACES]

    def close(self) -> None:
        """Close the files."""
        for file in self._files:
            os.close(file)

    def read(self) -> tuple[int, int]:
        """Return the bytes that each end has sent."""
        sent = [_sent_bytes(os.pread(file, 1 << 16, 0).decode()) for file in self._files]
        return sent[0], sent[1]


def _open_counters() -> int:
    return os.open("/proc/thread-self/net/dev", os.O_RDONLY)  # proc_pid_net(5): of this namespace


def _sent_bytes(text: str) -> int:
    for line in text.splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == DEVICE:
            return int(numbers.split()[8])
    raise ValueError(f"no counters of {DEVICE}")


def _remove() -> None:
    for name in NAMESPACES:
        subprocess.run(("ip", "netns", "delete", name), capture_output=True, check=False)


def _run(*argv: str) -> str:
    return subprocess.run(argv, check=True, capture_output=True, text=True).stdout


class _Relay:
    """Carries frames between the two TAP devices, each after its delay: a process each way."""

    def __init__(self, delay_s: float) -> None:
        ends = [_inside(name, _open) for name in NAMESPACES]
        fork = multiprocessing.get_context("fork")
        self._ways = [
            fork.Process(target=_carry, args=(source, target, delay_s), daemon=True)
            for source, target in (ends, ends[::-1])
        ]
        for way in self._ways:
            way.start()
        for end in ends:
            os.close(end)

    def close(self) -> None:
        """End both processes."""
        for way in self._ways:
            way.kill()
            way.join()


def _carry(source: int, target: int, delay_s: float) -> None:
    """Carry frames from one device to the other until the process is ended."""
    os.setpriority(os.PRIO_PROCESS, 0, _NICE)
    frames: collections.deque[tuple[float, bytes]] = collections.deque()
    while True:
        wait_s = max(0.0, frames[0][0] - time.monotonic()) if frames else None
        readable, _, _ = select.select([source], [], [], wait_s)
        if readable:
            frame = os.read(source, _MTU + 64)
            frames.append((time.monotonic() + delay_s, frame))
        while frames and frames[0][0] <= time.monotonic():
            with contextlib.suppress(OSError):  # the other namespace was removed
                os.write(target, frames.popleft()[1])


def _open() -> int:
    """Return the file of this namespace's TAP device."""
    device = os.open("/dev/net/tun", os.O_RDWR)
    request = struct.pack("16sH22x", DEVICE.encode(), _IFF_TAP | _IFF_NO_PI)
    fcntl.ioctl(device, _TUNSETIFF, request)
    return device


def _inside(namespace: str, action: Callable[[], int]) -> int:
    """Run an action inside a namespace, on a new thread, and return its result."""
    found: list[int] = []

    def enter_and_act() -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        with pathlib.Path("/run/netns", namespace).open() as place:
            if libc.setns(place.fileno(), 0):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), namespace)
        found.append(action())

    thread = threading.Thread(target=enter_and_act)
    thread.start()
    thread.join()
    return found[0]
