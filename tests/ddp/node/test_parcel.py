"""The program that Slurm carries to the nodes in a variable."""

import pathlib
import shutil
import subprocess

from ddp.node import parcel, spec

PACKAGE = pathlib.Path(spec.__file__).parent


def test_a_node_runs_it_without_reading_a_file_of_it(tmp_path: pathlib.Path):
    shutil.copytree(PACKAGE, tmp_path / "ddp" / "node")
    (tmp_path / "ddp" / "__init__.py").touch()
    value = parcel.pack(str(tmp_path), "{}")
    shutil.rmtree(tmp_path / "ddp")
    argv = ["/usr/bin/python3", "-I", "-S", "-B", "-c", parcel.START, str(tmp_path), "node", "job.json", "train.py"]
    done = subprocess.run(argv, env={parcel.VARIABLE: value}, capture_output=True, text=True, timeout=60, check=False)
    assert f"SpecError: {tmp_path}/job.json: unknown or missing: " in done.stderr.splitlines()[-1], done.stderr


def test_linux_takes_it_as_one_variable():
    value = parcel.pack(str(PACKAGE.parents[1]), "x" * 20_000)
    assert len(value) < 128 * 1024  # MAX_ARG_STRLEN of execve(2)
