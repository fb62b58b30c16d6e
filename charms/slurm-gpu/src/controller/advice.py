"""What to type for slurm.conf to have the settings that GPUs need, in one place."""

import collections.abc
import pathlib

from slurm_ddp.slurm import advice

PROGRAM = pathlib.Path("/usr/local/sbin/gpu-health")
HEALTH_CHECK = {"HealthCheckProgram": str(PROGRAM), "HealthCheckInterval": "300"}

command = advice.slurm_conf


def gres_types(names: collections.abc.Iterable[str]) -> str:
    """Return the command that lets Gres have these names."""
    return command({"GresTypes": ",".join(sorted(names))})
