"""A deployment is done when every unit is active, as an operator sees it, and abandoned ones make room."""

import pathlib

import pytest
from folder_hosts import Bench

from sandbox import bundle as bundles
from sandbox import session as sessions
from sandbox.engine import Progress
from sandbox.hosts import Hosts
from sandbox.store import Model, SandboxError, Store


@pytest.fixture
def bundle(bench: Bench, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> bundles.Bundle:
    """A bundle of the bench's charms that changes an option, so that hooks run."""
    monkeypatch.setattr(sessions, "_DEPLOY_PAUSES_S", (0.05,) * 3)
    charms = bench.store.directory / "charms"
    path = tmp_path / "bundle.yaml"
    path.write_text(f"applications:\n  server: {{charm: {charms}/server-0, num_units: 1, options: {{n: 1}}}}\n")
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
    assert any("server/0" in line and "is not settled: update-status" in line for line in bench.lines)


def test_deploy_fails_and_names_the_unit_that_never_becomes_active(bench: Bench, bundle: bundles.Bundle):
    (bench.room / "waits-server-0").write_text("blocked")
    with pytest.raises(SandboxError, match=r"^not active: server/0 \(blocked\); ./sandboxctl status shows why$"):
        deploy(bench, bundle)
    assert bench.hooks().count("server/0 update_status") >= 3


def test_deploy_once_sends_no_update_status_and_does_not_judge(bench: Bench, bundle: bundles.Bundle):
    (bench.room / "waits-server-0").write_text("waiting")
    assert deploy(bench, bundle, once=True).units["server/0"].status.name == "waiting"
    assert "server/0 update_status" not in bench.hooks()


def test_the_demo_removes_what_a_deleted_clone_left_and_nothing_else(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    agent, root = tmp_path / "agent.py", tmp_path / "models"
    host = root / "t" / "hosts" / "one"
    host.mkdir(parents=True)
    agent.touch()
    (host / "host.json").write_text(f'{{"machine": "m", "binds": {{"/var/lib/agent.py": "{agent}"}}}}')
    store, lines = Store("t", root), list[str]()
    store.save(Model(name="t"))
    monkeypatch.setattr(sessions, "Hosts", lambda name: Hosts(name, root))
    sessions.remove_abandoned(store, Progress(lines.append))
    assert store.path.exists()
    assert lines == []
    agent.unlink()
    sessions.remove_abandoned(store, Progress(lines.append))
    assert not store.path.exists()
    assert not host.exists()
    assert f"model t is left of a clone that was deleted ({agent}): it is removed" in lines[0]
