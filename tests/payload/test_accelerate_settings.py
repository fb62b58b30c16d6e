"""The variables of `accelerate launch`, besides those that its own launcher gives to its ranks."""

import importlib
import json
import os
import pathlib
import subprocess
import sys
import typing

import pytest

import ddp
from ddp.node import accelerate_settings, exit_codes, spec
from slurm_ddp import backports

pytest.importorskip("accelerate")
PRINT = """
import json, os, sys
if os.environ.get("RANK", "0") == "0":
    with open(sys.argv[1], "w") as file:
        json.dump(dict(os.environ), file)
"""
FSDP = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
mixed_precision: bf16
num_machines: 1
num_processes: 2
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_transformer_layer_cls_to_wrap: Block
"""
CPU = "compute_environment: LOCAL_MACHINE\ndistributed_type: 'NO'\nuse_cpu: true\nmixed_precision: bf16\n"
# torchrun's and Python's
OTHERS = ("MASTER_", "TORCH", "GROUP_", "ROLE_", "LOCAL_", "RANK", "WORLD_SIZE", "LC_CTYPE")


def environment(nodes: int = 1) -> dict[str, str]:
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    slurm = {"SLURM_STEP_NUM_NODES": str(nodes), "SLURM_NODEID": "0", "HEAD_IP": "127.0.0.1"}
    return {**kept, **slurm, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HOME": "/none"}


def launched(folder: pathlib.Path, *words: str) -> dict[str, str]:
    """Return the variables of rank 0 under accelerate's own launcher."""
    (folder / "show.py").write_text(PRINT)
    argv = [sys.executable, "-m", "accelerate.commands.launch", *words]
    argv += ["--main_process_port=0", "--num_machines=1", "show.py", "shown.json"]
    done = subprocess.run(
        argv, cwd=folder, env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    shown: dict[str, str] = json.loads((folder / "shown.json").read_text())
    return {name: value for name, value in shown.items() if not name.startswith(OTHERS)}


@pytest.mark.parametrize(
    ("configuration", "words", "num_ranks"),
    [
        (FSDP, ("--gradient_accumulation_steps=2",), 2),
        pytest.param(
            "",
            ("--multi_gpu", "--mixed_precision=bf16", "--dynamo_backend=inductor"),
            2,
            marks=pytest.mark.long,
        ),
        pytest.param(CPU, (), 1, marks=pytest.mark.long),
    ],
    ids=["file", "flags", "cpu"],
)
def test_the_variables_are_those_of_its_own_launcher(
    tmp_path: pathlib.Path, configuration: str, words: tuple[str, ...], num_ranks: int
):
    settings = spec.Accelerate(words, configuration, ".yaml")
    given = environment()
    found = accelerate_settings.variables(settings, sys.executable, given, num_ranks=num_ranks)
    own = [*words, f"--num_processes={num_ranks}"]
    if configuration:
        (tmp_path / "config.yaml").write_text(configuration)
        own.insert(0, "--config_file=config.yaml")
    wanted = launched(tmp_path, *own)
    assert "ACCELERATE_MIXED_PRECISION" in found
    shown: dict[str, str] = {}
    for name, value in wanted.items():
        if given.get(name) != value:
            shown[name] = value
    assert found == shown


def test_machines_and_processes_are_the_jobs_whatever_the_file_says():
    settings = spec.Accelerate((), FSDP.replace("processes: 2", "processes: 8"), ".yaml")
    found = accelerate_settings.variables(settings, sys.executable, environment(2), num_ranks=2)
    assert found["ACCELERATE_USE_FSDP"] == "true"
    assert not {"MASTER_ADDR", "CUDA_VISIBLE_DEVICES"} & set(found)


@pytest.mark.parametrize(
    ("words", "python", "reason"),
    [
        (("--mixed_precision=fp7",), sys.executable, "invalid choice: 'fp7'"),
        ((), "/nowhere/python", "No such file"),
    ],
)
def test_refusals_of_its_parser_are_one_line(words: tuple[str, ...], python: str, reason: str):
    with pytest.raises(exit_codes.FatalError, match=f"^accelerate launch: .*{reason}"):
        accelerate_settings.variables(spec.Accelerate(words), python, environment(), num_ranks=2)


def test_an_environment_without_accelerate_has_its_remedy(tmp_path: pathlib.Path):
    python = tmp_path / "python"
    python.write_text(
        "#!/bin/sh\necho \"ModuleNotFoundError: No module named 'accelerate'\" >&2\nexit 1\n"
    )
    python.chmod(0o755)
    with pytest.raises(
        exit_codes.FatalError, match=r"lacks accelerate; add it to requirements\.txt"
    ):
        accelerate_settings.variables(spec.Accelerate(), str(python), environment(), num_ranks=2)


@pytest.mark.parametrize("name", ["accelerate", "torchrun"])
def test_the_flags_without_a_value_are_those_of_the_launchers_parser(name: str):
    module, function = {
        "accelerate": ("accelerate.commands.launch", "launch_command_parser"),
        "torchrun": ("torch.distributed.run", "get_args_parser"),
    }[name]
    parser: typing.Any = getattr(importlib.import_module(module), function)()
    switches: set[str] = set()
    for action in parser._actions:  # argparse shows them nowhere else
        if action.nargs == 0:
            switches |= {word.lstrip("-").replace("_", "-") for word in action.option_strings}
    table = backports.read_toml(pathlib.Path(ddp.__file__).parent / "submit" / "launchers.toml")
    entry = table[name]
    assert switches - {"h", "help"} == {*entry["switches"], *entry["module"], *entry["command"]}
