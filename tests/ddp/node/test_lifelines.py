"""Connections of tasks to their supervisor, on the loopback."""

import collections.abc
import queue
import signal
import socket
import struct
import threading

import pytest

from ddp.node import lifelines, slurm_calls

Reports = queue.Queue[str]


@pytest.fixture
def slurmd(monkeypatch: pytest.MonkeyPatch) -> collections.abc.Iterator[socket.socket]:
    """A node's slurmd, on a free port; a probe takes no time."""
    monkeypatch.setattr(lifelines, "PROBING_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(slurm_calls, "slurmd_port", lambda: server.getsockname()[1])
        yield server


@pytest.fixture
def lost() -> Reports:
    return queue.Queue()


@pytest.fixture
def joined() -> Reports:
    return queue.Queue()


@pytest.fixture
def lines(joined: Reports, lost: Reports) -> collections.abc.Iterator[lifelines.Lifelines]:
    lines = lifelines.Lifelines(joined.put, lost.put)
    yield lines
    lines.close()
    assert lifelines.hold("127.0.0.1", lines.place, "slurmd-1") is None, (
        "nobody listens after the step"
    )


@pytest.fixture
def task(lines: lifelines.Lifelines, joined: Reports) -> collections.abc.Iterator[socket.socket]:
    """The end of a task that has joined."""
    connection = lifelines.hold("127.0.0.1", lines.place, "slurmd-1")
    assert connection is not None
    assert joined.get(timeout=120) == "slurmd-1"
    with connection:
        yield connection


def test_a_stranger_is_turned_away_and_what_it_says_is_no_news(
    lines: lifelines.Lifelines, joined: Reports, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(lifelines, "JOINING_S", 0.5)
    assert lifelines.hold("127.0.0.1", f"{lines.place}é", "slurmd-1") is None
    assert joined.empty()


def test_a_task_tries_again_where_its_supervisor_had_no_time_for_it(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(lifelines, "PROBING_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        held: queue.Queue[socket.socket | None] = queue.Queue()
        port = server.getsockname()[1]
        task = threading.Thread(
            target=lambda: held.put(lifelines.hold("127.0.0.1", f"{port} secret", "slurmd-1"))
        )
        task.start()
        server.accept()[0].close()
        again = server.accept()[0]
        with again:
            assert again.recv(100) == b"secret slurmd-1\n"
            again.sendall(b"joined\nsignal 10\n")
            connection = held.get(timeout=120)
            assert connection is not None
            again.shutdown(socket.SHUT_WR)
            got: list[int] = []
            with connection:
                lifelines.follow(connection, got.append)
            assert got == [10]
        task.join(timeout=120)


def test_a_step_that_is_ended_waits_for_its_tasks(
    lines: lifelines.Lifelines, task: socket.socket, lost: Reports
):
    ending = threading.Thread(target=lines.close)
    ending.start()
    lifelines.follow(task, lambda number: pytest.fail(f"signal {number}"))
    ending.join(timeout=0.2)
    assert ending.is_alive(), "the task has not ended"
    task.close()
    ending.join(timeout=120)
    assert not ending.is_alive()
    assert lost.empty()


def test_signals_reach_the_tasks_in_order_and_their_nodes_are_named(
    lines: lifelines.Lifelines, joined: Reports, task: socket.socket
):
    other = lifelines.hold("127.0.0.1", lines.place, "slurmd-0")
    assert other is not None
    assert joined.get(timeout=120) == "slurmd-0"
    got: queue.Queue[int] = queue.Queue()

    def run(connection: socket.socket) -> None:
        with connection:
            lifelines.follow(connection, got.put)

    for connection in (task, other):
        threading.Thread(target=run, args=(connection,), daemon=True).start()
    numbers = [signal.SIGTERM, signal.SIGUSR1]
    assert [lines.signal(number) for number in numbers] == [["slurmd-0", "slurmd-1"]] * 2
    assert sorted(got.get(timeout=120) for _ in range(4)) == sorted(numbers * 2)
    lines.close()
    assert got.empty(), "the end of a step is no signal"


def test_a_task_that_has_ended_gets_no_signal(
    slurmd: socket.socket, lines: lifelines.Lifelines, task: socket.socket
):
    task.close()
    slurmd.accept()[0].close()  # its node is probed from now on
    assert lines.signal(signal.SIGTERM) == []


def test_a_task_that_ends_is_no_loss(slurmd: socket.socket, task: socket.socket, lost: Reports):
    task.close()
    for _ in range(2 * lifelines.PROBES):
        slurmd.accept()[0].close()
    assert lost.empty()


def test_a_machine_that_stopped_is_lost(slurmd: socket.socket, task: socket.socket, lost: Reports):
    slurmd.close()
    task.close()
    assert lost.get(timeout=120) == "slurmd-1"


def test_a_node_that_rebooted_is_lost_at_once(
    slurmd: socket.socket, task: socket.socket, lost: Reports
):
    task.setsockopt(
        socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
    )  # close() resets the connection
    task.close()
    assert lost.get(timeout=120) == "slurmd-1"
    assert slurmd.fileno() >= 0
