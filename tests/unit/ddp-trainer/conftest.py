"""What the trainer's tests stand on: a workspace in a temporary folder, a double of Slurm, and a double of pip."""

import json
import os
import pathlib
import pwd
import shutil
import stat
import sys
import typing

import pytest

sys.path.append(str(pathlib.Path(__file__).parents[2] / "ddp"))  # the doubles
from cluster import Cluster
from harness import Trainer, add_dataset
from pip_double import ZSTD, Pip

import host as host_module
import program
from batch_host import Node
from ddp import config, service
from ddp.base import Log, Settings
from ddp.environment import uv
from ddp.run import control
from ddp.slurm import access, jobs
from ddp.submit import checks
from ddp.workspace import locks
from slurm_ddp import mounts, run
from slurm_ddp.run import CommandError
from slurm_ddp.slurm import nodes

Json = dict[str, typing.Any]
PAYLOAD = pathlib.Path(__file__).parents[3] / "payload"
USER = pwd.getpwuid(os.geteuid()).pw_name


@pytest.fixture(autouse=True)
def claims(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    """Let actions claim names in a folder of the test's."""
    monkeypatch.setattr(locks, "FOLDER", tmp_path / "private" / "locks")
    monkeypatch.setattr(checks, "_listing", None)
    monkeypatch.setattr(locks, "POLL_S", 0.01)


@pytest.fixture
def workspace(tmp_path: pathlib.Path) -> pathlib.Path:
    folder = tmp_path / "shared"
    folder.mkdir()
    return folder


@pytest.fixture
def charm_dir(tmp_path: pathlib.Path) -> pathlib.Path:
    folder = tmp_path / "charm"
    (folder / "payload" / "ddptrain").mkdir(parents=True)
    (folder / "payload" / "ddptrain" / "__init__.py").write_text("__version__ = '0'\n")
    for name in ("config", "errors", "files", "markers", "precheck", "shapes", "smoke_options"):
        shutil.copyfile(PAYLOAD / "ddptrain" / f"{name}.py", folder / "payload" / "ddptrain" / f"{name}.py")
    (folder / "payload" / "requirements.txt").write_text("numpy==2.0 --hash=sha256:0\n")
    for extra, locked in (("tracking", "mlflow-skinny==3.17"), ("tuning", "transformers==5.23")):
        (folder / "payload" / extra).mkdir()
        (folder / "payload" / extra / "requirements.txt").write_text(f"{locked} --hash=sha256:0\n")
    return folder


@pytest.fixture
def settings(workspace: pathlib.Path, charm_dir: pathlib.Path) -> Settings:
    for name in ("runs", "datasets", "environments", "baselines"):
        (workspace / name).mkdir()
    about = pwd.getpwnam(USER)
    return Settings("trainer/0", workspace, USER, about.pw_uid, about.pw_gid, charm_dir / "payload", "auto", "")


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    double = Cluster(USER)
    monkeypatch.setattr(jobs, "run", double.run)
    monkeypatch.setattr(nodes, "run", double.run)
    monkeypatch.setattr(access, "run", double.run)
    monkeypatch.setattr(jobs, "is_installed", lambda: True)
    monkeypatch.setattr(control, "pause", lambda _: None)
    return double


@pytest.fixture
def nearby(monkeypatch: pytest.MonkeyPatch, charm_dir: pathlib.Path) -> None:
    """Do in this process what the charm has the program do as the submit user; test_program starts it."""

    def ask(user: str, request: Json, log: Log, *, timeout_s: float | None = None) -> program.Answer:
        assert user == USER
        reply = json.loads(json.dumps(service.answer(json.loads(json.dumps(request)), log)))
        return program.Answer(reply["results"], reply.get("error", ""))

    monkeypatch.setattr(program, "ask", ask)
    monkeypatch.setattr(program, "install", lambda _: False)
    monkeypatch.setattr(program, "configure", lambda _: None)
    monkeypatch.setattr(program, "remove", lambda: None)
    monkeypatch.setattr(config, "payload", lambda: charm_dir / "payload")


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> Pip:
    """Replace what makes an environment; the archive is stored for real, uncompressed."""
    double = Pip()
    monkeypatch.setattr(uv, "run", double.run)
    monkeypatch.setattr(host_module, "WHEELHOUSE", tmp_path / "attached" / "wheelhouse")
    monkeypatch.setattr(Settings, "node_cache", property(lambda _: tmp_path / "cache"))
    commands = tmp_path / "bin"
    commands.mkdir()
    (commands / "zstd").write_text(ZSTD)
    (commands / "zstd").chmod(stat.S_IRWXU)
    monkeypatch.setattr(run, "PATH", f"{commands}:{run.PATH}")
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
    return double


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch, workspace: pathlib.Path, nearby: None) -> dict[str, object]:
    """A host with the packages installed and the workspace mounted."""
    about: dict[str, typing.Any] = {
        "installed": [],
        "packages": {"python3-venv", "zstd"},
        "mount": str(workspace),
        "probe": mounts.Result(mounts.State.RIGHT),
    }

    def find(path: object) -> mounts.Mount | None:
        assert str(path) == str(workspace)
        where = about["mount"]
        return mounts.Mount(1, "0:50", str(where), "fuse.juicefs", "JuiceFS:shared", ()) if where else None

    def ensure_packages(names: tuple[str, ...]) -> bool:
        failure = about.get("apt")
        if isinstance(failure, CommandError):
            raise failure
        about["installed"] = names
        return False

    monkeypatch.setattr(host_module, "account", pwd.getpwnam)  # the tests' own account may be root's
    monkeypatch.setattr(host_module.apt, "ensure_packages", ensure_packages)
    monkeypatch.setattr(host_module.apt, "installed", lambda *names: {n: "1" for n in names if n in about["packages"]})
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
    (charm_dir / "wheelhouse").touch()  # as a placeholder is
    return Trainer(workspace, charm_dir, {"workspace": str(workspace), "submit-user": USER})


@pytest.fixture
def ready(trainer: Trainer) -> Trainer:
    """A trainer with its environment and the default dataset."""
    trainer.run("install-environment")
    add_dataset(trainer, "python-stdlib")
    return trainer


@pytest.fixture
def node(tmp_path: pathlib.Path, settings: Settings) -> Node:
    return Node(tmp_path, settings.runs / "first")
