"""The code of a script's run: the copy is what starts, even if the original is edited later."""

import itertools
import json
import os
import pathlib
import shutil
import tempfile
import typing

import hypothesis
import pytest
from cluster import Cluster, Job
from hypothesis import strategies as st
from pip_double import Pip

from ddp.actions import verbs
from ddp.options import fields
from ddp.problem import Problem
from ddp.project import copies
from ddp.project import root as project_part
from ddp.settings import Settings


@pytest.fixture
def project(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A script and a module in the same folder, in no repository."""
    folder = tmp_path / "project"
    (folder / "lib").mkdir(parents=True)
    (folder / "train.py").write_text("import lib.model\n")
    (folder / "lib" / "model.py").write_text("SIZE = 1\n")
    (folder / "lib" / "notes.txt").write_text("secret\n")
    (folder / ".ddpignore").write_text("notes.txt\n")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    return folder


def submit(
    settings: Settings, script: pathlib.Path, verb: str = "submit-ddp", **more: typing.Any
) -> object:
    model = verbs.ACTIONS[verb].options
    params = fields.parse(model, {"workload": str(script), "nodes": 1, **more})
    with settings.workspace.claims:
        return verbs.ACTIONS[verb].do(settings, params, lambda _: None)


def contents(folder: pathlib.Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): path.read_text()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_the_copy_is_in_the_run_and_is_what_starts(
    settings: Settings, cluster: Cluster, pip: Pip, project: pathlib.Path
):
    submit(settings, project / "train.py", run="night")
    code = settings.workspace.runs / "night" / "code"
    assert contents(code) == {
        "train.py": "import lib.model\n",
        "lib/model.py": "SIZE = 1\n",
        ".ddpignore": "notes.txt\n",
    }
    assert cluster.job(40).commands() == [f"{code}/train.py"]
    facts = json.loads((settings.workspace.runs / "night" / "job.json").read_text())["code"]
    assert (facts["folder"], facts["script"], facts["origin"]) == ("code", "train.py", str(project))
    assert [path.name for path in settings.workspace.runs.iterdir()] == ["night"], (
        "nothing half-made stays"
    )


def test_of_a_script_in_the_workspace_itself_it_alone_is_kept(
    settings: Settings, cluster: Cluster, pip: Pip, monkeypatch: pytest.MonkeyPatch
):
    """Everyone's folders are in the same place."""
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(settings.workspace.path.parent))
    (settings.workspace.path / "alone.py").write_text("print(1)\n")
    (settings.workspace.path / "users" / "bob").mkdir(parents=True)
    (settings.workspace.path / "users" / "bob" / "large").write_text("x")
    (settings.workspace.path / "other.py").write_text("print(2)\n")
    submit(settings, settings.workspace.path / "alone.py", run="night")
    code = settings.workspace.runs / "night" / "code"
    assert contents(code) == {"alone.py": "print(1)\n"}
    assert [path.name for path in code.iterdir()] == ["alone.py"]


def test_a_later_submission_of_a_run_updates_its_copy_and_leaves_what_the_run_wrote(
    settings: Settings, cluster: Cluster, pip: Pip, project: pathlib.Path
):
    code = settings.workspace.runs / "night" / "code"
    for number in (1, 2, 3):
        (project / "lib" / "model.py").write_text("SIZE = " + "1" * number)
        cluster.states = [("COMPLETED", 0)]
        submit(settings, project / "train.py", run="night")
        assert cluster.jobs[-1].commands() == [f"{code}/train.py"]
        assert contents(code)["lib/model.py"] == "SIZE = " + "1" * number
        assert ("out/result" in contents(code)) == (number > 1)
        (code / "out").mkdir(exist_ok=True)
        (code / "out" / "result").write_text("mine")
    assert sorted(path.name for path in settings.workspace.runs.iterdir()) == ["night"]


Tree = dict[str, str]
NAMES = st.sampled_from(["a", "b", "d/a", "d/b", "d/e/a", "out/a"])
EDITS = st.lists(
    st.tuples(st.sampled_from(["project", "run"]), NAMES, st.sampled_from(["write", "remove"])),
    max_size=5,
)


def edit(folder: pathlib.Path, name: str, how: str, text: str) -> bool:
    """Write or remove a file, as a shell would; return whether that was possible."""
    path = folder / name
    if how == "remove":
        if path.is_file():
            path.unlink()
        return False
    if path.is_dir() or any(above.is_file() for above in path.parents):
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return True


