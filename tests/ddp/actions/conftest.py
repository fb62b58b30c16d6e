"""A workspace in a temporary folder with doubles of Slurm and pip, and the program asked as the charm asks it."""

import os
import pathlib
import pwd
import shutil
import typing

import pytest
from cluster import Cluster
from harness import PAYLOAD, Trainer, add_dataset
from node_reports import NAMES, healthy
from pip_double import Pip

from batch_host import Node
from ddp import config
from ddp.base import Settings
from ddp.doctor.facts import Facts
from ddp.slurm import access, jobs
from ddp.submit import checks
from ddp.workspace import locks
from slurm_ddp import mounts

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
    """Return a folder with a small payload, and the placeholder of a wheelhouse."""
    folder = tmp_path / "charm"
    (folder / "payload" / "ddptrain").mkdir(parents=True)
    (folder / "payload" / "ddptrain" / "__init__.py").write_text("__version__ = '0'\n")
    for name in ("config", "errors", "files", "markers", "precheck", "shapes", "smoke_options"):
        shutil.copyfile(PAYLOAD / "ddptrain" / f"{name}.py", folder / "payload" / "ddptrain" / f"{name}.py")
    (folder / "payload" / "requirements.txt").write_text("numpy==2.0 --hash=sha256:0\n")
    for extra, locked in (("tracking", "mlflow-skinny==3.17"), ("tuning", "transformers==5.23")):
        (folder / "payload" / extra).mkdir()
        (folder / "payload" / extra / "requirements.txt").write_text(f"{locked} --hash=sha256:0\n")
    (folder / "wheelhouse").touch()
    return folder


@pytest.fixture
def settings(workspace: pathlib.Path, charm_dir: pathlib.Path) -> Settings:
    for name in ("runs", "datasets", "environments", "baselines"):
        (workspace / name).mkdir()
    about = pwd.getpwnam(USER)
    return Settings("trainer/0", workspace, USER, about.pw_uid, about.pw_gid, charm_dir / "payload", "auto", "")


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch, workspace: pathlib.Path, charm_dir: pathlib.Path) -> dict[str, typing.Any]:
    """A host with the workspace mounted; its probe's answer can be changed."""
    about: dict[str, typing.Any] = {"mount": str(workspace), "probe": mounts.Result(mounts.State.RIGHT)}

    def find(path: object) -> mounts.Mount | None:
        assert str(path) == str(workspace)
        where = about["mount"]
        return mounts.Mount(1, "0:50", str(where), "fuse.juicefs", "JuiceFS:shared", ()) if where else None

    monkeypatch.setattr(mounts, "find", find)
    monkeypatch.setattr(mounts, "probe", lambda *_, **__: about["probe"])
    monkeypatch.setattr(config, "payload", lambda: charm_dir / "payload")
    return about


@pytest.fixture
def trainer(
    workspace: pathlib.Path, charm_dir: pathlib.Path, cluster: Cluster, pip: Pip, host: dict[str, typing.Any]
) -> Trainer:
    for name in ("runs", "datasets", "environments", "baselines"):
        (workspace / name).mkdir(exist_ok=True)
    return Trainer(workspace, charm_dir, {"workspace": str(workspace)})


@pytest.fixture
def ready(trainer: Trainer) -> Trainer:
    """A trainer with its environment and the default dataset."""
    trainer.run("install-environment")
    add_dataset(trainer, "python-stdlib")
    return trainer


@pytest.fixture
def model(trainer: Trainer) -> pathlib.Path:
    """A model's folder and JSON lines in the workspace, and the option set."""
    trainer.config["transformers"] = True
    folder = trainer.workspace / "models" / "tiny"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (trainer.workspace / "chat.jsonl").write_text('{"text": "hello"}\n')
    (trainer.workspace / "chat").mkdir()
    (trainer.workspace / "chat" / "train.jsonl").write_text('{"text": "hello"}\n')
    (trainer.workspace / "empty").mkdir()
    return folder


@pytest.fixture
def facts(settings: object) -> Facts:
    nodes = tuple(jobs.Capacity(name, 2, 16000, 0, "IDLE", is_usable=True) for name in NAMES)
    return Facts(
        partition=jobs.Partition("slurmd", True, True, None, None, nodes),
        asked=NAMES,
        left_out={},
        reports={name: healthy(name) for name in NAMES},
        trouble="",
        config={
            "KillWait": "30 sec",
            "SLURM_VERSION": "24.11.5",
            "AccountingStorageType": "accounting_storage/slurmdbd",
        },
        manifests=(),
        login=("fuse.juicefs", "JuiceFS:shared"),
        accounting=access.Accounting(("physics",), (), is_required=False),
    )


@pytest.fixture
def node(tmp_path: pathlib.Path, settings: Settings) -> Node:
    return Node(tmp_path, settings.runs / "first")
