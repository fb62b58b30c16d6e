"""The output of srun's task prolog for a user's own job script."""

import hashlib
import io
import os
import pathlib
import subprocess
import sys
import tarfile

import pytest

from ddp.node import network, spec
from ddp.submit import job_program

SCONTROL = """#!/bin/sh
case "$*" in
"show hostnames"*) printf 'n1\\nn2\\n' ;;
*) printf 'NodeName=n1 Arch=x86_64 NodeAddr={address}\\nNodeName=n2 Arch=x86_64 NodeAddr={address}\\n' ;;
esac
"""


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    """The program with an environment of one file, and a Slurm of two nodes on PATH."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        interpreter = tarfile.TarInfo("./bin/python")
        interpreter.type, interpreter.linkname = tarfile.SYMTYPE, sys.executable
        tar.addfile(interpreter)
    argv = ["zstd", "-q", "-c"]
    data = subprocess.run(argv, input=packed.getvalue(), check=True, capture_output=True).stdout
    archive = tmp_path / "abc.tar.zst"
    archive.write_bytes(data)
    digest = hashlib.sha256(data).hexdigest()
    layer = spec.Archive(str(archive), digest, 100, "ddp env install")
    wanted = spec.Environment((layer,), str(tmp_path / "cache"), "", (os.getuid(),))

    (tmp_path / "environment.json").write_text(spec.dump(wanted))
    (tmp_path / spec.PROGRAM).write_bytes(job_program.archive())

    others = [one for one in network.addresses() if not one.startswith("127.")]
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text(SCONTROL.format(address=others[0] if others else "192.0.2.1"))
    scontrol.chmod(0o755)
    return tmp_path


def printed(folder: pathlib.Path, **env: str) -> tuple[int, dict[str, str], str]:
    """Return the exit code, the variables and the text that a node prints."""
    argv = ["/usr/bin/python3", "-I", "-S", "-B", str(folder / spec.PROGRAM)]
    env["PATH"] = f"{folder}/bin:/usr/bin:/bin"
    done = subprocess.run(
        [*argv, "activate", str(folder / "environment.json")],
        capture_output=True,
        text=True,
        env=env,
        check=False,
    )
    lines = done.stdout.splitlines()
    exports = [line.removeprefix("export ") for line in lines if line.startswith("export ")]
    texts = [line.removeprefix("print ") for line in lines if line.startswith("print ")]
    variables: dict[str, str] = {}
    for one in exports:
        name, _, value = one.partition("=")
        variables[name] = value
    return done.returncode, variables, "\n".join(texts)


JOB = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURMD_NODENAME": "n1"}


def test_outside_a_job_it_sets_the_path_alone(folder: pathlib.Path):
    code, variables, _ = printed(folder)
    first, *others = variables.pop("PATH").split(":")
    assert (code, variables) == (0, {})
    assert first == f"{folder}/cache/abc/bin"
    assert pathlib.Path(first, "python").exists()
    assert others == [f"{folder}/bin", "/usr/bin", "/bin"]


@pytest.mark.skipif(len(network.addresses()) < 2, reason="this machine has no network")
def test_the_script_gets_the_first_nodes_address_and_a_task_its_own(folder: pathlib.Path):
    code, script, _ = printed(folder, **JOB)
    assert code == 0
    assert 20000 <= int(script["MASTER_PORT"]) < 30000
    assert script["GLOO_SOCKET_IFNAME"] == network.addresses()[script["MASTER_ADDR"]]
    assert "PET_LOCAL_ADDR" not in script

    _, task, _ = printed(folder, **JOB, SLURM_STEP_ID="0", GLOO_SOCKET_IFNAME="mine")
    assert task["PET_LOCAL_ADDR"] == script["MASTER_ADDR"]
    assert task["GLOO_SOCKET_IFNAME"] == "mine"
    assert "MASTER_ADDR" not in task


def test_a_node_that_cannot_unpack_it_says_why(folder: pathlib.Path):
    (folder / "abc.tar.zst").unlink()
    code, variables, text = printed(folder)
    assert (code, variables) == (1, {})
    assert text.startswith(f"ddp: {folder}/abc.tar.zst cannot be read")
