"""A port that strangers reach too, on the loopback."""

import collections.abc
import contextlib
import os
import pathlib
import queue
import resource
import socket
import threading
import time

import pytest

from ddp.node import secret_port

MANY = 3000  # connections of a stranger
Entered = queue.Queue[tuple[str, str]]


@pytest.fixture
def entered() -> Entered:
    return queue.Queue()


@pytest.fixture
def opened(entered: Entered) -> collections.abc.Iterator[secret_port.SecretPort]:
    def enter(connection: socket.socket, address: str, words: str) -> None:
        entered.put((address, words))
        connection.close()

    opened = secret_port.SecretPort("127.0.0.1", enter)
    yield opened
    opened.close()
    with pytest.raises(ConnectionRefusedError):
        connect(opened)


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> collections.abc.Iterator[None]:
    """Let this process open as many files as the test needs."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(2 * MANY + 1000, before[1]), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def open_files() -> list[int]:
    """Return this process's file descriptors."""
    return [int(path.name) for path in pathlib.Path("/proc/self/fd").iterdir()]


def connect(opened: secret_port.SecretPort) -> socket.socket:
    return socket.create_connection(("127.0.0.1", opened.port), timeout=120)


def say(opened: secret_port.SecretPort, words: bytes) -> None:
    with connect(opened) as connection:
        connection.sendall(words)
        assert connection.recv(1) == b"", "it is closed, whoever it was"


def test_the_secret_opens_it(opened: secret_port.SecretPort, entered: Entered):
    say(opened, f"{opened.secret} slurmd-1\n".encode())
    assert entered.get(timeout=120) == ("127.0.0.1", "slurmd-1")


def test_a_secret_may_come_in_parts(opened: secret_port.SecretPort, entered: Entered):
    with connect(opened) as connection:
        for letter in f"{opened.secret} slurmd-1\n":
            connection.sendall(letter.encode())
        assert entered.get(timeout=120) == ("127.0.0.1", "slurmd-1")


@pytest.mark.parametrize(
    "words",
    [
        b"\n",
        b" x\n",
        b"0" * 32 + b" x\n",
        b"x" * 5000,
        b"\xff\xfe\n",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    ],
)
def test_other_words_do_not(opened: secret_port.SecretPort, entered: Entered, words: bytes):
    with contextlib.suppress(ConnectionResetError):  # it may be closed before all is read
        say(opened, words)
    assert entered.empty()


def test_nobody_waits_for_ever(opened: secret_port.SecretPort, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(secret_port, "PATIENCE_S", 0.2)
    with connect(opened) as connection:
        assert connection.recv(1) == b""


def test_thousands_that_say_nothing_cost_no_thread_and_keep_nobody_out(
    opened: secret_port.SecretPort, entered: Entered, files: None
):
    threads, descriptors = threading.active_count(), len(open_files())
    idle: list[socket.socket] = []
    try:
        for number in range(MANY):
            idle.append(connect(opened))
            if number % 500 == 499:
                began = time.monotonic()
                say(opened, f"{opened.secret} {number}\n".encode())
                assert entered.get(timeout=120) == ("127.0.0.1", str(number))
                assert time.monotonic() - began < 5, "it was not let in at once"
        assert threading.active_count() == threads
        used = len(open_files()) - descriptors - len(idle)
        assert used <= secret_port.MOST_WAITING
    finally:
        for connection in idle:
            connection.close()


def test_it_outlives_a_time_without_file_descriptors(
    opened: secret_port.SecretPort, entered: Entered
):
    """Idle connections can cause that if a process may open few files."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = max(open_files())
    taken: list[int] = []
    visitors = [socket.socket() for _ in range(3)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 8, before[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            while True:
                taken.append(os.open("/dev/null", os.O_RDONLY))
        for visitor in visitors:
            visitor.connect(("127.0.0.1", opened.port))
            visitor.sendall(f"{opened.secret} late\n".encode())
        time.sleep(3 * secret_port.PAUSE_S)
        assert entered.empty()
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    for visitor in visitors:
        assert entered.get(timeout=120) == ("127.0.0.1", "late")
        visitor.close()
