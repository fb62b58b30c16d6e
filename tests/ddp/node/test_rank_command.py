"""The words behind torchrun's options: what runs a script, a module, and any other program."""

import os
import pathlib
import subprocess
import typing

import pytest
from job_specs import make

from ddp.node import exit_codes, rank_command, spec

PORT = {"PROGRAM_PORT": "20200"}
HEADS = {
    "of-a-venv": "#!/opt/env/bin/python3\n",
    "of-uv": "#!/bin/sh\n'''exec' \"$(dirname -- \"$0\")\"/'python' \"$0\" \"$@\"\n' '''\n",
    "of-a-shell": "#!/bin/bash\n",
}


def words(
    folder: pathlib.Path, *given: str, env: dict[str, str] | None = None, **more: typing.Any
) -> list[str]:
    """Return the words for a job, from behind those that clear torchrun's variables."""
    job: spec.JobSpec = make(folder / "runs" / "first", **more)
    return rank_command.of(job, "/env/bin/python", [*given], {**PORT, **(env or {})})


@pytest.fixture
def commands(tmp_path: pathlib.Path) -> dict[str, str]:
    """The variables of an environment with HEADS' commands."""
    for name, head in HEADS.items():
        (tmp_path / name).write_text(head)
        (tmp_path / name).chmod(0o755)
    return {"PATH": str(tmp_path)}


@pytest.mark.parametrize("given", [("train.py", "1"), ("--module", "a.b", "1")])
def test_torchrun_starts_a_script_or_module_itself(tmp_path: pathlib.Path, given: tuple[str, ...]):
    assert words(tmp_path, *given) == [*given]


@pytest.mark.parametrize("name", HEADS)
def test_a_command_is_looked_up_on_the_environments_path(
    tmp_path: pathlib.Path, commands: dict[str, str], name: str
):
    found = words(tmp_path, name, "1", env=commands, is_command=True)
    expected = [str(tmp_path / name), "1"]
    assert found == (["--no-python", *expected] if name == "of-a-shell" else expected)


def test_a_command_that_is_missing_has_its_remedy(tmp_path: pathlib.Path, commands: dict[str, str]):
    with pytest.raises(exit_codes.FatalError, match=r"^trl is not a command of the job's .*\(-r\)"):
        words(tmp_path, "trl", "sft", env=commands, is_command=True)


def test_one_process_a_node_runs_any_program(tmp_path: pathlib.Path, commands: dict[str, str]):
    script, binary = tmp_path / "run.sh", tmp_path / "of-a-shell"
    script.write_text("true\n")
    expected = {
        ("train.py", "1"): ["/env/bin/python", "-u", "train.py", "1"],
        ("--module", "a.b", "1"): ["/env/bin/python", "-u", "-m", "a.b", "1"],
        (str(script), "1"): ["bash", str(script), "1"],
        (str(binary), "1"): [str(binary), "1"],
    }
    for given, program in expected.items():
        found = words(tmp_path, *given, launcher="node")
        assert found[:2] == ["--no-python", "/usr/bin/env"]
        assert found[-len(program) :] == program
    found = words(tmp_path, "of-uv", "1", env=commands, launcher="node", is_command=True)
    assert found[-2:] == [str(tmp_path / "of-uv"), "1"]


def test_one_process_a_node_has_a_port_of_its_own_and_nothing_of_torchruns_agent(
    tmp_path: pathlib.Path,
):
    script = tmp_path / "run.sh"
    script.write_text("env\n")
    found = words(tmp_path, str(script), launcher="node")
    torchruns = {
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_RANK": "1",
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "20100",
    }
    done = subprocess.run(
        found[1:],
        env={"PATH": os.defpath, **torchruns},
        capture_output=True,
        text=True,
        check=True,
    )
    shown: dict[str, str] = {}
    for line in done.stdout.splitlines():
        name, _, shown[name] = line.partition("=")
    for name in ("TORCHELASTIC_USE_AGENT_STORE", "LOCAL_WORLD_SIZE", "GROUP_RANK"):
        assert name not in shown
    kept = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")
    assert [shown[name] for name in kept] == [torchruns[name] for name in kept]
    assert shown["MASTER_PORT"] == "20200"


@pytest.mark.parametrize(
    ("more", "number"),
    [
        ({"ranks_per_node": 2, "gpus_per_node": 4}, 2),
        ({"launcher": "node", "gpus_per_node": 4}, 4),
        ({"launcher": "node"}, 1),
    ],
)
def test_the_cores_are_shared_by_the_ranks_that_a_program_will_start(
    tmp_path: pathlib.Path, more: dict[str, typing.Any], number: int
):
    assert rank_command.num_launched(make(tmp_path / "runs" / "first", **more)) == number
