"""The engine: Juju's locks, retries and interrupted hooks, with the real agent and a small charm.

A host here is a folder: its agent runs as a process on this machine instead of in a container.
"""

import pathlib
import time

import pytest
from folder_hosts import Bench

from sandbox import model as rules
from sandbox import session, settings
from sandbox.engine import Engine, Progress
from sandbox.store import SandboxError, Store


def test_hosts_are_named_as_juju_names_machines(bench: Bench):
    assert bench.hosts.names() == ["juju-2586ad-0"]
    with bench.engine() as engine:
        with engine.change() as model:
            rules.add_unit(model, model.applications["server"])
        engine.settle()
        assert {unit.address for unit in engine.model.machine_units(1)} == {"10.0.0.3"}
        with engine.change() as model:
            rules.remove_unit(model, model.units["server/0"])
        engine.settle()
    assert bench.hosts.names() == ["juju-2586ad-1"]


def test_a_model_that_was_not_made_leaves_nothing(tmp_path: pathlib.Path):
    store = Store("none", tmp_path / "state")
    with (
        pytest.raises(SandboxError, match=r"^wrong$"),
        Engine(store, Progress(print), create=True) as engine,
        engine.change(),
    ):
        raise SandboxError("wrong")
    assert not store.directory.exists()


def test_hooks_of_other_units_run_beside_a_parallel_action(bench: Bench):
    waiting = bench.act("server/0", "wait")
    bench.config("agent", n="1")
    assert "agent/0 config_changed" in bench.hooks()
    assert not waiting.done()
    (bench.room / "go").write_text("")
    assert waiting.result(40)["results"] == {"done": "yes"}


def test_a_units_own_hooks_and_actions_wait_for_its_action_even_a_parallel_one(bench: Bench):
    waiting = bench.act("server/0", "wait")
    bench.config("server", n="1")
    assert bench.hooks() == [], "the command ends, the hook waits for the action of the other one"
    assert any(
        "config-changed waits for the unit: server/0 runs action wait" in line
        for line in bench.lines
    )
    second = bench.begin(lambda engine: engine.act("server/0", "wait", {}))
    time.sleep(0.5)
    assert not second.done()
    (bench.room / "go").write_text("")
    assert waiting.result(40)["results"] == second.result(40)["results"] == {"done": "yes"}
    assert bench.hooks() == ["server/0 config_changed"]


def test_a_plain_action_holds_the_machine(bench: Bench):
    holding = bench.act("server/0", "hold")
    bench.config("agent", n="1")
    assert bench.hooks() == []
    wanted = "config-changed waits for the machine lock of machine 0: server/0 runs action hold"
    assert any(wanted in line and "agent/0" in line for line in bench.lines)
    (bench.room / "go").write_text("")
    holding.result(40)
    with bench.engine() as engine:
        engine.settle()
    assert "agent/0 config_changed" in bench.hooks()


def test_two_commands_share_the_work_and_each_ends_when_all_is_done(bench: Bench):
    commands = [
        bench.begin(lambda engine, n=n: bench.configure(engine, "server", n=str(n)))
        for n in range(3)
    ]
    for command in commands:
        command.result(40)
    assert {line for line in bench.hooks() if "config_changed" in line} == {
        "server/0 config_changed"
    }
    assert all(unit.agent.name == "idle" for unit in bench.store.load().units.values())


def test_a_unit_in_error_gets_its_hook_again_and_nothing_else(bench: Bench):
    fault = bench.room / "fail-server-0-config_changed"
    fault.write_text("")
    with bench.engine() as engine:
        with engine.change() as model:
            settings.set_options(model, model.applications["server"], {"n": "1"})
            rules.enqueue(model, model.units["server/0"], "update-status")
        engine.settle()
        (error,) = engine.errors()
    assert (
        error
        == 'server/0: hook failed: "config-changed": RuntimeError: as asked (each command tries it again)'
    )
    tries = [line for line in bench.hooks() if line.startswith("server")]
    assert tries == ["server/0 config_changed"] * 4, "the first time and three times again"
    pauses = [line.rpartition("again in ")[2] for line in bench.lines if "again in" in line]
    assert pauses == ["0 s"] * 3
    (bench.room / "go").write_text("")
    with bench.engine() as engine:
        assert engine.act("server/0", "hold", {})["results"] == {"done": "yes"}, (
            "actions run on a unit in error"
        )
        assert engine.model.units["server/0"].agent.name == "error"
    fault.unlink()
    with bench.engine() as engine:
        engine.settle()
        assert engine.errors() == []
    assert bench.hooks()[-1] == "server/0 update_status"


def test_a_hook_killed_by_a_reboot_runs_again_from_its_start_and_then_start(bench: Bench):
    slow = bench.begin(lambda engine: bench.configure(engine, "server", slow="true"))
    bench.wait("began")
    with bench.engine() as engine:
        engine.reboot("server/0")
        (bench.room / "go").write_text("")
        engine.settle()
    slow.result(40)
    hooks = [line for line in bench.hooks() if line.startswith("server") and "update" not in line]
    assert hooks[:3] == ["server/0 config_changed", "server/0 config_changed", "server/0 start"]
    assert "agent/0 start" in bench.hooks()
    assert [unit.failed for unit in bench.store.load().units.values()] == [None, None]


def test_the_action_of_a_command_that_was_killed_is_dropped_and_its_hook_runs_again(bench: Bench):
    with bench.engine() as engine, engine.change() as model:
        unit = model.units["server/0"]
        settings.request_action(model, unit, "hold", {})  # its lock is free
        rules.enqueue(model, model.units["agent/0"], "config-changed")
        model.units["agent/0"].agent.name = "executing"
    with bench.engine() as engine:
        engine.settle()
        assert [event.label for unit in engine.model.units.values() for event in unit.events] == []
    assert "agent/0 config_changed" in bench.hooks()
    log = bench.store.log_path.read_text()
    assert "server/0 WARNING action hold was interrupted: no command waits for it" in log
    assert "agent/0 WARNING config-changed was interrupted: it runs again" in log


def test_a_model_that_a_command_works_on_is_not_destroyed(bench: Bench):
    waiting = bench.act("server/0", "wait")
    with pytest.raises(
        SandboxError, match=r"^another sandboxctl uses model 't'; wait for it, or end it$"
    ):
        session.remove(bench.store, Progress(print))
    (bench.room / "go").write_text("")
    assert waiting.result(40)["results"] == {"done": "yes"}
    lock = bench.store.try_lock("session")
    assert lock is not None, "nobody works on it any more"
    lock.close()
