"""The programs that another Python runs, on a node or here: files of the package, really run."""

import json
import pathlib
import subprocess
import sys
import typing

import pytest
from cluster import Cluster, Machine

import ddp
from ddp.doctor import examine
from ddp.environment import builder
from ddp.options import fields, models
from ddp.problem import ParameterError
from ddp.settings import Settings
from ddp.slurm import partition_list
from ddp.submit import payload_arguments
from ddp.workspace import folders
from ddp.workspace.folders import Workspace
from slurm_ddp import mounts
from slurm_ddp.commands import Completed

PACKAGE = pathlib.Path(ddp.__file__).parent
TORCH = """\
import types
__version__ = "2.13.0+cpu"
version = types.SimpleNamespace(cuda=None)
cuda = types.SimpleNamespace(is_available=lambda: False)
"""


class Node(Cluster):
    """A cluster of this machine as its one node: runs srun's commands in a clean state."""

    def __init__(self, user: str) -> None:
        super().__init__(user)
        self.machines = [Machine("n1", gres="gpu:a100:1")]
        self.env = {"PATH": "/usr/bin:/bin", "SLURMD_NODENAME": "n1"}

    def _srun(self, arguments: tuple[str, ...], stdin: str | None) -> Completed:
        argv = arguments[arguments.index("/usr/bin/python3") :]
        assert stdin is not None
        done = subprocess.run(
            argv, input=stdin, capture_output=True, text=True, check=False, cwd="/", env=self.env
        )
        return Completed(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def node(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Node:
    """Make the double start what srun and a script without a file ask for."""
    there = Node(cluster.user)
    for name in ("machines", "_srun"):
        monkeypatch.setattr(cluster, name, getattr(there, name))
    return there


def test_a_node_is_examined(
    settings: Settings, node: Node, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
):
    monkeypatch.setattr(Workspace, "node_cache", property(lambda _: tmp_path / "cache"))
    monkeypatch.setattr(mounts, "find", lambda _: None)
    facts = examine.gather(
        settings, fields.parse(models.Doctor, {}), partition_list.partitions(), lambda _: None
    )
    assert facts.trouble == ""
    about = facts.reports["n1"]
    assert about["versions"]["python"].startswith("3.")
    assert about["filesystem"]["write_mb_s"] > 0, "the workspace's folder for it was there"
    assert node.env["SLURMD_NODENAME"] == about["node"]


@pytest.fixture
def build(tmp_path: pathlib.Path) -> pathlib.Path:
    """Make a folder with an environment that has a torch which imports nothing."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "env"], check=True)
    (site,) = (tmp_path / "env").glob("lib/python3.*/site-packages")
    (site / "torch" / "distributed").mkdir(parents=True)
    files = {
        "torch/__init__.py": TORCH,
        "torch/distributed/__init__.py": "",
        "torch/distributed/run.py": "",
        "numpy.py": "__version__ = '2.3.1'",
        "ddptrain.py": "",
    }
    for name, text in files.items():
        (site / name).write_text(text)
    return tmp_path


def test_an_environment_on_a_node_gets_the_same_program(build: pathlib.Path):
    with builder.IMPORTS.open() as program:
        done = subprocess.run(
            [build / "env" / "bin" / "python", "-"],
            stdin=program,
            capture_output=True,
            text=True,
            check=True,
            cwd="/",
        )
    printed: dict[str, typing.Any] = json.loads(done.stdout)
    assert printed == {"torch": "2.13.0+cpu"}


def test_the_version_of_the_nodes_python_is_that_of_the_interpreter():
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    done = subprocess.run([folders.PYTHON, "-c", code], capture_output=True, text=True, check=True)
    assert builder.python_version() == done.stdout.strip()


def test_the_payload_looks_at_arguments(
    settings: Settings, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    """In a separate process, which imports no module from the current folder."""
    (tmp_path / "json.py").write_text("raise SystemExit('taken from here')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert payload_arguments.check(settings.payload, "smoke", "/night", ["--epochs", "1"], ())
    with pytest.raises(ParameterError, match=r"^args: --classes 1: must be at least 2"):
        payload_arguments.check(settings.payload, "smoke", "/night", ["--classes", "1"], ())
