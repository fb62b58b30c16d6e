"""Connections of tasks to their supervisor, on the loopback."""

import collections.abc
import queue
import socket
import struct

import pytest

from ddp.node import lifelines, slurm

Reports = queue.Queue[tuple[str, str]]


@pytest.fixture
def slurmd(monkeypatch: pytest.MonkeyPatch) -> collections.abc.Iterator[socket.socket]:
    """A node's slurmd, on a port of its own; a probe takes no time."""
    monkeypatch.setattr(lifelines, "PROBING_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(slurm, "slurmd_port", lambda: server.getsockname()[1])
        yield server


@pytest.fixture
def lost() -> Reports:
    return queue.Queue()


@pytest.fixture
def task(lost: Reports) -> collections.abc.Iterator[socket.socket]:
    """The end of a task that has joined."""
    joined: Reports = queue.Queue()
    lines = lifelines.Lifelines(lambda *task: joined.put(task), lambda *task: lost.put(task))
    stranger = lifelines.hold("127.0.0.1", f"{lines.place}é", "slurmd-1", "3")
    assert stranger is not None
    assert stranger.recv(1) == b"", "without the secret it is turned away"
    stranger.close()
    connection = lifelines.hold("127.0.0.1", lines.place, "slurmd-1", "3")
    assert connection is not None
    assert joined.get(timeout=20) == ("slurmd-1", "3")
    yield connection
    connection.close()
    lines.close()
    assert lifelines.hold("127.0.0.1", lines.place, "slurmd-1", "3") is None, "nobody listens after the step"


def test_a_task_that_ends_is_no_loss(slurmd: socket.socket, task: socket.socket, lost: Reports):
    task.close()
    for _ in range(2 * lifelines.PROBES):
        slurmd.accept()[0].close()
    assert lost.empty()


def test_a_machine_that_stopped_is_lost(slurmd: socket.socket, task: socket.socket, lost: Reports):
    slurmd.close()
    task.close()
    assert lost.get(timeout=20) == ("slurmd-1", "3")


def test_a_node_that_rebooted_is_lost_at_once(slurmd: socket.socket, task: socket.socket, lost: Reports):
    task.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close() resets the connection
    task.close()
    assert lost.get(timeout=20) == ("slurmd-1", "3")
    assert slurmd.fileno() >= 0
