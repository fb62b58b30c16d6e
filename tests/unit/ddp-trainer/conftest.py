"""Fixtures of the trainer's tests: a temporary workspace, and doubles of Slurm and of pip."""

import json
import pathlib
import pwd
import sys
import typing

import pytest

sys.path.append(str(pathlib.Path(__file__).parents[2] / "ddp"))  # the doubles
from cluster import Cluster, no_pause
from harness import Trainer
from pip_double import Pip
from trainer_fixtures import (
    USER,
    charm_dir,
    claims,
    cluster,
    installations,
    node,
    pip,
    ready,
    settings,
    workspace,
)

import host as host_module
import idle_check
import program
from ddp import service
from ddp.host import waits
from ddp.options import config
from ddp.results.progress import Log
from machine import Machine
from slurm_ddp import mounts, watchdog
from slurm_ddp.commands import CommandError

Json = dict[str, typing.Any]
__all__ = [
    "charm_dir",
    "claims",
    "cluster",
    "installations",
    "node",
    "pip",
    "ready",
    "settings",
    "workspace",
]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> Machine:
    """The host's systemd."""
    double = Machine()
    double.take_over(monkeypatch, (watchdog,), tmp_path / "systemd")
    monkeypatch.setattr(idle_check, "STATE", tmp_path / "idle-check")
    return double


@pytest.fixture
def nearby(monkeypatch: pytest.MonkeyPatch, charm_dir: pathlib.Path, machine: Machine) -> None:
    """Run the submit user's program in this process; test_program starts the real one."""

    def ask(
        user: str, request: Json, log: Log, *, timeout_s: float | None = None
    ) -> program.Answer:
        is_operators = request["do"] in ("add-user", "sync-users")
        assert user == ("root" if is_operators else USER)
        asked = json.loads(json.dumps(request))
        answer = service.answer(asked, log, waits.Wait(no_pause))
        reply = json.loads(json.dumps(answer))
        return program.Answer(reply["results"], reply.get("error", ""))

    monkeypatch.setattr(program, "ask", ask)
    monkeypatch.setattr(program, "install", lambda _: False)
    monkeypatch.setattr(program, "CONFIG", charm_dir / "slurm-ddp.toml")
    monkeypatch.setattr(program, "remove", lambda: None)
    monkeypatch.setattr(config, "payload", lambda: charm_dir / "payload")


@pytest.fixture
def host(
    monkeypatch: pytest.MonkeyPatch, workspace: pathlib.Path, tmp_path: pathlib.Path, nearby: None
) -> dict[str, object]:
    """A host with the packages installed and the workspace mounted."""
    about: dict[str, typing.Any] = {
        "installed": [],
        "mount": str(workspace),
        "probe": mounts.Result(mounts.State.RIGHT),
    }

    def find(path: object) -> mounts.Mount | None:
        assert str(path) == str(workspace)
        where = about["mount"]
        return (
            mounts.Mount(1, "0:50", str(where), "fuse.juicefs", "JuiceFS:shared", ())
            if where
            else None
        )

    def ensure_packages(names: tuple[str, ...]) -> None:
        failure = about.get("apt")
        if isinstance(failure, CommandError):
            raise failure
        about["installed"] = names

    monkeypatch.setattr(host_module, "WHEELHOUSE", tmp_path / "attached" / "wheelhouse")
    monkeypatch.setattr(
        host_module, "account", pwd.getpwnam
    )  # the tests' own account may be root's
    monkeypatch.setattr(host_module.apt, "ensure_packages", ensure_packages)
    monkeypatch.setattr(host_module.mounts, "find", find)
    monkeypatch.setattr(host_module.mounts, "probe", lambda *_, **__: about["probe"])
    return about


@pytest.fixture
def trainer(
    workspace: pathlib.Path,
    charm_dir: pathlib.Path,
    cluster: Cluster,
    pip: Pip,
    host: dict[str, object],
) -> Trainer:
    return Trainer(workspace, charm_dir, {"workspace": str(workspace), "submit-user": USER})
