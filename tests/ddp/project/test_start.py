"""The command typed in a project's folder, and the ranks' start: command, folder and PYTHONPATH."""

import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import tempfile
import typing

import hypothesis
import pytest
import yaml
from cluster import Cluster, Job
from command_line import typed
from environments import make
from hypothesis import strategies as st
from pip_double import Pip

from ddp import cli
from ddp.actions import prerequisites
from ddp.node import spec
from ddp.options import fields, models
from ddp.problem import ParameterError
from ddp.project import packages, search
from ddp.project import root as project_part
from ddp.settings import Settings
from ddp.submit import commands, own_python

CASES = yaml.safe_load(pathlib.Path(__file__).with_suffix(".yaml").read_text())

SRC = '[project]\nname = "my-net"\n[build-system]\nrequires = []\n'


@pytest.fixture(autouse=True)
def _alone(settings: Settings, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    monkeypatch.setattr(cli, "settings_of", lambda _: settings)
    monkeypatch.setattr(prerequisites, "require", lambda *_, **__: None)


@pytest.fixture
def folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """The folder of a project, the user's current folder."""
    place = tmp_path / "proj"
    for name, text in {
        "train.py": "",
        "train/main.py": "import lib",
        "lib/__init__.py": "",
        "src/my_net/__init__.py": "",
        "exp/configs/a.yaml": "lr: 1",
        "run.sbatch": "#!/bin/bash\n#SBATCH -N 2\nsrun python -m train.main --name 'a b'\n",
        "run.sh": "torchrun --nnodes 2 \\\n  train.py --lr 1\n",
        "many.sh": "for i in 1 2; do srun python train.py --seed $i --lr 1 2>&1 | tee log; done\n",
        "train.ini": "[a]\nb = 1\n",
        "tool": "#!/usr/bin/env perl\n",
        "nb.ipynb": '{"cells": [], "nbformat": 4}',
        "nb.py": '{"cells": [], "nbformat": 4}',
        "data.jsonl": "{}",
        "bom.py": "\ufeff#!/usr/bin/env python\r\nprint(1)\r\n",
        "bad.py": "x = 1\nif x\n",
        "with blank/tr\u00e4in\\.py": "",
    }.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(text)
    monkeypatch.chdir(place)
    return place


def started(settings: Settings, cluster: Cluster, *words: str) -> spec.JobSpec:
    """Type `ddp submit` with these words; return the job's specification, with relative paths."""
    code, _, err = typed("submit", "--run", "night", "-N", "1", *words)
    assert code == 0, err
    assert "Traceback" not in err
    text = json.dumps(spec.dump(cluster.jobs[-1].training())).replace(
        f"{settings.workspace.runs}/night/", ""
    )
    return spec.parse(spec.JobSpec, json.loads(text))


def test_a_remark_names_a_run_whose_script_starts_at_its_beginning(
    settings: Settings, cluster: Cluster, pip: Pip, folder: pathlib.Path
):
    cluster.states = [("COMPLETED", 0)]
    lines = [typed("submit", "--run", "night", "-N", "1", "train.py")[2] for _ in "ab"]
    assert ["its program starts at its beginning" in text for text in lines] == [False, True]
    (settings.workspace.runs / "night" / "saved").mkdir()
    (settings.workspace.runs / "night" / "latest").symlink_to("saved")
    assert "beginning" not in typed("submit", "--run", "night", "-N", "1", "train.py")[2]


@pytest.mark.parametrize("words", ["submit gpt", "render gpt", "sweep gpt"])
def test_the_help_of_a_workload_is_there_for_each_verb_that_starts_it(
    settings: Settings, cluster: Cluster, folder: pathlib.Path, words: str
):
    code, out, err = typed(*words.split(), "--help")
    assert (code, err) == (0, "")
    assert "--steps" in out


def line(job: spec.JobSpec) -> str:
    return shlex.join(word.text for word in job.command)


@pytest.mark.parametrize(
    ("at", "words", "command", "workdir", "path"), CASES["a_command_in_a_project"]
)
def test_a_command_in_a_project(
    settings: Settings,
    cluster: Cluster,
    pip: Pip,
    folder: pathlib.Path,
    at: str,
    words: str,
    command: str,
    workdir: str,
    path: str | None,
    monkeypatch: pytest.MonkeyPatch,
):
    (folder / ".ddpignore").touch()
    monkeypatch.chdir(folder / at)
    job = started(settings, cluster, *shlex.split(words))
    expected = None if path is None else path.format(up=folder.parent / "x")
    assert (line(job), job.workdir, dict(job.variables).get("PYTHONPATH")) == (
        command,
        workdir,
        expected,
    )
    assert job.origin == str(folder)
    assert (settings.workspace.runs / "night" / workdir).is_dir()
    assert (
        json.loads((settings.workspace.runs / "night" / "job.json").read_text())["workdir"]
        == f"{settings.workspace.runs}/night/{workdir}"
    )
    assert re.search(
        rf"^workdir +{settings.workspace.runs}/night/{workdir}$",
        typed("show", "night")[1],
        re.MULTILINE,
    )


def test_without_git_a_remark_says_that_gitignore_does_not_count(
    settings: Settings,
    cluster: Cluster,
    pip: Pip,
    folder: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
):
    (folder / ".git").mkdir()
    found = shutil.which

    def which(name: str, **more: typing.Any) -> str | None:
        return None if name == "git" else found(name, **more)

    monkeypatch.setattr(shutil, "which", which)
    err = typed("submit", "-N", "1", "train.py")[2]
    assert f"MiB, of {folder}; git is not installed here, so .gitignore does not count" in err


@pytest.mark.parametrize("is_flat", [True, False])
def test_a_project_s_own_package_is_importable_as_after_pip_install_e(
    settings: Settings, cluster: Cluster, pip: Pip, folder: pathlib.Path, is_flat: bool
):
    (folder / "pyproject.toml").write_text(SRC.replace("my-net", "lib") if is_flat else SRC)
    if is_flat:
        (folder / "src" / "my_net" / "__init__.py").unlink()
    job = started(settings, cluster, "--env", "PYTHONPATH=exp", "train/main.py")
    assert dict(job.variables)["PYTHONPATH"] == f"code/exp:code{'' if is_flat else '/src'}"


@pytest.mark.parametrize(("about", "package", "place"), CASES["where_a_project_s_packages_lie"])
def test_where_a_project_s_packages_lie(
    tmp_path: pathlib.Path, about: dict[str, str], package: str, place: str | None
):
    tmp_path /= "project"
    for name, text in {**about, f"{package}/__init__.py": "", "tests/__init__.py": ""}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = [] if place is None else [tmp_path / place]
    assert (
        packages.importable(tmp_path, tmp_path)
        == packages.importable(tmp_path / "cfg", tmp_path)
        == found
    )
    assert packages.importable(tmp_path, tmp_path / "cfg") == []


def test_any_name_of_a_path_works_and_the_login_s_variables_arrive(
    settings: Settings,
    cluster: Cluster,
    pip: Pip,
    folder: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    script = folder / "with blank" / "tr\u00e4in\\.py"
    job = started(settings, cluster, str(script), "a b")
    assert [word.text for word in job.command] == ["code/with blank/tr\u00e4in\\.py", "a b"]
    login = {
        "USER": settings.workspace.user,
        "LOGNAME": settings.workspace.user,
        "HOME": os.environ["HOME"],
        "TZ": "Asia/Tokyo",
    }
    assert login.items() <= dict(job.variables).items()


def test_a_script_elsewhere_starts_in_its_own_folder(
    settings: Settings,
    cluster: Cluster,
    pip: Pip,
    folder: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.chdir(folder.parent / "home")
    _, _, err = typed("submit", "--run", "night", "-N", "1", str(folder / "train" / "main.py"))
    assert (
        f"{folder.parent}/home is not in the project {folder}/train: the job starts in the script's folder"
        in err
    )
    job: Job = cluster.job(40)
    assert job.training().workdir == f"{settings.workspace.runs}/night/code"


def test_without_a_snapshot_the_ranks_start_where_it_is_typed_if_the_nodes_share_that(
    settings: Settings,
    cluster: Cluster,
    pip: Pip,
    folder: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
):
    (settings.workspace.path / "mine" / "exp").mkdir(parents=True)
    (settings.workspace.path / "mine" / "train.py").touch()
    script = str(settings.workspace.path / "mine" / "train.py")
    _, _, err = typed("submit", "--no-snapshot", script)
    assert (
        f"--snapshot: {folder} is outside the workspace {settings.workspace.path}, and only that is known to be sh"
        in err
    )
    assert (
        f"--snapshot: {folder}/train.py is outside the workspace"
        in typed("submit", "--no-snapshot", "train.py")[2]
    )
    monkeypatch.chdir(settings.workspace.path / "mine" / "exp")
    job = started(settings, cluster, "--no-snapshot", "--env", "PYTHONPATH=..", script)
    assert (job.workdir, dict(job.variables)["PYTHONPATH"]) == (
        str(pathlib.Path.cwd()),
        str(pathlib.Path.cwd().parent),
    )
    assert line(job) == script


@pytest.mark.parametrize(
    ("words", "text"), CASES["words_that_start_no_program_are_refused_with_the_line_to_type"]
)
def test_words_that_start_no_program_are_refused_with_the_line_to_type(
    settings: Settings, cluster: Cluster, folder: pathlib.Path, words: str, text: str
):
    code, _, err = typed("submit", *words.split())
    assert code in (1, 2)
    assert text in err.splitlines()[-1]
    assert not cluster.jobs
    assert not list(settings.workspace.runs.iterdir())


def test_newer_syntax_is_a_remark_where_the_jobs_have_a_newer_python(
    settings: Settings, cluster: Cluster, folder: pathlib.Path
):
    assert (
        "bad.py:2: SyntaxError"
        in typed("submit", "--dry-run", "--container-image", "x:1", "bad.py")[1]
    )


def test_a_mistyped_module_is_a_remark_since_it_may_be_installed(
    settings: Settings, cluster: Cluster, folder: pathlib.Path
):
    remark = "trayn is not in this folder; did you mean train?"
    assert remark in typed("submit", "--dry-run", "-m", "trayn.main")[1]
    (folder / "namespace" / "part").mkdir(parents=True)
    for name in ("lightning.cli", "namespace.part.main"):
        assert "did you mean" not in typed("submit", "--dry-run", "-m", name)[1]


DROPPED = ("--rdzv-backend", "--master_port", "--node-rank", "--role", "-r", "--local-addr")
WORDS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=6)
OURS = st.sampled_from(
    ["nnodes", "nproc-per-node", "nproc_per_node", "max_restarts", "max-restarts"]
)
GIVEN = st.lists(
    st.tuples(OURS, st.integers(1, 9), st.booleans()),
    max_size=4,
    unique_by=lambda one: one[0].replace("_", "-"),
)


def remarks(command: commands.Command) -> tuple[str, ...]:
    return typing.cast("tuple[str, ...]", command.facts.get("remarks", ()))


@hypothesis.given(
    given=GIVEN,
    foreign=st.none() | st.sampled_from(DROPPED),
    is_module=st.booleans(),
    arguments=st.lists(WORDS),
)
def test_any_command_line_of_torchrun(
    given: list[tuple[str, int, bool]], foreign: str | None, is_module: bool, arguments: list[str]
):
    ours = {"nnodes": "nodes", "nproc-per-node": "ranks-per-node", "max-restarts": "max-restarts"}
    words = [
        word
        for name, value, joined in given
        for word in ([f"--{name}={value}"] if joined else [f"--{name}", str(value)])
    ]
    words += [foreign, "1"] if foreign else []
    words += ["-m", "a.b"] if is_module else ["a.py"]
    values: dict[str, object] = {"workload": "torchrun"}
    expected = {ours[name.replace("_", "-")]: value for name, value, _ in given}
    expected |= {"workload": "a.b", "module": True} if is_module else {"workload": "a.py"}
    found = commands.unwrap(values, (*words, *arguments))
    assert (found.values, found.arguments) == (expected, tuple(arguments))
    lost = [foreign] if foreign else []
    for flag, text in zip(lost, remarks(found), strict=True):
        assert flag in text


@pytest.mark.parametrize(
    ("words", "left"), [("bin/python -u train.py", []), ("bin/torchrun -m train.main 1", ["1"])]
)
def test_a_python_of_an_environment_is_that_environment_s(
    folder: pathlib.Path, words: str, left: list[str]
):
    name, *arguments = words.split()
    found = commands.unwrap({"workload": f".venv/{name}"}, tuple(arguments))
    assert "active" not in found.facts
    (folder / ".venv").mkdir()
    (folder / ".venv" / "pyvenv.cfg").touch()
    found = commands.unwrap({"workload": f".venv/{name}"}, tuple(arguments))
    assert (found.facts["active"], [*found.arguments]) == (str(folder / ".venv"), left)


def test_ranks_of_torchrun_are_gpus_or_share_the_cores(
    settings: Settings, cluster: Cluster, pip: Pip, folder: pathlib.Path
):
    job = started(settings, cluster, "torchrun", "--nproc-per-node", "2", "train.py")
    assert (job.ranks_per_node, job.gpus_per_node) == (2, 0)
    for machine in cluster.machines:
        machine.gres = "gpu:a100:4"
    code, out, err = typed(
        "submit", "-N", "1", "--dry-run", "--json", "torchrun", "--nproc-per-node", "2", "train.py"
    )
    assert code == 0, err
    assert (json.loads(out)["job"]["ranks_per_node"], json.loads(out)["job"]["gpus_per_node"]) == (
        2,
        2,
    )


@pytest.mark.parametrize(
    "words",
    [
        "--gpus-per-node 4 torchrun --nproc-per-node 1 train.py",
        "--gpus-per-node 4 --ranks-per-node 1 train.py",
        "--launcher node train.py",
    ],
)
def test_one_process_may_have_all_gpus_of_a_node(
    settings: Settings, cluster: Cluster, pip: Pip, folder: pathlib.Path, words: str
):
    for machine in cluster.machines:
        machine.gres = "gpu:a100:4"
    job = started(settings, cluster, *words.split())
    assert (job.ranks_per_node, job.gpus_per_node) == (1, 4)


@pytest.mark.parametrize(
    ("words", "command", "launcher", "is_command"),
    [
        ("--launcher node bash run.sh 1", "bash run.sh 1", "node", True),
        ("--launcher node run.sh 1", "code/run.sh 1", "node", False),
        ("litgpt pretrain pythia-14m", "litgpt pretrain pythia-14m", "torchrun", True),
        ("llamafactory-cli train x.yaml", "llamafactory-cli train x.yaml", "node", True),
    ],
)
def test_a_program_that_is_no_python_script_starts_in_the_copy(
    settings: Settings,
    cluster: Cluster,
    pip: Pip,
    folder: pathlib.Path,
    words: str,
    command: str,
    launcher: str,
    *,
    is_command: bool,
):
    job = started(settings, cluster, *words.split())
    assert (line(job), job.workdir) == (command, "code")
    assert (job.launcher, job.is_command) == (launcher, is_command)


def test_the_settings_of_accelerate_go_with_the_job(
    settings: Settings, cluster: Cluster, pip: Pip, folder: pathlib.Path
):
    (folder / "c.yaml").write_text("mixed_precision: bf16\n")
    words = "accelerate launch --config_file c.yaml --use_fsdp -m train.main --lr 1".split()
    job = started(settings, cluster, *words)
    assert line(job) == "--module train.main --lr 1"
    assert job.accelerate == spec.Accelerate(("--use_fsdp",), "mixed_precision: bf16\n", ".yaml")


def test_each_lost_word_of_a_line_is_remarked_once(
    settings: Settings, cluster: Cluster, pip: Pip, folder: pathlib.Path
):
    words = "torchrun --standalone --role x --tee 3 train.py".split()
    _, _, err = typed("submit", "--run", "night", *words)
    remark = "torchrun's --standalone, --role, --tee are dropped: ddp sets the ranks, the rendezvous and the logs itself"
    assert err.count(remark) == 1
    assert err.count("dropped") == 1


def test_manifests_start_torchrun_alone(settings: Settings, cluster: Cluster, folder: pathlib.Path):
    words = "render --kubernetes --container-image x:1 --launcher node train.py".split()
    assert "--launcher: pods start torchrun with a script or module" in typed(*words)[2]


def test_fetch_copies_what_the_run_wrote_and_overwrites_nothing(
    settings: Settings, cluster: Cluster, pip: Pip, folder: pathlib.Path
):
    started(settings, cluster, "train.py")
    code = settings.workspace.runs / "night" / "code"
    for name in ("out/a b", "out/deep/c", "__pycache__/x.pyc"):
        (code / name).parent.mkdir(parents=True, exist_ok=True)
        (code / name).write_text(name)
    (code / "out" / "latest").symlink_to("deep")
    status, _, err = typed("fetch", "night", "--to", "./g\u00f6t it")
    assert (status, (folder / "g\u00f6t it" / "out" / "a b").read_text()) == (0, "out/a b"), err
    status, _, err = typed("fetch", "night", "--to", "got")
    assert status == 0, err
    assert [
        path.read_text()
        for path in (folder / "got" / "out" / "a b", folder / "got" / "out" / "latest" / "c")
    ] == ["out/a b", "out/deep/c"]
    assert not list((folder / "got").rglob("*.pyc"))
    for words, text in {
        (
            "--to",
            "got",
        ): f"--to: {folder}/got/out/a b exists already and 2 more; choose another folder, or remove it",
        ("train.py",): f"--to: {folder}/train.py exists already; ",
        ("../job.json",): "../job.json is not in the run's folder",
        ("nothing",): f"{code}/nothing does not exist",
    }.items():
        assert text in typed("fetch", "night", *words)[2]
    assert typed("fetch", "night", "out/deep", "--to", "more")[0] == 0
    assert [path.name for path in (folder / "more").rglob("*") if path.is_file()] == ["c"]
    assert "no run 'dawn'" in typed("fetch", "dawn")[2]


@pytest.mark.parametrize(
    ("module", "path", "folder_"),
    [("my_net", "src/my_net", "src"), ("lib", "lib", "."), ("einops", "", "")],
)
def test_a_module_of_the_project_is_never_looked_for_in_an_index(
    settings: Settings,
    cluster: Cluster,
    pip: Pip,
    folder: pathlib.Path,
    module: str,
    path: str,
    folder_: str,
):
    started(settings, cluster, "train.py")
    record = json.loads((settings.workspace.runs / "night" / "job.json").read_text())
    found = search.find_module(settings.workspace.runs / "night", record, module)
    assert found == ((str(folder / path), folder_) if path else None)
    in_place = {"workdir": str(folder)}
    assert search.find_module(settings.workspace.runs / "night", in_place, module) == found


def test_a_relative_dataset_and_image_lie_below_the_current_folder(
    settings: Settings, cluster: Cluster, folder: pathlib.Path
):
    for words in (
        ("--dataset", "./x.jsonl", "gpt"),
        ("--container-image", "../x.sqsh", "train.py"),
    ):
        err = typed("submit", *words)[2]
        assert f"{words[0]}: {os.path.normpath(folder / words[1])} is outside the workspace" in err
        odd = words[1].replace("x.", "tr\u00e4in x.")
        assert "is outside the workspace" in typed("submit", words[0], odd, words[2])[2], (
            "not refused for its letters"
        )


@pytest.mark.parametrize("marker", [None, "pyproject.toml", ".git"])
def test_the_root_is_the_folder_where_it_is_typed_unless_the_project_is_marked(
    folder: pathlib.Path, tmp_path: pathlib.Path, marker: str | None
):
    if marker == ".git":
        subprocess.run(["git", "init", "-q", folder], check=True)
    elif marker:
        (folder / marker).touch()
    script = folder / "train" / "main.py"
    marked = folder if marker else None
    for here, root in (
        (folder, folder),
        (folder / "train", marked or folder / "train"),
        (tmp_path / "home", marked or folder / "train"),
    ):
        assert project_part.find(script, typed_in=here).root == root
    above = marked or folder / "train"
    assert project_part.find(script, typed_in=tmp_path).root == above, "a home lies in it"
    assert project_part.find(script, typed_in=folder, own=[folder]).root == folder / "train"


def test_of_a_folder_of_others_in_tmp_the_script_alone(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    shared = tmp_path / "tmp"
    shared.mkdir()
    shared.chmod(0o1777)
    for name in ("train.py", "beside.py", "ann/train.py", "ann/beside.py"):
        (shared / name).parent.mkdir(exist_ok=True)
        (shared / name).touch()
    assert len(project_part.find(shared / "ann" / "train.py").files) == 2
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    for script in (shared / "train.py", shared / "ann" / "train.py"):
        found = project_part.find(script)
        assert (found.files, found.is_alone) == (("train.py",), True)


def test_a_module_of_a_home_is_refused(tmp_path: pathlib.Path):
    with pytest.raises(
        ParameterError, match="is never copied as a whole; put the program into a folder below"
    ):
        project_part.find(None, typed_in=tmp_path / "home")


@hypothesis.settings(suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
@hypothesis.given(
    kind=st.sampled_from(["venv", "conda", "system"]),
    torch=st.none()
    | st.from_regex(
        r"[1-9]\.[0-9]{1,2}\.[0-9](\+(cpu|cu[0-9]{3})|a0\+git[0-9a-f]{7})?", fullmatch=True
    ),
    is_active=st.booleans(),
)
def test_an_environment_is_taken_by_its_torch(
    settings: Settings, kind: str, torch: str | None, is_active: bool
):
    with tempfile.TemporaryDirectory(dir=settings.workspace.path) as name:
        python = make(pathlib.Path(name) / "env", kind, torch)
        given = str(python.parents[1] if is_active else python)
        params = fields.parse(
            models.SubmitDdp, {"workload": "/x.py", "python": "auto" if is_active else given}
        )
        try:
            params = params.model_copy(update={"active": given})
            found = own_python.choose(settings.workspace, params, is_anywhere=True)
        except ParameterError as e:
            found = "", str(e)
        wrong = (
            f"{given} is not used, since it has no torch"
            if is_active
            else f"{given} has no torch; "
        )
        assert found[0] == ("" if torch is None else str(python))
        assert (wrong if torch is None else f"torch {torch}") in found[1]


def test_a_job_runs_the_active_python_in_place_and_no_environment_is_made(
    settings: Settings, cluster: Cluster, folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    python = make(folder.parent / "venv")
    monkeypatch.setenv("VIRTUAL_ENV", str(folder.parent / "venv"))
    assert (
        f"python: {python}, torch 2.6.0, of the active environment"
        in typed("submit", "-N", "1", "train.py")[2]
    )
    job = started(settings, cluster, "train.py")
    assert (job.environment, job.python) == (None, str(python))
    assert dict(job.variables)["VIRTUAL_ENV"] == str(folder.parent / "venv"), (
        "as sbatch passes it on"
    )
    assert (pathlib.Path(job.payload) / "ddptrain" / "__init__.py").is_file()
    record = json.loads((settings.workspace.runs / "night" / "job.json").read_text())
    assert (record["python"], record["environment"]) == (str(python), None)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as own:
        alone = make(pathlib.Path(own) / "env")
        make(folder.parent / "bare", "venv", None)
        for words, text in {
            "--python ../venv": f"environment  {python}\n",
            "--python ../venv/bin/python": f"environment  {python}\n",  # not the link's target
            "../venv/bin/python": f"environment  {python}\n",
            "../bare/bin/python -u": "--python: .*/bare/bin/python has no torch; give the path",
            "--python none": "environment  not installed yet",
            "--container-image x:1": "environment  the container x:1",
            "--python ../absent": "absent does not exist, or has no Python that you can execute",
            "--python ../venv -e mine": "--python: mine brings its own; give one of python, environment",
            f"--python {alone}": f"python: {alone}, torch 2.6.0, which each node needs at this path",
        }.items():
            output = "".join(map(str, typed("submit", "--dry-run", *words.split(), "train.py")[1:]))
            assert text in output or re.search(text, output)
        monkeypatch.setenv("VIRTUAL_ENV", f"{own}/env")
        unused = f"the active environment {own}/env is not used, since it is not on the shared filesystem; "
        assert unused in typed("submit", "--dry-run", "train.py")[1]
    err = typed(
        "render", "--kubernetes", "--container-image", "x:1", "--python", str(python), "train.py"
    )[2]
    assert "--python: pods have the image's own" in err
