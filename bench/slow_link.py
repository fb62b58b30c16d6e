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
import os
import pathlib
import struct
import subprocess
import threading
import time
import typing
from collections.abc import Callable, Iterator

from bench import row

NAMESPACES = ("slow-a", "slow-b")
ADDRESSES = ("10.213.0.1", "10.213.0.2")
DEVICE = "wan"
_MTU = 16000  # large, so that the relay has few frames to hold
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
    """Carries frames between the two TAP devices, each after its delay."""

    def __init__(self, delay_s: float) -> None:
        self._delay_s = delay_s
        self._ends = [_inside(name, _open) for name in NAMESPACES]
        self._is_closing = False
        self._threads: list[threading.Thread] = []
        for source, target in (self._ends, self._ends[::-1]):
            frames: collections.deque[tuple[float, bytes]] = collections.deque()
            there = threading.Condition()
            for work in (self._receive, self._send):
                end = source if work == self._receive else target
                thread = threading.Thread(target=work, args=(end, frames, there), daemon=True)
                thread.start()
                self._threads.append(thread)

    def close(self) -> None:
        """Leave the threads, which end with the process: a read of a TAP cannot be interrupted."""
        self._is_closing = True

    def _receive(self, end: int, frames: typing.Any, there: threading.Condition) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        while not self._is_closing:
            try:
                frame = os.read(end, _MTU + 64)
            except OSError:  # its namespace was removed
                return
            with there:
                frames.append((time.monotonic() + self._delay_s, frame))
                there.notify()

    def _send(self, end: int, frames: typing.Any, there: threading.Condition) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        while not self._is_closing:
            with there:
                while not frames:
                    there.wait(1.0)
                    if self._is_closing:
                        return
                due, frame = frames.popleft()
            wait_s = due - time.monotonic()
            if wait_s > 0:
                time.sleep(wait_s)
            with contextlib.suppress(OSError):
                os.write(end, frame)


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
