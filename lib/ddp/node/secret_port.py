"""A port where those come in who know a secret, however many others connect to it.

Any account of the cluster reaches a job's ports. Until a connection has sent the secret it costs no thread, waits for a
few seconds at most, and makes room for later ones.
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
PATIENCE_S = 5.0  # for the secret; those who know it send it at once
LOOKING_S = 0.5  # between two looks for those whose time is over
MOST_WAITING = 256
MOST_BYTES = 1024
PAUSE_S = 0.1  # when this process may open no more files

OnEntered = collections.abc.Callable[
    [socket.socket, str, str], None
]  # with the address, and what came behind the secret


@dataclasses.dataclass
class _Visitor:
    address: str
    until: float
    received: bytes = b""


class Door:
    """Calls `on_entered` in a separate thread with each connection that knows `secret`."""

    def __init__(self, address: str, on_entered: OnEntered) -> None:
        self.secret = secrets.token_hex(16)
        self._on_entered = on_entered
        self._server = socket.create_server((address, 0), backlog=BACKLOG)
        self._server.setblocking(False)
        self.port = int(self._server.getsockname()[1])
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ)
        self._waiting: dict[socket.socket, _Visitor] = {}  # who has waited longest comes first
        self._is_closed = False
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Let nobody in from now on."""
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # which wakes the thread
        self._thread.join(PATIENCE_S)

    def _work(self) -> None:
        with self._server, self._selector:
            while not self._is_closed:
                for key, _ in self._selector.select(LOOKING_S if self._waiting else None):
                    if key.fileobj is self._server:
                        self._accept()
                    elif isinstance(key.fileobj, socket.socket):
                        self._read(key.fileobj)
                self._turn_away_late()
            for connection in self._waiting:
                connection.close()

    def _accept(self) -> None:
        try:
            connection, (address, _) = self._server.accept()
        except BlockingIOError:
            return
        except OSError:  # too many open files
            if self._waiting:
                self._turn_away(next(iter(self._waiting)))
            else:
                time.sleep(PAUSE_S)
            return
        if len(self._waiting) >= MOST_WAITING:
            self._turn_away(next(iter(self._waiting)))
        connection.setblocking(False)
        self._waiting[connection] = _Visitor(address, time.monotonic() + PATIENCE_S)
        self._selector.register(connection, selectors.EVENT_READ)
        self._read(connection)

    def _read(self, connection: socket.socket) -> None:
        visitor = self._waiting.get(connection)
        if visitor is None:  # it was turned away meanwhile
            return
        try:
            data = connection.recv(MOST_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        visitor.received += data
        line, newline, rest = visitor.received.partition(b"\n")
        if data and not newline and len(visitor.received) < MOST_BYTES:
            return
        secret, _, words = line.partition(b" ")
        if not newline or rest or not secrets.compare_digest(secret, self.secret.encode()):
            self._turn_away(connection)
            return
        self._forget(connection)
        connection.setblocking(True)
        self._on_entered(connection, visitor.address, words.decode(errors="replace"))

    def _turn_away_late(self) -> None:
        now = time.monotonic()
        late: list[socket.socket] = []
        for connection, visitor in self._waiting.items():
            if visitor.until > now:
                break
            late.append(connection)
        for connection in late:
            self._turn_away(connection)

    def _turn_away(self, connection: socket.socket) -> None:
        self._forget(connection)
        connection.close()

    def _forget(self, connection: socket.socket) -> None:
        self._waiting.pop(connection)
        self._selector.unregister(connection)
