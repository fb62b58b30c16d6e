"""The introspection sockets of units' agents; they answer `GET /machinelock` alone.

Text and socket follow core/machinelock/machinelock.go and internal/worker/introspection/worker.go
of juju/juju.
"""

import collections.abc
import contextlib
import http
import os
import pathlib
import selectors
import socket
import threading

import yaml

from sandbox.store import Event, Model, Unit

NAME = "introspection.socket"  # in the folder of a unit's agent
_REQUEST_S = 1.0


def report(unit: Unit, since: float, waiting: tuple[Event, float] | None) -> str:
    """Describe a unit's part in the lock: it holds it since `since` seconds, or waits."""
    lock: dict[str, str | list[str]] = {"holder": "none"}
    if unit.executing is not None and not unit.executing.parallel:
        lock["holder"] = (
            f"{unit.name} uniter ({_operation(unit.executing)}), holding {_duration(since)}"
        )
    elif waiting is not None:
        event, waited = waiting
        lock["waiting"] = [f"{unit.name} uniter ({_operation(event)}), waiting {_duration(waited)}"]
    return yaml.safe_dump(
        {f"unit-{unit.name.replace('/', '-')}": lock}, sort_keys=False, width=10_000
    )


def _operation(event: Event) -> str:
    """Name an event as the uniter does: operation/runhook.go, operation/runaction.go."""
    if event.action is not None:
        return f"run action {event.action['id']}"
    if event.remote is not None:
        return f"run {event.kind} ({event.relation}; unit: {event.remote}) hook"
    return f"run {event.kind} hook"


def _duration(seconds: float) -> str:
    """Write whole seconds as Go does: 12s, 1m2s, 1h0m5s."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    text = f"{hours}h" if hours else ""
    text += f"{minutes}m" if hours or minutes else ""
    return f"{text}{rest}s"


class Sockets:
    """Answers on the sockets of some units' agents, in a separate thread, until `close`."""

    def __init__(self) -> None:
        self._texts: dict[pathlib.Path, str] = {}  # by an agent's folder
        self._bound: dict[
            pathlib.Path, tuple[socket.socket, int]
        ] = {}  # with the number of the socket's file
        self._selector = selectors.DefaultSelector()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def serve(self, texts: collections.abc.Mapping[pathlib.Path, str]) -> None:
        """Serve these texts by the agents' folders, and no others."""
        with self._lock:
            self._texts = dict(texts)
            for folder in self._bound.keys() - texts.keys():
                self._unbind(folder)
            for folder in texts.keys() - self._bound.keys():
                self._bind(folder)
            if self._bound and self._thread is None:
                self._thread = threading.Thread(target=self._run, daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Serve nothing any more."""
        self.serve({})
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()
        self._selector.close()

    def _bind(self, folder: pathlib.Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / NAME).unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX)
        place = os.open(folder, os.O_PATH | os.O_DIRECTORY)
        try:
            listener.bind(
                f"/proc/self/fd/{place}/{NAME}"
            )  # a socket's path has 107 characters at most
        finally:
            os.close(place)
        listener.listen()
        listener.setblocking(False)
        self._bound[folder] = listener, (folder / NAME).stat().st_ino
        self._selector.register(listener, selectors.EVENT_READ, folder)

    def _unbind(self, folder: pathlib.Path) -> None:
        listener, number = self._bound.pop(folder)
        self._selector.unregister(listener)
        listener.close()
        with contextlib.suppress(FileNotFoundError):
            if (
                folder / NAME
            ).stat().st_ino == number:  # else another command serves this unit by now
                (folder / NAME).unlink()

    def _run(self) -> None:
        while self._thread is threading.current_thread():
            for key, _ in self._selector.select(timeout=0.2):
                with contextlib.suppress(OSError):
                    self._answer(key.fileobj, key.data)

    def _answer(self, listener: object, folder: pathlib.Path) -> None:
        assert isinstance(listener, socket.socket)
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(_REQUEST_S)
            request = connection.recv(4096)
            text = self._texts.get(folder)
            status = http.HTTPStatus.OK
            if text is None or not request.startswith(b"GET /machinelock "):
                status, text = http.HTTPStatus.NOT_FOUND, ""
            head = f"HTTP/1.0 {status.value} {status.phrase}\r\nContent-Type: text/plain; charset=utf-8"
            connection.sendall(f"{head}\r\n\r\n{text}".encode())


def agent_folder(agents: pathlib.Path, unit: str) -> pathlib.Path:
    """Return the folder of a unit's agent."""
    return agents / f"unit-{unit.replace('/', '-')}"


def served(model: Model, running: collections.abc.Iterable[str]) -> list[Unit]:
    """List the units whose agents answer: the running ones, and those that wait for them."""
    found: dict[str, Unit] = {}
    for name in running:
        unit = model.units[name]
        found[name] = unit
        if unit.executing is not None and not unit.executing.parallel:
            others = model.machine_units(unit.machine)
            found |= {other.name: other for other in others if other.executing is None}
    return list(found.values())
