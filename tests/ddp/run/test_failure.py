"""Why a job failed, as its user reads it."""

import json
import pathlib
import typing

import pytest
from cluster import Cluster, Job
from pip_double import Pip

from ddp.actions import verbs
from ddp.options import fields, models
from ddp.problem import Problem
from ddp.results.result import Result
from ddp.run import code_paths
from ddp.settings import Settings

MISSING = "ModuleNotFoundError: No module named 'einops.layers'"
REMEDY = (
    "with einops in requirements.txt: ddp env create NAME --requirements requirements.txt, then: "
)


@pytest.fixture
def script(workspace: pathlib.Path) -> pathlib.Path:
    path = workspace / "train.py"
    path.write_text("import einops\n")
    return path


def fails(
    settings: Settings, cluster: Cluster, script: pathlib.Path, last_line: str, **more: object
) -> str:
    """Show a job whose log ends with this line."""

    def leave(job: Job) -> None:
        log = job.script.parent / "logs" / f"{job.job_id}.out"
        log.write_text(
            f'Traceback (most recent call last):\n  File "train.py", line 1, in <module>\n{last_line}\n'
        )

    cluster.submitted, cluster.states = leave, [("FAILED", 256)]
    given = {
        "workload": str(script),
        "run": "night",
        "nodes": 1,
        "snapshot": False,
        "wait": True,
        **more,
    }
    params = fields.parse(models.SubmitDdp, given)
    with settings.workspace.claims, pytest.raises(Problem) as caught:
        verbs.ALL["submit"].do(settings, params, lambda _: None)
    shown = verbs.ALL["show"].do(
        settings, fields.parse(models.OneRun, {"run": "night"}), lambda _: None
    )
    assert typing.cast(Result, shown).texts()["reason"] == str(caught.value)
    return str(caught.value)


def test_a_missing_module_is_answered_with_what_to_type(
    settings: Settings, cluster: Cluster, pip: Pip, script: pathlib.Path
):
    line = fails(settings, cluster, script, MISSING)
    assert (
        line
        == f"job 40 FAILED, exit code 1: {MISSING} (train.py:1); {REMEDY}ddp submit -e NAME ..."
    )


@pytest.mark.parametrize(
    ("module", "remedy"),
    [
        ("net", "found at {}/lib/net, which is not on sys.path: --env PYTHONPATH=lib"),
        ("net.deep", "found at {}/lib/net/deep, which is not on sys.path: --env PYTHONPATH=lib"),
        (
            "net._version",
            "{}/lib/net has no such module; !NAME in .ddpignore takes in what git ignores",
        ),
    ],
)
def test_a_module_of_the_project_is_never_to_be_installed(
    settings: Settings, cluster: Cluster, pip: Pip, tmp_path: pathlib.Path, module: str, remedy: str
):
    (tmp_path / "mine" / "lib" / "net").mkdir(parents=True)
    for name in ("train.py", ".ddpignore", "lib/net/deep.py"):
        (tmp_path / "mine" / name).touch()
    failed = fails(
        settings,
        cluster,
        tmp_path / "mine/train.py",
        f"ModuleNotFoundError: No module named '{module}'",
        snapshot=True,
    )
    assert failed.endswith(remedy.format(tmp_path / "mine"))


@pytest.mark.parametrize(
    ("lies", "line"),
    [
        ("mine/secret/__init__.py", "ModuleNotFoundError: No module named 'secret'"),
        ("mine/a/b/deep.py", "ModuleNotFoundError: No module named 'deep'"),
        ("lib/__init__.py", "ModuleNotFoundError: No module named 'lib.x'"),
        (
            "mine/secret/train.bin",
            "FileNotFoundError: [Errno 2] No such file or directory: 'secret/train.bin'",
        ),
    ],
)
def test_a_module_that_the_copy_lacks_is_named_with_its_path(
    settings: Settings, cluster: Cluster, pip: Pip, tmp_path: pathlib.Path, lies: str, line: str
):
    for name in ("mine/train.py", lies):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "mine" / ".ddpignore").write_text("secret/\na/\n")
    failed = fails(settings, cluster, tmp_path / "mine/train.py", line, snapshot=True)
    at = str(tmp_path / lies).removesuffix("/__init__.py")
    assert (
        f"found at {at}" in failed
        or f"found at {at.removesuffix('.py')}, which is not on sys.path" in failed
    )
    assert "requirements" not in failed


INSTALL = "an administrator types on the nodes: apt-get install"
NO_COMPILER = "InvalidCxxCompiler: No working C++ compiler found in torch._inductor.config.cpp.cxx: (None, 'g++')"
COMPILER = f"torch.compile needs a C++ compiler: {INSTALL} g++"


