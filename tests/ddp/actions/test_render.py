"""`ddp render`: manifests and scripts refer to existing files, and programs get them as JSON."""

import dataclasses
import json
import pathlib
import typing

import pytest
import yaml
from cluster import Cluster
from command_line import typed

from ddp import cli
from ddp.settings import Settings

IMAGE = ("--container-image", "nvcr.io/nvidia/pytorch:25.01-py3", "--cpus-per-task", "2")


@pytest.fixture
def project(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, settings: Settings
) -> pathlib.Path:
    """Return the user's current folder, outside of the workspace."""
    workspace = dataclasses.replace(settings.workspace, uid=1000)
    user = dataclasses.replace(
        settings, workspace=workspace, gid=1000
    )  # a pod never runs as root, who may run the tests
    monkeypatch.setattr(cli, "settings_of", lambda _: user)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    folder = tmp_path / "project"
    (folder / "lib").mkdir(parents=True)
    (folder / "exp").mkdir()
    (folder / "lib" / "model.py").write_text("SIZE = 1\n")
    (folder / "exp" / "train.py").write_text("import sys\n")
    (folder / "data.bin").write_text("large\n")
    (folder / ".ddpignore").write_text("data.bin\n")
    monkeypatch.chdir(folder)
    return folder


def container(text: str) -> typing.Any:
    job = list(yaml.safe_load_all(text))[1]
    assert job["kind"] == "Job"
    return job["spec"]["template"]["spec"]["containers"][0]


def files(folder: pathlib.Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_the_code_of_the_manifests_is_in_the_workspace(settings: Settings, project: pathlib.Path):
    code, out, err = typed(
        "render", "--kubernetes", *IMAGE, "--run", "night", "exp/train.py", "--lr", "1"
    )
    assert code == 0
    assert err.startswith(f"copying 3 files, 0.0 MiB, of {project}\n")
    ranks = container(out)
    script = pathlib.Path(ranks["args"][0])
    assert script == settings.workspace.runs / "night" / "code" / "exp" / "train.py"
    assert script.read_text() == "import sys\n"
    assert (ranks["args"][1:], ranks["command"][-1]) == (
        ["--lr", "1"],
        str(settings.workspace.runs / "night" / "code"),
    )
    variables = {one["name"]: one.get("value") for one in ranks["env"]}
    assert (pathlib.Path(variables["PYTHONPATH"]) / "ddptrain" / "__init__.py").is_file()
    assert pathlib.Path(variables["RUN_DIR"]).is_dir()
    assert [path.name for path in settings.workspace.runs.iterdir()] == ["night"], (
        "nothing half-made stays"
    )
    (project / "exp" / "train.py").write_text("import os\n")
    assert script.read_text() == "import sys\n"
    assert (
        "choose another name"
        in typed("render", "--kubernetes", *IMAGE, "--run", "night", "exp/train.py")[2]
    )
    assert script.read_text() == "import sys\n", "what may run already is not touched"


def test_without_a_snapshot_the_script_lies_in_the_workspace(
    settings: Settings, project: pathlib.Path
):
    words = ("render", "--kubernetes", *IMAGE, "--no-snapshot", "--run", "night")
    code, _, err = typed(*words, "exp/train.py")
    assert code == 1
    assert (
        err
        == f"ddp: workload: {project}/exp/train.py is outside the workspace {settings.workspace.path}\n"
    )
    (settings.workspace.path / "train.py").touch()
    code, out, err = typed(*words, str(settings.workspace.path / "train.py"))
    assert code == 0, err
    assert container(out)["args"] == [f"{settings.workspace.path}/train.py"]
    assert list(settings.workspace.runs.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("exp/nope.py",), "give the path of a script"),
        (("--env", "MASTER_ADDR=x", "exp/train.py"), "is set by the job itself"),
        (("--claim", "My_Claim", "exp/train.py"), "no hyphen at either end"),
    ],
)
def test_a_refused_request_leaves_nothing(
    settings: Settings, project: pathlib.Path, words: tuple[str, ...], message: str
):
    code, out, err = typed("render", "--kubernetes", *IMAGE, *words)
    assert code != 0
    assert out == ""
    assert message in err
    assert list(settings.workspace.runs.iterdir()) == []


def test_the_payload_s_own_workloads_need_no_code(settings: Settings, project: pathlib.Path):
    code, out, _ = typed("render", "--kubernetes", *IMAGE, "smoke")
    assert code == 0
    assert container(out)["args"][:3] == ["--module", "ddptrain", "smoke"]
    assert list(settings.workspace.runs.iterdir()) == []


def test_manifests_as_json(settings: Settings, project: pathlib.Path):
    plain = typed("render", "--kubernetes", *IMAGE, "--run", "night", "--no-snapshot", "smoke")[1]
    code, out, _ = typed("--json", "render", "--kubernetes", *IMAGE, "--run", "night", "smoke")
    assert code == 0
    assert json.loads(out) == {
        "schema": 1,
        "manifests": plain,
        "run": "night",
        "run-dir": f"{settings.workspace.runs}/night",
    }


def test_the_script_as_json(settings: Settings, cluster: Cluster, project: pathlib.Path):
    plain = typed("render", "--run", "night", "smoke")[1]
    assert plain.startswith("#!/bin/bash\n")
    code, out, _ = typed("render", "--json", "--run", "night", "smoke")
    assert code == 0
    found = json.loads(out)
    assert (found["script"], found["run"], found["job"]["run"]) == (plain, "night", "night")


def test_a_failure_as_json(settings: Settings, project: pathlib.Path):
    code, out, _ = typed("render", "--json", "--kubernetes", "smoke")
    assert code == 1
    assert json.loads(out)["error"].startswith("--container-image: is required")
