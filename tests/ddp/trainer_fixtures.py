"""Fixtures for tests that call the program as the charm does, with and without the charm."""

import hashlib
import os
import pathlib
import pwd
import shutil
import typing

import pytest
from cluster import Cluster, no_pause
from left_by_jobs import add_dataset
from pip_double import ZSTD, Pip

from batch_host import Node
from ddp.environment import uv
from ddp.host import locks, waits
from ddp.settings import Settings
from ddp.slurm import jobs
from ddp.workspace.folders import Workspace
from slurm_ddp import commands
from slurm_ddp.slurm import nodes

PAYLOAD = pathlib.Path(__file__).parents[2] / "payload"
USER = pwd.getpwuid(os.geteuid()).pw_name


@pytest.fixture(autouse=True)
def claims(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    """Let actions claim names in a folder of the test's."""
    monkeypatch.setattr(locks, "CACHE", tmp_path / "private")
    monkeypatch.setattr("ddp.slurm.cluster._listing", None)
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
    small_payload(folder / "payload")
    (folder / "wheelhouse").touch()
    return folder


def small_payload(folder: pathlib.Path) -> pathlib.Path:
    """Make a payload of what looks at arguments, and one locked package for each of its folders."""
    package = folder / "ddptrain"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("__version__ = '0'\n")
    for room in ("ground", "options", "model_folder"):
        shutil.copytree(
            PAYLOAD / "ddptrain" / room,
            package / room,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
    shutil.copyfile(PAYLOAD / "ddptrain" / "shapes.py", package / "shapes.py")
    for below, locked in (
        ("", "numpy==2.0"),
        ("tracking", "mlflow-skinny==3.17"),
        ("tuning", "transformers==5.23"),
    ):
        (folder / below).mkdir(exist_ok=True)
        (folder / below / "requirements.txt").write_text(f"{locked} --hash=sha256:0\n")
    return folder


@pytest.fixture
def settings(workspace: pathlib.Path, charm_dir: pathlib.Path) -> Settings:
    for name in ("runs", "datasets", "environments", "baselines"):
        (workspace / name).mkdir()
    about = pwd.getpwnam(USER)
    own = Workspace(workspace, USER, about.pw_uid, unit="trainer/0")
    payload = charm_dir / "payload"
    return Settings(own, about.pw_gid, payload, "auto", "", wait=waits.Wait(no_pause))


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """Replace Slurm's commands by the double."""
    double = Cluster(USER)
    for module in (jobs, nodes):
        monkeypatch.setattr(module, "run", double.run)
    monkeypatch.setattr(jobs, "is_installed", lambda: True)
    return double


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> Pip:
    """Replace what makes an environment; the archive is stored for real, uncompressed."""
    double = Pip(tmp_path / "cache")
    monkeypatch.setattr(uv, "run", double.run)
    monkeypatch.setattr(Workspace, "node_cache", property(lambda _: double.cache))
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "zstd").write_text(ZSTD)
    (folder / "zstd").chmod(0o700)
    monkeypatch.setattr(commands, "PATH", f"{folder}:{commands.PATH}")
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return double


@pytest.fixture(scope="session")
def installations(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Return a folder of shared environments; the first test that needs one makes it."""
    return tmp_path_factory.mktemp("installations")


@pytest.fixture
def ready(trainer: typing.Any, pip: Pip, installations: pathlib.Path) -> typing.Any:
    """A trainer with its environment and the default dataset."""
    options = {name: value for name, value in trainer.config.items() if name != "workspace"}
    made = installations / hashlib.sha256(repr(sorted(options.items())).encode()).hexdigest()
    places = {"environments": trainer.workspace / "environments", "cache": pip.cache}
    if made.exists():
        for name, place in places.items():
            shutil.copytree(made / name, place, symlinks=True, dirs_exist_ok=True)
        pip.restore(made / "pip.json")
    else:
        trainer.run("install-environment")
        for name, place in places.items():
            shutil.copytree(place, made / name, symlinks=True)
        pip.save(made / "pip.json")
    add_dataset(trainer.workspace, "python-stdlib")
    return trainer


@pytest.fixture
def node(tmp_path: pathlib.Path, settings: Settings) -> Node:
    return Node(tmp_path, settings.workspace.runs / "first")