@pytest.mark.parametrize(
    ("last_line", "remedy"),
    [
        ("ValueError: x", ""),
        ("ImportError: cannot import name 'a' from 'b'", ""),
        (f"torch._inductor.exc.InductorError: {NO_COMPILER}", COMPILER),  # torch 2.13
        (
            f"torch._dynamo.exc.BackendCompilerFailed: backend='inductor' raised:\n{NO_COMPILER}",
            COMPILER,
        ),  # 2.5
        (
            "torch._inductor.exc.InductorError: RuntimeError: Failed to find C compiler. Please specify",
            COMPILER,
        ),
        (f"ValueError: {NO_COMPILER}", ""),
        (
            "FileNotFoundError: [Errno 2] No such file or directory: 'git'",
            f"the program calls git: {INSTALL} git",
        ),
        (
            "RuntimeError: Error building extension 'adam': [1/2] c++ -MD /bin/sh: 1: c++: not found",
            f"the program builds an extension of torch, which needs a C++ compiler: {INSTALL} g++",
        ),
        ("ImportError: Bad git executable.", f"the program calls git: {INSTALL} git"),
        (
            "FileNotFoundError: [Errno 2] No such file or directory: 'git.txt'",
            "does the file exist on the nodes?",
        ),
        (
            "OSError: [Errno 122] Disk quota exceeded",
            "the quota is used up: quota -s, lfs quota or juicefs quota show it",
        ),
        (
            "OSError: [Errno 24] Too many open files",
            "see ulimit -n; use fewer workers, or close files",
        ),
        (
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB",
            "use a smaller batch",
        ),
    ],
)
def test_other_failures_need_no_environment(
    settings: Settings,
    cluster: Cluster,
    pip: Pip,
    script: pathlib.Path,
    last_line: str,
    remedy: str,
):
    line = f"job 40 FAILED, exit code 1: {last_line.splitlines()[-1]}"
    found = fails(settings, cluster, script, last_line).replace(" (train.py:1)", "")
    assert found == (f"{line}; {remedy}" if remedy else line)


def test_a_file_of_requirements_gets_a_line(
    settings: Settings, cluster: Cluster, pip: Pip, script: pathlib.Path
):
    file = script.with_name("packages.txt")
    file.write_text("numpy\n")
    line = fails(settings, cluster, script, MISSING, requirements=str(file))
    assert line.endswith(f"; add a line with einops to {file}, and submit again")


def test_a_missing_compiler_is_named_below_what_ninja_prints(
    settings: Settings, cluster: Cluster, pip: Pip, script: pathlib.Path
):
    printed = "RuntimeError: Error building extension 'adam': [1/2] c++ -MMD -MF adam.o.d\n"
    printed += "FAILED: [code=127] adam.o\n/bin/sh: 1: c++: not found\nninja: build stopped"
    line = fails(settings, cluster, script, printed)
    assert "/bin/sh: 1: c++: not found" in line
    assert line.endswith(f"needs a C++ compiler: {INSTALL} g++")


def test_a_container_brings_its_own(
    settings: Settings, cluster: Cluster, pip: Pip, script: pathlib.Path
):
    line = fails(settings, cluster, script, MISSING, **{"container-image": "hf/pytorch:1"})
    assert line == f"job 40 FAILED, exit code 1: {MISSING} (train.py:1)"


@pytest.mark.parametrize("origin", [None, "/home/ann"])
def test_a_traceback_names_the_users_own_file(
    settings: Settings, cluster: Cluster, pip: Pip, tmp_path: pathlib.Path, origin: str | None
):
    """The copy is the code that ran.

    A library's frame below it says less than the user's last one.
    """
    project, run = tmp_path / "net-1", settings.workspace.runs / "night"
    project.mkdir()
    (project / "train.py").write_text("import net\n")

    def leave(job: Job) -> None:
        if origin:
            path = run / "program" / "job.json"
            path.write_text(json.dumps({**json.loads(path.read_text()), "origin": origin}))
        frames = (
            f"{run}/code/train.py",
            f"{run}/code/net/model.py",
            "/opt/torch/nn.py",
            "<frozen x>",
        )
        text = "".join(
            f'0: [rank0]:   File "{path}", line {at}, in f\n' for at, path in enumerate(frames, 21)
        )
        lived_on = '0:   File "other.py", line 3, in g\n0: KeyError: lived on with\n'
        text = f"{lived_on}0: Traceback (most recent call last):\n{text}0: ValueError: x\n"
        (run / "logs" / f"{job.job_id}.out").write_text(text)

    cluster.submitted, cluster.states = leave, [("FAILED", 256)]
    given = {"workload": str(project / "train.py"), "run": "night", "nodes": 1, "wait": True}
    with settings.workspace.claims, pytest.raises(Problem) as caught:
        verbs.ALL["submit"].do(settings, fields.parse(models.SubmitDdp, given), lambda _: None)
    assert str(caught.value) == "job 40 FAILED, exit code 1: ValueError: x (net/model.py:22)"
    assert (
        code_paths.CodePaths().find(['  File "other.py", line 3, in g', "[FATAL] no"])
        == "other.py:3"
    )
    assert not code_paths.CodePaths().find(
        ['  File "other.py", line 3, in g', "KeyError: lived on with", "[FATAL] no"]
    )
    assert f'File "{origin or project}/net/model.py", line 22' in caught.value.results["failure"]
    shown = verbs.ALL["log"].do(
        settings, fields.parse(models.RunLog, {"run": "night"}), lambda _: None
    )
    text = typing.cast(Result, shown).texts()["text"]
    assert f'File "{origin or project}/train.py", line 21' in text
    assert f"{run}/code/" not in text
