"""Fixtures for the Scenario tests of shared-filesystem-client."""

import pathlib

import pytest
from fake_mounter import FakeMounter, Site, context
from ops import testing

import mount_plan
from kinds import fuse, kernel, lustre
from mount import mounter, states, watching
from slurm_ddp import juicefs, mounts, readiness


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> Site:
    """Return the charm with its real metadata, on a machine whose mounts are pretended."""
    double = FakeMounter()
    for module, names in {
        mounter: ("ensure", "remount", "probe", "pending", "reason", "remove"),
        watching: ("health", "proven", "wake_once_right"),
        states: ("metrics_port", "load_all"),
        mounts: ("at",),
    }.items():
        for name in names:
            monkeypatch.setattr(module, name, getattr(double, name))
    monkeypatch.setattr(mount_plan, "STATE", tmp_path / "state")
    monkeypatch.setattr(fuse, "check", double.check_fuse)
    monkeypatch.setattr(kernel, "check", lambda kind: None)
    monkeypatch.setattr(lustre, "remove", lambda: None)
    monkeypatch.setattr(juicefs, "ensure_program", double.ensure_program)
    monkeypatch.setattr(juicefs, "version", lambda program: (1, 3, 1))
    monkeypatch.setattr(juicefs, "check_reachable", lambda addresses: None)
    monkeypatch.setattr(juicefs, "ensure_sticky", double.ensure_sticky)
    monkeypatch.setattr(readiness, "DIRECTORY", tmp_path / "needs")
    program = tmp_path / "juicefs"
    program.write_bytes(b"a program")
    return Site(context(), double, testing.Resource(name="juicefs", path=program))
