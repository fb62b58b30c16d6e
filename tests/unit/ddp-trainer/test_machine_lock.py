"""Who holds the machine's lock, as the agents' sockets tell it."""

import collections.abc
import pathlib
import shutil
import socketserver
import tempfile
import threading

import hypothesis
import pytest
from harness import Trainer
from hypothesis import strategies as st

import machine_lock
import program
from ddp.results.progress import Log

FREE = "{agent}:\n  holder: none\n"
HELD = "unit-trainer-0:\n  holder: trainer/0 uniter (run action 109), holding 56s\n"
WAITS = """\
unit-mount-1:
  holder: none
  waiting:
  - 'mount/1 uniter (run relation-changed (4; unit: server/0) hook), waiting 1h1m10s'
  - mount/1 uniter (run update-status hook), waiting 3s
"""
Serve = collections.abc.Callable[[str, str], None]


class _Handler(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        assert self.rfile.readline().split()[:2] == [b"GET", b"/machinelock"]
        head = "HTTP/1.0 200 OK\r\nContent-Type: text/plain; charset=utf-8\r\n\r\n"
        self.wfile.write((head + self.server.text).encode())  # type: ignore[attr-defined]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> collections.abc.Iterator[Serve]:
    """Return a function that has an agent tell a report."""
    agents = pathlib.Path(tempfile.mkdtemp())  # a socket's path has 107 characters at most
    monkeypatch.setattr(machine_lock, "AGENTS", agents)
    servers: list[socketserver.UnixStreamServer] = []

    def start(agent: str, text: str) -> None:
        (agents / agent).mkdir()
        server = socketserver.UnixStreamServer(
            str(agents / agent / "introspection.socket"), _Handler
        )
        server.text = text  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        servers.append(server)

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()
    shutil.rmtree(agents)


@pytest.mark.parametrize(
    ("text", "is_held"),
    [
        (HELD, True),
        (FREE.format(agent="unit-trainer-0"), False),
        (HELD.replace("109", "110"), False),
        (HELD.replace("run action 109", "run config-changed hook"), False),
    ],
)
@pytest.mark.parametrize("version", ["3.6.8", "4.0.15", "5.0.0"])
def test_the_agent_decides_whatever_the_version(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, text: str, is_held: bool, version: str
):
    monkeypatch.setenv("JUJU_VERSION", version)
    serve("unit-trainer-0", text)
    assert machine_lock.is_held_by("trainer/0", "109") == is_held


@pytest.mark.parametrize(
    "text", ["", "not: [yaml", "unit-other-0:\n  holder: none\n", "[1, 2]", "unit-trainer-0: 7"]
)
@pytest.mark.parametrize(
    ("version", "is_held"), [("3.6.8", False), ("2.9.1", False), ("4.0.15", True), ("", False)]
)
def test_where_the_agent_is_silent_or_odd_the_version_decides(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, text: str, version: str, is_held: bool
):
    monkeypatch.setenv("JUJU_VERSION", version)
    assert machine_lock.is_held_by("trainer/0", "109") == is_held, "no socket"
    serve("unit-trainer-0", text)
    assert machine_lock.is_held_by("trainer/0", "109") == is_held


def test_who_waits_is_reported_by_the_agents_of_all_units(serve: Serve):
    serve("unit-trainer-0", HELD)
    serve("unit-mount-1", WAITS)
    assert machine_lock.waiting() == [
        machine_lock.Entry("mount/1", "run relation-changed (4; unit: server/0) hook", 3670),
        machine_lock.Entry("mount/1", "run update-status hook", 3),
    ]


def test_whoever_has_waited_for_a_minute_is_named_once(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(machine_lock, "_LOOK_S", 0.01)
    serve("unit-mount-1", WAITS)
    lines: list[str] = []
    seen = threading.Event()

    def log(text: str) -> None:
        lines.append(text)
        if "update-status" in text or len(lines) > 1:
            pytest.fail("named again, or too early")
        seen.set()

    with machine_lock.named_waiters(log, is_held=True):
        assert seen.wait(20)
        seen.wait(0.2)
    assert lines == [
        "mount/1 (run relation-changed (4; unit: server/0) hook) has waited 3670 s for this action"
    ]


def test_nobody_is_named_who_waits_for_another_hook(serve: Serve, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(machine_lock, "_LOOK_S", 0.01)
    serve("unit-mount-1", WAITS)
    lines: list[str] = []
    with machine_lock.named_waiters(lines.append, is_held=False) as log:
        threading.Event().wait(0.3)
        log("of the action")
    assert lines == ["of the action"]


def test_the_program_learns_whether_its_action_holds_the_machine(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
):
    asked: list[dict[str, object]] = []
    answers = iter([True, False])

    def is_held_by(unit: str, task: str) -> bool:
        assert (unit, bool(task)) == ("trainer/0", True)
        return next(answers)

    def ask(
        _: str, request: dict[str, object], log: Log, *, timeout_s: float | None = None
    ) -> program.Answer:
        if request["do"] == "list-runs":
            asked.append(request)
        return program.Answer({"level": "active", "text": ""})

    monkeypatch.setattr(machine_lock, "is_held_by", is_held_by)
    monkeypatch.setattr(program, "ask", ask)
    trainer.run("list-runs")
    trainer.run("list-runs")
    assert [request["holds-machine"] for request in asked] == [True, False]


@hypothesis.given(st.integers(0, 10**6))
def test_every_time_of_the_report_is_read(seconds: int):
    minutes, rest = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    text = (
        f"{hours}h{minutes}m{rest}s" if hours else f"{minutes}m{rest}s" if minutes else f"{rest}s"
    )
    entry = machine_lock.parse_entry(f"a/0 uniter (run action 7), holding {text}")
    assert entry == machine_lock.Entry("a/0", "run action 7", seconds)


@hypothesis.given(st.text())
def test_other_text_is_no_entry(text: str):
    assert machine_lock.parse_entry(text) is None or "uniter" in text
