"""Where Slurm's commands are looked for."""

import pathlib

import pytest

from slurm_ddp.slurm import binaries


@pytest.fixture
def built(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A folder of PATH with a command that /usr/bin lacks, and one that it has."""
    for name in ("sbatch-of-a-test", "true"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"/usr/bin:/bin:{tmp_path}")
    return tmp_path


def test_a_slurm_that_an_administrator_built_is_found_in_path(built: pathlib.Path):
    found = binaries.find("sbatch-of-a-test")
    assert found == f"{built}/sbatch-of-a-test"
    assert binaries.variables(found)["PATH"].split(":")[:2] == [str(built), "/usr/local/sbin"]


def test_the_packages_commands_go_before_path(built: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", f"{built}:/usr/bin")
    assert binaries.find("true") == "/usr/bin/true"
    assert binaries.variables("/usr/bin/true") == {}


def test_a_command_that_is_nowhere_is_that_of_the_package(built: pathlib.Path):
    assert binaries.find("scontrol-of-nobody") == "/usr/bin/scontrol-of-nobody"