@hypothesis.settings(
    max_examples=40, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture]
)
@hypothesis.given(rounds=st.lists(EDITS, min_size=1, max_size=5))
def test_files_of_the_run_stay_and_files_of_the_project_are_updated(
    settings: Settings, rounds: list[list[tuple[str, str, str]]]
):
    with tempfile.TemporaryDirectory() as made, pytest.MonkeyPatch.context() as patch:
        patch.setenv("GIT_CEILING_DIRECTORIES", made)
        top = pathlib.Path(made)
        root, code = top / "project", top / "run" / "code"
        root.mkdir()
        code.parent.mkdir()
        (root / "train.py").write_text("")
        written = set[str]()  # by the run
        clock = itertools.count(1)
        for number, edits in enumerate(rounds):
            for who, name, how in edits:
                text = f"{who} {next(clock)}"
                folder = root if who == "project" else code
                if who == "project" or code.is_dir():
                    if who == "run" and (code / name).is_file():
                        written.discard((code / name).read_text())
                    if edit(folder, name, how, text) and who == "run":
                        written.add(text)
                    if (folder / name).is_file():
                        os.utime(folder / name, ns=(0, next(clock) * 10**9))
            found = project_part.find(root / "train.py")
            before = contents(code)
            copy = copies.stage(settings.workspace, found, top / "partial", code)
            copy.place()
            if number % 2:  # its submission fails, and it is submitted again
                copy.undo()
                assert contents(code) == before
                shutil.rmtree(top / "partial")
                copies.stage(settings.workspace, found, top / "partial", code).place()
            shutil.rmtree(top / "partial", ignore_errors=True)
            now = contents(code)
            assert written <= set(now.values())
            for name, text in contents(root).items():
                assert now[name] == text or now[name] in written
            assert all(name in contents(root) or text in written for name, text in now.items())


@pytest.mark.parametrize("how", ["remove", "write", "leave"])
def test_files_behind_links_of_the_run_are_not_touched(
    settings: Settings, cluster: Cluster, pip: Pip, project: pathlib.Path, how: str
):
    cluster.states = [("COMPLETED", 0)]
    submit(settings, project / "train.py", run="night")
    code, large = settings.workspace.runs / "night" / "code", settings.workspace.path / "large"
    (code / "lib").rename(large)
    (code / "lib").symlink_to(large)
    if how != "leave":
        edit(project, "lib/model.py", how, "SIZE = 2\n")
    submit(settings, project / "train.py", run="night")
    assert contents(large) == {"model.py": "SIZE = 1\n"}
    links = {path.name for path in code.iterdir() if path.is_symlink()}
    assert links == ({"lib.run-1"} if how == "write" else {"lib"})
    assert (code / "lib" / "model.py").read_text() == (
        "SIZE = 2\n" if how == "write" else "SIZE = 1\n"
    )


@pytest.mark.parametrize("verb", ["submit-ddp", "submit-sweep"])
def test_a_submission_that_slurm_refuses_leaves_nothing(
    settings: Settings, cluster: Cluster, pip: Pip, project: pathlib.Path, verb: str
):
    cluster.submit_refusal = "sbatch: error: Batch job submission failed: Access/permission denied"
    with pytest.raises(Problem, match="permission denied"):
        submit(
            settings,
            project / "train.py",
            verb,
            **({} if verb == "submit-ddp" else {"grid": "lr=1,2"}),
        )
    assert list(settings.workspace.runs.iterdir()) == []


@pytest.mark.parametrize("is_script", [True, False])
def test_nothing_is_copied_where_no_copy_starts(
    settings: Settings, cluster: Cluster, pip: Pip, workspace: pathlib.Path, is_script: bool
):
    (workspace / "train.py").write_text("")
    what: dict[str, typing.Any] = {"snapshot": False} if is_script else {"workload": "smoke"}
    submit(settings, workspace / "train.py", run="night", **what)
    assert not list((settings.workspace.runs / "night").glob("code*"))
    assert "code" not in json.loads((settings.workspace.runs / "night" / "job.json").read_text())


def test_the_copy_of_a_sweep_is_one_for_all_its_runs(
    settings: Settings, cluster: Cluster, pip: Pip, project: pathlib.Path
):
    submit(settings, project / "train.py", "submit-sweep", name="s", grid="lr=1,2")
    job: Job = cluster.job(40)
    assert job.training().command[0].text == f"{settings.workspace.runs}/s/code/train.py"
    assert not list(settings.workspace.runs.glob("s-*/code"))
