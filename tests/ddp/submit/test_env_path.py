"""env path: a folder for the user's own job scripts."""

import subprocess

import pytest
from cluster import Cluster
from pip_double import Pip

from ddp.options import models
from ddp.problem import ParameterError
from ddp.settings import Settings
from ddp.submit import activation


def test_a_script_sources_the_environment_of_jobs(settings: Settings, pip: Pip, cluster: Cluster):
    path = activation.env_path(settings, models.EnvironmentPath(), print).text
    assert path is not None
    again = activation.env_path(settings, models.EnvironmentPath(), print)
    assert again.text == path, "the same content is stored once"

    script = f". {path}/bin/activate || exit 3; echo $SLURM_TASK_PROLOG; command -v python"
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=False)
    # This host cannot unpack it: its Python differs from the double's, whose zstd compresses
    # nothing
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.startswith("ddp: ")
    assert subprocess.run(["sh", "-n", f"{path}/bin/task-prolog"], check=True).returncode == 0


def test_an_environment_that_does_not_exist_is_refused(
    settings: Settings, pip: Pip, cluster: Cluster
):
    with pytest.raises(ParameterError, match="nope does not exist"):
        activation.env_path(settings, models.EnvironmentPath(name="nope"), print)
