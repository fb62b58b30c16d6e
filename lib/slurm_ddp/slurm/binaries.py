"""Where Slurm's commands are: in /usr/bin, or in a folder of PATH after a build from source."""

import os
import pathlib
import shutil

from slurm_ddp.commands import PATH


def find(name: str) -> str:
    """Find the path of one of Slurm's commands."""
    usual = f"/usr/bin/{name}"
    return usual if os.access(usual, os.X_OK) else shutil.which(name) or usual


def variables(command: str) -> dict[str, str]:
    """Build the environment of a command from another folder.

    Jobs inherit its PATH, and call srun.
    """
    folder = str(pathlib.Path(command).parent)
    return {} if folder in PATH.split(":") else {"PATH": f"{folder}:{PATH}"}
