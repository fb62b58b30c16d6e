"""A connection from each task of a step to the supervisor: TCP's keepalive shows within seconds that a node is lost.

Slurm needs SlurmdTimeout for that, and the ranks wait in their collectives for many minutes.
"""

import collections.abc
import contextlib
import secrets
import socket
import threading
import time

from ddp.node import slurm

IDLE_S, EVERY_S, PROBES = 5, 2, 5  # a node is lost when it does not respond for 15 s
PROBING_S = 2.0
CONNECTING_S = 5.0
MAX_BYTES = 1024

Report = collections.abc.Callable[[str, str], None]


class Lifelines:
    """The supervisor's ends of the connections of one step."""

    def __init__(self, on_joined: Report, on_lost: Report) -> None:
        self._on_joined, self._on_lost = on_joined, on_lost
        self._is_closed = False
        self._server = socket.create_server(("", 0), backlog=1024)
        self._secret = secrets.token_hex(16)  # other users' processes reach the port, too
        self.place = f"{self._server.getsockname()[1]} {self._secret}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Accept no more connections; those that exist end with their tasks."""
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # which wakes accept()
        self._server.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._server.accept()
                threading.Thread(target=self._watch, args=(connection,), daemon=True).start()

    def _watch(self, connection: socket.socket) -> None:
        """Report a task with its step, and its node if the connection breaks.

        A task that ends closes it, and so does a machine that is stopped: from then on the node is probed.
        """
        with connection:
            _keep_alive(connection)
            host = step = ""
            try:
                secret, host, step = connection.recv(MAX_BYTES).decode(errors="replace").split(" ")
                if not secrets.compare_digest(secret.encode(), self._secret.encode()):
                    return
                self._on_joined(host, step)
                while connection.recv(MAX_BYTES):
                    pass
                self._probe(connection.getpeername()[0])
            except OSError:
                self._on_lost(host, step)
            except ValueError:
                return  # not a task

    def _probe(self, address: str) -> None:
        """Wait for the step's end. Raises OSError when the node's slurmd stops responding."""
        failed, port = 0, slurm.slurmd_port()
        while not self._is_closed:
            began = time.monotonic()
            try:
                socket.create_connection((address, port), timeout=PROBING_S).close()
                failed = 0
            except OSError:
                failed += 1
                if failed == PROBES:
                    raise
            time.sleep(max(0.0, began + PROBING_S - time.monotonic()))


def _keep_alive(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, IDLE_S), (socket.TCP_KEEPINTVL, EVERY_S), (socket.TCP_KEEPCNT, PROBES)):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def hold(address: str, place: str, host: str, step: str) -> socket.socket | None:
    """Return a connection to the supervisor, to keep open as long as the task runs; None where it is not reached."""
    port, _, secret = place.partition(" ")
    try:
        connection = socket.create_connection((address, int(port)), timeout=CONNECTING_S)
        connection.sendall(f"{secret} {host} {step}".encode())
    except OSError:
        return None
    return connection
