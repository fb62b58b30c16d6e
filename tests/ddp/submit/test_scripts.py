"""The files of a run: directives, program and specification."""

import dataclasses
import pathlib
import shlex
import typing

import pytest
from script_texts import ENDS, MANIFEST, REQUEST, texts

from batch_host import Node
from ddp.node import spec
from ddp.options import fields, models
from ddp.problem import ParameterError
from ddp.settings import Settings
from ddp.submit import resources, scripts


def directives(script: str) -> list[str]:
    return [
        line.removeprefix("#SBATCH --")
        for line in script.splitlines()
        if line.startswith("#SBATCH")
    ]


def test_the_script_is_directives_and_one_command(settings: Settings):
    given: dict[str, typing.Any] = {
        "constraint": "a100&ib",
        "account": "physics",
        "qos": "high",
        "reservation": "r1",
    }
    given |= {
        "nodelist": "n[1-2]",
        "exclude": "n3",
        "exclusive": True,
        "dependency": "afterok:40:41",
    }
    script = texts(settings, **given, sbatch="--nice=100 --spread-job --switches=1@60")[
        "job.sbatch"
    ]
    run_dir = settings.workspace.runs / "first"
    assert directives(script) == [
        "job-name=first",
        "partition=main",
        "nodes=2",
        "ntasks-per-node=1",
        "cpus-per-task=4",
        "mem=8000M",
        "gpus-per-node=1",
        "time=02:00:00",
        "account=physics",
        "qos=high",
        "reservation=r1",
        "constraint=a100&ib",
        "nodelist=n[1-2]",
        "exclude=n3",
        "exclusive",
        "dependency=afterok:40:41",
        "nice=100",
        "spread-job",
        "switches=1@60",
        f"chdir={run_dir}",
        f"output={run_dir}/logs/%j.out",
        "kill-on-invalid-dep=yes",
        "open-mode=append",
        "requeue",
        "propagate=NONE",
        "signal=B:USR1@180",
    ]
    program = (
        f"exec /usr/bin/python3 -I -S -B {run_dir}/program/ddp.pyz job {run_dir}/program/job.json"
    )
    assert [line for line in script.splitlines() if not line.startswith("#")] == [program]


def test_a_workspace_with_a_blank_is_quoted_for_sbatch_and_the_shell(
    settings: Settings, tmp_path: pathlib.Path
):
    workspace = dataclasses.replace(settings.workspace, path=tmp_path / "my h\u00f6me")
    settings = dataclasses.replace(settings, workspace=workspace)
    script = texts(settings)["job.sbatch"]
    assert f'chdir="{settings.workspace.runs}/first"' in directives(script)
    folder = f"{settings.workspace.runs}/first/program"
    assert shlex.split(script.splitlines()[-1])[5:] == [
        f"{folder}/ddp.pyz",
        "job",
        f"{folder}/job.json",
    ]


def test_unset_options_are_not_in_the_script(settings: Settings):
    script = texts(settings, resources.Request("main", 1, 0, 4, 8000, None, 180))["job.sbatch"]
    assert not [
        line
        for line in directives(script)
        if line.startswith(("gpus", "time", "account", "dependency"))
    ]


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ("--outp=/x", "sbatch: --output is set by the job itself, which relies on it; omit it"),
        ("--nice=1 --mem=5", "sbatch: --mem has its own option; use memory"),
        (
            "-t5",
            "sbatch: '-t5' is not allowed; sbatch's own long options, separated by blanks, such as --nice=100 ",
        ),
    ],
)
def test_arguments_that_would_break_the_job_are_refused(given: str, line: str):
    with pytest.raises(ParameterError) as caught:
        fields.parse(models.SubmitDdp, {"sbatch": given})
    assert str(caught.value).startswith(line)


def test_the_jobs_specification_lies_in_its_own_folder(settings: Settings):
    files = texts(settings)
    assert set(files) == {"job.sbatch", "program/job.json"}
    job = spec.parse(spec.JobSpec, files["program/job.json"])
    assert (job.run, job.job_dir, job.cache) == (
        "first",
        str(settings.workspace.runs / "first"),
        str(settings.workspace.node_cache),
    )
    assert job.environment is not None
    assert job.environment.trusted_uids == (settings.workspace.uid,)


def test_a_value_that_slipped_through_would_still_be_quoted(
    settings: Settings, node: Node, tmp_path: pathlib.Path
):
    evil = f"$(touch {tmp_path}/pwned) `touch {tmp_path}/pwned`; touch {tmp_path}/pwned '\" {{{{ 7*7 }}}}"
    params = models.SubmitDdp.model_construct()
    program = scripts.Program(("x", evil), leaves_outcome=True)
    job = scripts.TrainingJob(settings, REQUEST, params, "first", program)
    files = job.texts(MANIFEST.model_copy(update={"folder": evil}))
    node.add("srun", 'printf "%s\\n" "${!#}"; ' + ENDS % "done")
    code, output = node.run(files)
    assert code == 0, output
    assert output.splitlines()[1] == evil
    job = spec.load(spec.JobSpec, str(node.run_dir / "program" / "job.json"))
    assert job.environment is not None
    assert job.environment.layers[0].path == f"{evil}/{MANIFEST.hash}.tar.zst"
    assert not (tmp_path / "pwned").exists()
