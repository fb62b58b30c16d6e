"""Where Slurm's commands are: /usr/bin, or where administrators built Slurm themselves, a folder of PATH."""

import os
import pathlib
import shutil

from slurm_ddp.commands import PATH


def find(name: str) -> str:
    """Find the path of one of Slurm's commands."""
    usual = f"/usr/bin/{name}"
    return usual if os.access(usual, os.X_OK) else shutil.which(name) or usual


def variables(command: str) -> dict[str, str]:
    """Make what a command from another folder needs in its environment: jobs inherit its PATH, and call srun."""
    folder = str(pathlib.Path(command).parent)
    return {} if folder in PATH.split(":") else {"PATH": f"{folder}:{PATH}"}
