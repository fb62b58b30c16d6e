"""A port that accepts only connections with a secret, however many others connect to it.

Any account of the cluster reaches a job's ports. Until a connection has sent the secret it costs no
thread, waits for a few seconds at most, and makes room for later ones.
"""

import collections.abc
import contextlib
import dataclasses
import secrets
import selectors
import socket
import threading
import time

BACKLOG = 1024
PATIENCE_S = 5.0  # for the secret, which our own tasks send at once
LOOKING_S = 0.5  # between two looks for connections whose time is over
MOST_WAITING = 256
MOST_BYTES = 1024
PAUSE_S = 0.1  # when this process may open no more files

# With the address, and the words behind the secret
OnAccepted = collections.abc.Callable[[socket.socket, str, str], None]


@dataclasses.dataclass
class _Candidate:
    address: str
    until: float
    received: bytes = b""


class SecretPort:
    """Calls `on_accepted` in a separate thread with each connection that sends `secret`."""

    def __init__(self, address: str, on_accepted: OnAccepted) -> None:
        self.secret = secrets.token_hex(16)
        self._on_accepted = on_accepted
        self._server = socket.create_server((address, 0), backlog=BACKLOG)
        self._server.setblocking(False)
        self.port = int(self._server.getsockname()[1])
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ)
        self._waiting: dict[socket.socket, _Candidate] = {}  # the oldest comes first
        self._is_closed = False
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Accept no more connections."""
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # which wakes the thread
        self._thread.join(PATIENCE_S)

    def _work(self) -> None:
        with self._server, self._selector:
            while not self._is_closed:
                timeout_s = LOOKING_S if self._waiting else None
                for key, _ in self._selector.select(timeout_s):
                    if key.fileobj is self._server:
                        self._accept()
                    elif isinstance(key.fileobj, socket.socket):
                        self._read(key.fileobj)
                self._refuse_late()
            for connection in self._waiting:
                connection.close()

    def _accept(self) -> None:
        try:
            connection, (address, _) = self._server.accept()
        except BlockingIOError:
            return
        except OSError:  # too many open files
            if self._waiting:
                self._refuse_oldest()
            else:
                time.sleep(PAUSE_S)
            return
        if len(self._waiting) >= MOST_WAITING:
            self._refuse_oldest()
        connection.setblocking(False)
        self._waiting[connection] = _Candidate(address, time.monotonic() + PATIENCE_S)
        self._selector.register(connection, selectors.EVENT_READ)
        self._read(connection)

    def _read(self, connection: socket.socket) -> None:
        """Read from a connection; accept or refuse it once its line is complete."""
        candidate = self._waiting.get(connection)
        if candidate is None:  # it was refused for another one
            return
        try:
            data = connection.recv(MOST_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        candidate.received += data
        has_more = data and len(candidate.received) < MOST_BYTES
        if has_more and b"\n" not in candidate.received:
            return

        words = self._words_behind_secret(candidate.received)
        if words is None:
            self._refuse(connection)
            return
        self._forget(connection)
        connection.setblocking(True)
        self._on_accepted(connection, candidate.address, words)

    def _words_behind_secret(self, received: bytes) -> str | None:
        """Return the words of a line with the secret; None for anything else."""
        line, newline, rest = received.partition(b"\n")
        secret, _, words = line.partition(b" ")
        is_known = secrets.compare_digest(secret, self.secret.encode())
        if not is_known or not newline or rest:
            return None
        return words.decode(errors="replace")

    def _refuse_oldest(self) -> None:
        self._refuse(next(iter(self._waiting)))

    def _refuse_late(self) -> None:
        now = time.monotonic()
        late: list[socket.socket] = []
        for connection, candidate in self._waiting.items():
            if candidate.until > now:
                break
            late.append(connection)
        for connection in late:
            self._refuse(connection)

    def _refuse(self, connection: socket.socket) -> None:
        self._forget(connection)
        connection.close()

    def _forget(self, connection: socket.socket) -> None:
        self._waiting.pop(connection)
        self._selector.unregister(connection)
