"""Differences of Juju 4, with the real agent and a small charm, and its agents' lock reports."""

import concurrent.futures
import pathlib
import socket
import time

import click.testing
import pytest
from folder_hosts import Bench

from sandbox import cli, introspection, juju, settings
from sandbox import model as rules
from sandbox.guest import juju_exec
from sandbox.store import Model, SandboxError, Store


def ask(bench: Bench, unit: str, path: str = "/machinelock") -> str:
    """Ask a unit's agent, as juju-introspect does; return status and text, or "silent"."""
    (host,) = bench.hosts.made.values()
    folder = host.root / juju_exec.AGENTS.relative_to("/") / f"unit-{unit.replace('/', '-')}"
    link = bench.room / "agent"  # a socket's path has 107 characters at most
    link.unlink(missing_ok=True)
    link.symlink_to(folder)
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(str(link / "introspection.socket"))
        except (FileNotFoundError, ConnectionRefusedError):
            return "silent"
        connection.sendall(f"GET {path} HTTP/1.0\r\n\r\n".encode())
        with connection.makefile() as file:
            return file.read()


def answered(bench: Bench, unit: str, words: str) -> str:
    """Wait until a unit's agent says this."""
    deadline = time.monotonic() + 30
    while words not in (text := ask(bench, unit)):
        assert time.monotonic() < deadline, text
        time.sleep(0.05)
    return text


def test_no_action_is_parallel_on_juju_4(juju4: Bench):
    waiting = juju4.act("server/0", "wait")
    juju4.config("agent", n="1")
    assert juju4.hooks() == []
    wanted = "agent/0                      config-changed waits for the machine lock of machine 0: server/0 runs action"
    assert any(wanted in line for line in juju4.lines), juju4.lines
    (juju4.room / "go").write_text("")
    waiting.result(40)
    with juju4.engine() as engine:
        engine.settle()
    assert "agent/0 config_changed" in juju4.hooks()


def test_an_agent_tells_who_holds_the_lock_and_who_waits(juju4: Bench):
    assert ask(juju4, "server/0") == "silent", "while nothing runs"
    waiting = juju4.act("server/0", "wait")
    answer = answered(juju4, "server/0", "holder: server/0 uniter (run action 2), holding ")
    assert (
        answer.startswith("HTTP/1.0 200 OK\r\nContent-Type: text/plain")
        or "\nunit-server-0:\n" in answer
    )
    juju4.config("agent", n="1")
    text = answered(juju4, "agent/0", "agent/0 uniter (run config-changed hook), waiting ")
    assert "unit-agent-0:\n  holder: none\n  waiting:\n  - agent/0 uniter" in text
    assert " 404 " in ask(juju4, "server/0", "/depengine")
    (juju4.room / "go").write_text("")
    waiting.result(40)
    assert ask(juju4, "server/0") == "silent"


def test_a_parallel_action_holds_nothing(bench: Bench):
    waiting = bench.act("server/0", "wait")
    assert "unit-server-0:\n  holder: none\n" in answered(bench, "server/0", "holder")
    (bench.room / "go").write_text("")
    waiting.result(40)


def test_a_command_leaves_the_socket_that_another_one_serves_by_now(tmp_path: pathlib.Path):
    first, second = introspection.Sockets(), introspection.Sockets()
    path = tmp_path / introspection.NAME
    first.serve({tmp_path: "one"})
    second.serve({tmp_path: "two"})
    first.close()
    assert path.is_socket()
    second.close()
    assert not path.exists()


def cancel(bench: Bench, task: str) -> bool:
    with bench.store.change() as model:
        return settings.cancel_task(model, task)


def waiting_action(bench: Bench, action: str) -> "concurrent.futures.Future[object]":
    """Begin an action of server/0 that waits for one that runs there."""
    second = bench.begin(lambda engine: engine.act("server/0", action, {}))
    deadline = time.monotonic() + 30
    while len(bench.store.load().units["server/0"].events) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return second


@pytest.mark.parametrize("action", ["wait", "hold"])
def test_a_task_that_runs_is_cancelled_on_juju_3_6(bench: Bench, action: str):
    running = bench.act("server/0", action)
    assert cancel(bench, "2")
    assert running.result(40) == {"id": "2", "results": {}, "failure": "task 2 was cancelled"}
    with bench.engine() as engine:
        engine.settle()
        assert engine.model.units["server/0"].events == []


def test_juju_4_cancels_a_task_that_waits_but_none_that_runs(juju4: Bench):
    running = juju4.act("server/0", "wait")
    second = waiting_action(juju4, "hold")
    assert cancel(juju4, "4")
    assert second.result(40) == {"id": "4", "results": {}, "failure": "task 4 was cancelled"}
    assert not cancel(juju4, "2")
    assert not running.done()
    (juju4.room / "go").write_text("")
    outcome = running.result(40)
    assert outcome["results"] == {"done": "yes"}


def test_a_task_that_does_not_exist_is_not_found(bench: Bench):
    with pytest.raises(SandboxError, match=r'^task "9" not found$'):
        cancel(bench, "9")


def test_the_command_says_what_juju_4_says(juju4: Bench, monkeypatch: pytest.MonkeyPatch):
    running = juju4.act("server/0", "wait")
    monkeypatch.setattr(cli, "Store", lambda _name, **_options: juju4.store)
    done = click.testing.CliRunner().invoke(cli.cli, ["cancel-task", "2"])
    assert done.exit_code == 0
    assert done.stderr == "WARNING The following tasks could not be canceled:\ntask: 2, error: \n"
    (juju4.room / "go").write_text("")
    running.result(40)


def test_an_exec_waits_for_the_lock_on_juju_4_and_for_nothing_on_3_6(tmp_path: pathlib.Path):
    for version, is_to_wait in (("3.6", False), ("4", True)):
        store = Store(f"m{version[0]}", tmp_path, juju=version)
        store.directory.mkdir()
        with store.change(create=True) as model:
            model.units["server/0"] = rules.Unit(name="server/0", app="server", machine=0)
        held = store.try_lock("machine-0")
        assert held is not None
        with concurrent.futures.ThreadPoolExecutor() as pool:
            turn = pool.submit(lambda one=store: cli.take_turn(one, "server/0").__enter__())
            time.sleep(0.3)
            assert turn.done() != is_to_wait
            held.close()
            turn.result(20)


def test_the_first_deployment_chooses_the_version(tmp_path: pathlib.Path):
    (tmp_path / "one").mkdir()
    with Store("one", tmp_path, juju="4").change(create=True):
        pass
    assert Store("one", tmp_path).load().version is juju.VERSIONS["4"]
    with pytest.raises(
        SandboxError, match=r"^model 'one' is on Juju 4 since its first deployment: "
    ):
        Store("one", tmp_path, juju="3.6").load()
    assert Model(name="x").juju == "3.6"


def test_the_leader_stands_for_its_unit(bench: Bench):
    model = bench.store.load()
    assert model.unit("server/leader").name == "server/0"
    with pytest.raises(SandboxError, match="application 'none' not found"):
        model.unit("none/leader")
