"""Fixtures for the Scenario tests of juicefs-server-proxy."""

import pathlib

import pytest
import yaml
from doubles import FakeJuicefs, FakeServers
from ops import testing
from rig import Rig

import embedded.store
import embedded.takeover
from charm import JuicefsServerProxyCharm
from slurm_ddp import juicefs
from volume import format_journal, target, trial

CHARM_ROOT = pathlib.Path(__file__).resolve().parents[3] / "charms" / "juicefs-server-proxy"


class Context(testing.Context[JuicefsServerProxyCharm]):
    """Scenario's context with the storage in the test's folder, to outlive an application."""

    folder: pathlib.Path

    def _get_storage_root(self, name: str, index: int) -> pathlib.Path:
        location = self.folder / name  # one storage, for any number that Scenario gives it
        location.mkdir(parents=True, exist_ok=True)
        return location


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> Rig:
    """Return the charm with its real metadata, on doubles of juicefs and of the servers."""
    world, servers = FakeJuicefs(), FakeServers()
    for name in ("ensure_program", "inspect", "invoke"):
        monkeypatch.setattr(juicefs, name, getattr(world, name))
    names = "ensure ensure_none is_running is_enabled start_metadata connected stop remove usage"
    for name in names.split():
        monkeypatch.setattr(embedded.store, name, getattr(servers, name))
    monkeypatch.setattr(juicefs, "version", lambda program: (1, 3, 1))
    world.serving = lambda: servers.running
    monkeypatch.setattr(embedded.takeover, "run", world.redis)
    monkeypatch.setattr(trial, "check", world.mount_for_trial)
    monkeypatch.setattr(embedded.store, "is_durable", lambda directory: True)
    monkeypatch.setattr(target, "PROGRAM_DIR", tmp_path / "lib")
    monkeypatch.setattr(target, "CONFIG_DIR", tmp_path / "etc")
    monkeypatch.setattr(format_journal, "STATE_DIR", tmp_path / "state")
    meta = yaml.safe_load((CHARM_ROOT / "charmcraft.yaml").read_text())
    program = tmp_path / "juicefs"
    program.write_bytes(b"a program")
    ctx = Context(JuicefsServerProxyCharm, meta=meta, juju_version="3.6.8")
    ctx.folder = tmp_path / "storage"
    return Rig(ctx, world, servers, testing.Resource(name="juicefs", path=program))
