"""A deployment is done when every unit is active, as an operator sees it, and abandoned ones make room."""

import functools
import pathlib
import unittest.mock

import click.testing
import pytest
from folder_hosts import Bench

from sandbox import bundle as bundles
from sandbox import cli
from sandbox import session as sessions
from sandbox.hosts import Hosts
from sandbox.store import Model, SandboxError, Status, Store


@pytest.fixture
def bundle(bench: Bench, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> bundles.Bundle:
    """A bundle of the bench's charms that changes an option, so that hooks run."""
    monkeypatch.setattr(sessions, "_DEPLOY_PAUSES_S", (0.05,) * 3)
    charms = bench.store.directory / "charms"
    path = tmp_path / "bundle.yaml"
    path.write_text(
        f"applications:\n  server: {{charm: {charms}/server-0, num_units: 1, options: {{n: 1}}}}\n"
    )
    return bundles.load(path)


def deploy(bench: Bench, bundle: bundles.Bundle, *, once: bool = False) -> Model:
    with bench.engine() as engine:
        sessions.deploy(engine, bundle, once=once)
        return engine.model


@pytest.mark.parametrize("status", ["waiting", "blocked"])
def test_deploy_waits_for_a_unit_that_only_update_status_makes_active(
    bench: Bench, bundle: bundles.Bundle, status: str
):
    (bench.room / "waits-server-0").write_text(status)
    (bench.room / "time-heals").touch()
    assert deploy(bench, bundle).units["server/0"].status.name == "active"
    assert bench.hooks()[-1] == "server/0 update_status"
    assert any(
        "server/0" in line and "has not settled: sending update-status" in line
        for line in bench.lines
    )


@pytest.mark.parametrize(
    ("marks", "tries", "line"),
    [
        (["waits-server-0"], 3, r"not active: server/0 \(blocked\); ./sandboxctl status shows why"),
        (
            ["fail-server-0-config_changed"],
            0,
            r'server/0: hook failed: "config-changed": .*; also not active: agent/0 \(blocked\)',
        ),
        (
            ["fail-agent-0-update_status", "waits-server-0"],
            1,
            r"agent/0: .*; also not active: server/0 \(blocked\)",
        ),
    ],
)
def test_deploy_fails_and_names_all_units_that_never_become_active(
    bench: Bench, bundle: bundles.Bundle, marks: list[str], tries: int, line: str
):
    for mark in marks:
        (bench.room / mark).write_text("blocked")
    with bench.engine() as engine, engine.change() as model:
        model.units["agent/0"].status = Status(name="blocked")  # until its next hook
    with pytest.raises(SandboxError, match=f"^{line}$"):
        deploy(bench, bundle)
    assert bench.hooks().count("server/0 update_status") >= tries


def test_deploy_once_sends_no_update_status_and_does_not_judge(
    bench: Bench, bundle: bundles.Bundle
):
    (bench.room / "waits-server-0").write_text("waiting")
    assert deploy(bench, bundle, once=True).units["server/0"].status.name == "waiting"
    assert "server/0 update_status" not in bench.hooks()


@pytest.mark.parametrize(
    ("verb", "removes"),
    [
        ("demo", True),
        (f"deploy {sessions.deployment.REPOSITORY}/bundle.yaml", True),
        ("reboot x/0", False),
    ],
)
def test_what_a_deleted_clone_left_makes_room_for_a_deployment(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, verb: str, removes: bool
):
    agent, root = tmp_path / "agent.py", tmp_path / "models"
    host = root / "t" / "hosts" / "one"
    host.mkdir(parents=True)
    agent.touch()
    (host / "host.json").write_text(
        f'{{"machine": "m", "binds": {{"/var/lib/agent.py": "{agent}"}}}}'
    )
    store = Store("t", root)
    store.save(Model(name="t"))
    monkeypatch.setattr(sessions, "Hosts", lambda name: Hosts(name, root))
    monkeypatch.setattr(cli, "Store", lambda _name, **_options: store)
    monkeypatch.setattr(cli, "Engine", unittest.mock.Mock(side_effect=SandboxError("begins")))
    run = functools.partial(click.testing.CliRunner().invoke, cli.cli, verb.split())
    assert run().stderr == "ERROR begins\n"
    assert store.path.exists()
    agent.unlink()
    lines = run().stderr.splitlines()
    assert lines.pop() == "ERROR begins"
    assert (store.path.exists(), host.exists()) == (not removes, not removes)
    left = f"model t is left over from a deleted clone ({agent} is missing); removing it"
    assert any(line.endswith(left) for line in lines) == removes


def test_an_interrupted_change_leaves_the_model_as_it_was(tmp_path: pathlib.Path):
    kept = Store("default", tmp_path)
    kept.directory.mkdir()
    with kept.change(create=True) as model:
        model.next_machine = 1
    with pytest.raises(KeyboardInterrupt), kept.change() as model:
        model.next_machine = 2
        raise KeyboardInterrupt
    with kept.change() as model:
        assert model.next_machine == kept.load().next_machine == 1
