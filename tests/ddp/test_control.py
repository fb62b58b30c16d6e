"""Why a job failed, as its user reads it."""

import pathlib
import typing

import pytest
from cluster import Cluster, Job
from pip_double import Pip

from ddp import verbs
from ddp.base import Settings, TrainerError
from ddp.options import fields, models
from ddp.view.result import Result

MISSING = "ModuleNotFoundError: No module named 'einops.layers'"
REMEDY = "with einops in requirements.txt: ddp env create NAME --requirements requirements.txt, then: "


@pytest.fixture
def script(workspace: pathlib.Path) -> pathlib.Path:
    path = workspace / "train.py"
    path.write_text("import einops\n")
    return path


def fails(settings: Settings, cluster: Cluster, script: pathlib.Path, last_line: str, **more: object) -> str:
    """Show a job whose log ends with this line."""

    def leave(job: Job) -> None:
        log = job.script.parent / "logs" / f"{job.job_id}.out"
        log.write_text(f'Traceback (most recent call last):\n  File "train.py", line 1, in <module>\n{last_line}\n')

    cluster.submitted, cluster.states = leave, [("FAILED", 256)]
    given = {"workload": str(script), "run": "night", "nodes": 1, "snapshot": False, "wait": True, **more}
    params = fields.parse(models.SubmitDdp, given)
    with settings.claims, pytest.raises(TrainerError) as caught:
        verbs.ALL["submit"].do(settings, params, lambda _: None)
    shown = verbs.ALL["show"].do(settings, fields.parse(models.OneRun, {"run": "night"}), lambda _: None)
    assert typing.cast(Result, shown).texts()["reason"] == str(caught.value)
    return str(caught.value)


def test_a_missing_module_is_answered_with_what_to_type(
    settings: Settings, cluster: Cluster, pip: Pip, script: pathlib.Path
):
    line = fails(settings, cluster, script, MISSING)
    assert line == f"job 40 FAILED, exit code 1: {MISSING}; {REMEDY}ddp submit -e NAME ..."


def test_torch_compile_without_a_compiler_is_answered_with_the_package(
    settings: Settings, cluster: Cluster, pip: Pip, script: pathlib.Path
):
    error = "torch._inductor.exc.InvalidCxxCompiler: No working C++ compiler found in torch._inductor.config.cpp.cxx"
    assert fails(settings, cluster, script, error).endswith("an administrator types on the nodes: apt-get install g++")


@pytest.mark.parametrize("last_line", ["ValueError: x", "ImportError: cannot import name 'a' from 'b'"])
def test_other_failures_need_no_environment(
    settings: Settings, cluster: Cluster, pip: Pip, script: pathlib.Path, last_line: str
):
    assert fails(settings, cluster, script, last_line) == f"job 40 FAILED, exit code 1: {last_line}"


def test_a_container_brings_its_own(settings: Settings, cluster: Cluster, pip: Pip, script: pathlib.Path):
    line = fails(settings, cluster, script, MISSING, **{"container-image": "hf/pytorch:1"})
    assert line == f"job 40 FAILED, exit code 1: {MISSING}"
