"""Fixtures for the program's tests."""

import collections.abc
import os
import pathlib
import pwd
import shutil
import sys

import pytest

from ddp.host import locks, waits
from ddp.settings import Settings
from ddp.slurm import jobs
from ddp.workspace.folders import Workspace
from slurm_ddp.slurm import nodes

sys.path += [
    str(pathlib.Path(__file__).parent),  # the doubles, for the folders below
    str(
        pathlib.Path(__file__).parents[2] / "charms" / "ddp-trainer" / "src"
    ),  # installs the program
]
from cluster import no_pause
from slurm_commands import Commands
from trainer_fixtures import cluster, pip, small_payload

__all__ = ["cluster", "pip"]
RECORDED = pathlib.Path(__file__).parent / "data" / "gpt-20261123"


@pytest.fixture
def recorded(tmp_path: pathlib.Path) -> pathlib.Path:
    """A run that the payload left, of two ranks: job 7 failed, job 8 trained 60 steps."""
    folder = tmp_path / RECORDED.name
    shutil.copytree(RECORDED, folder)
    times = {
        "logs/7.r0": 1795453270,
        "control/7.r0.outcome": 1795453281,
        "logs/8.r0": 1795453290,
        "control/8.r0.outcome": 1795453309,
    }
    for name, seconds in times.items():
        if name.startswith("logs/"):
            (folder / name).mkdir()
        os.utime(folder / name, (seconds, seconds))
    return folder


@pytest.fixture
def make_run(tmp_path: pathlib.Path) -> collections.abc.Callable[..., pathlib.Path]:
    """Return a function that makes a run's folder with these files, by their names."""

    def make(name: str = "run", **texts: str | bytes) -> pathlib.Path:
        folder = tmp_path / name
        for sub in ("logs", "control"):
            (folder / sub).mkdir(parents=True, exist_ok=True)
        for path, text in texts.items():
            (folder / path).write_bytes(text.encode() if isinstance(text, str) else text)
        return folder

    return make


@pytest.fixture
def workspace(tmp_path: pathlib.Path) -> pathlib.Path:
    """Return the folder on the shared filesystem."""
    folder = tmp_path / "shared"
    for name in ("runs", "datasets", "environments", "baselines"):
        (folder / name).mkdir(parents=True)
    (folder / ".secrets").mkdir(mode=0o700)
    return folder


@pytest.fixture
def settings(
    workspace: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> Settings:
    """Return a user's settings, with a small payload and claims in the test's folder."""
    payload = small_payload(tmp_path / "payload")
    monkeypatch.setattr(locks, "CACHE", tmp_path / "private")
    monkeypatch.setattr("ddp.slurm.cluster._listing", None)
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)  # the lane's own
    about = pwd.getpwuid(os.geteuid())
    own = Workspace(workspace, about.pw_name, about.pw_uid)
    wait = waits.Wait(no_pause)
    return Settings(own, about.pw_gid, payload, "auto", "", takes_any_script=True, wait=wait)


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> collections.abc.Iterator[Commands]:
    """Answer Slurm's commands with the expected texts; fail the test if one is never requested."""
    double = Commands()
    for module in (jobs, nodes):
        monkeypatch.setattr(module, "run", double)
    yield double
    assert not double.expected, f"never asked: {double.expected}"
