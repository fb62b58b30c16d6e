"""A connection from each task to the supervisor shows within seconds that a node is lost.

Slurm needs SlurmdTimeout for that, and the ranks wait in their collectives for many minutes; here
TCP's keepalive shows it. The supervisor sends signals for the ranks the other way, a line
`signal NUMBER` each: Slurm would send them to torchrun's agents, too.
"""

import collections.abc
import contextlib
import socket
import threading
import time

from ddp.node import secret_port, slurm_calls

# A node is lost when it does not respond for 15 s
IDLE_S = 5
EVERY_S = 2
PROBES = 5
PROBING_S = 2.0
CONNECTING_S = 5.0
JOINING_S = 30.0  # for a task whose supervisor is busy with strangers
ENDING_S = 20.0  # for the tasks of a step that the supervisor ended
MAX_BYTES = 1024
# The supervisor's answer: before it, a connection that ends says nothing about the step
_JOINED = b"joined\n"

Report = collections.abc.Callable[[str], None]
OnSignal = collections.abc.Callable[[int], None]


class Lifelines:
    """The supervisor's ends of the connections of one step."""

    def __init__(self, on_joined: Report, on_lost: Report, address: str = "") -> None:
        self._on_joined = on_joined
        self._on_lost = on_lost
        self._closed = threading.Event()
        self._watched: list[tuple[socket.socket, threading.Thread]] = []
        self._tasks: dict[str, socket.socket] = {}  # by node, while the task runs
        self._sending = threading.Lock()
        self._port = secret_port.SecretPort(address, self._accept)
        self.place = f"{self._port.port} {self._port.secret}"

    def close(self) -> None:
        """End the tasks that still run, and wait for them.

        srun and scancel would end those on nodes that returned, too.
        """
        self._closed.set()
        self._port.close()
        until = time.monotonic() + ENDING_S
        for connection, thread in self._watched:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_WR)
            thread.join(max(0.0, until - time.monotonic()))

    def signal(self, number: int) -> list[str]:
        """Send a signal to the ranks of every task; return the nodes that it reached, in order."""
        reached: list[str] = []
        with self._sending:
            for host, connection in sorted(self._tasks.items()):
                with contextlib.suppress(OSError):
                    connection.sendall(f"signal {number}\n".encode())
                    reached.append(host)
        return reached

    def _accept(self, connection: socket.socket, address: str, host: str) -> None:
        thread = threading.Thread(target=self._watch, args=(connection, address, host), daemon=True)
        self._watched.append((connection, thread))
        thread.start()

    def _watch(self, connection: socket.socket, address: str, host: str) -> None:
        """Report a task's node, and its loss if the connection breaks.

        A task that ends closes it, and so does a machine that is stopped; then the node is probed.
        """
        with connection:
            _keep_alive(connection)
            try:
                connection.sendall(_JOINED)
                self._tasks[host] = connection
                self._on_joined(host)
                while connection.recv(MAX_BYTES):
                    pass
                self._tasks.pop(host)
                if not self._closed.is_set():
                    self._probe(address)
            except OSError:
                if not self._closed.is_set():
                    self._on_lost(host)

    def _probe(self, address: str) -> None:
        """Wait for the step's end. Raises OSError when the node's slurmd stops responding."""
        failed = 0
        port = slurm_calls.slurmd_port()
        while not self._closed.is_set():
            began = time.monotonic()
            try:
                socket.create_connection((address, port), timeout=PROBING_S).close()
                failed = 0
            except OSError:
                failed += 1
                if failed == PROBES:
                    raise
            self._closed.wait(max(0.0, began + PROBING_S - time.monotonic()))


def _keep_alive(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, IDLE_S),
        (socket.TCP_KEEPINTVL, EVERY_S),
        (socket.TCP_KEEPCNT, PROBES),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def hold(address: str, place: str, host: str) -> socket.socket | None:
    """Return a connection to keep open as long as the task runs.

    None: the supervisor is not reached.
    """
    port, _, secret = place.partition(" ")
    until = time.monotonic() + JOINING_S
    while time.monotonic() < until:
        try:
            return _join(address, int(port), f"{secret} {host}\n")
        except ConnectionRefusedError:  # the step has ended
            return None
        except OSError:
            time.sleep(PROBING_S / 10)
    return None


def _join(address: str, port: int, words: str) -> socket.socket:
    """Connect, and send the secret and this node's name. Raises OSError without an answer."""
    connection = socket.create_connection((address, port), timeout=CONNECTING_S)
    try:
        connection.sendall(words.encode())
        answer = b""
        while len(answer) < len(_JOINED):  # and not what follows it
            data = connection.recv(len(_JOINED) - len(answer))
            if not data:
                raise ConnectionAbortedError(f"{address}:{port} closed the connection")
            answer += data
    except OSError:
        connection.close()
        raise
    connection.settimeout(None)
    return connection


def follow(connection: socket.socket, on_signal: OnSignal) -> None:
    """Pass on the signals that the supervisor sends, until it ends the step or has ended."""
    with (
        contextlib.suppress(OSError),
        connection.makefile(encoding="ascii", errors="replace") as lines,
    ):
        for line in lines:
            word, _, number = line.strip().partition(" ")
            if word == "signal" and number.isdecimal():
                on_signal(int(number))
