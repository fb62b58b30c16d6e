"""The environment in which commands run."""

import os
import pathlib
import pwd
import sys

import pytest

from slurm_ddp import commands

CODE = "import os; print(sorted(os.environ), os.getcwd(), os.environ['HOME'])"


def test_nothing_of_this_process_is_inherited(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
):
    monkeypatch.setenv("JUJU_SECRET", "x")
    monkeypatch.setenv("SLURM_CONF", "/opt/slurm/slurm.conf")
    monkeypatch.setenv("http_proxy", "http://proxy")
    monkeypatch.setenv("HOME", "/somewhere")
    found = commands.run(sys.executable, "-I", "-c", CODE, cwd=tmp_path).stdout
    assert "JUJU" not in found
    assert "'SLURM_CONF'" in found
    assert "'http_proxy'" in found
    assert found.split()[-2:] == [os.path.realpath(tmp_path), pwd.getpwuid(os.geteuid()).pw_dir]


def test_the_chosen_cluster_reaches_slurms_commands(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SLURM_CLUSTERS", "west")
    monkeypatch.setenv("SBATCH_EXPORT", "NONE")
    given = commands.clean_env()
    assert given["SLURM_CLUSTERS"] == "west"
    assert "SBATCH_EXPORT" not in given, "an option of ddp's own job would be lost"
