"""What the Scenario tests of shared-filesystem-client share."""

import pathlib

import pytest
from fake_mounter import FakeMounter, Site, context
from ops import testing

import juicefs_mount
import mounter
from slurm_ddp import juicefs


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> Site:
    """Return the charm with its real metadata, on a machine whose mounts are pretended."""
    double = FakeMounter()
    for name in ("ensure", "probe", "pending", "reason", "remove"):
        monkeypatch.setattr(mounter, name, getattr(double, name))
    monkeypatch.setattr(juicefs_mount, "check_fuse", double.check_fuse)
    monkeypatch.setattr(juicefs, "ensure_program", double.ensure_program)
    monkeypatch.setattr(juicefs, "version", lambda program: (1, 3, 1))
    program = tmp_path / "juicefs"
    program.write_bytes(b"a program")
    return Site(context(), double, testing.Resource(name="juicefs", path=program))
