"""Commands for an operator that change Slurm's configuration through upstream's charms.

Each of their options is one text.

They read an option with slurmutils, which refuses a setting that is in it twice, in upper or lower
case, and then the charm handles no event any more. Each command keeps the option's content, except
earlier values of the same settings.
"""

import collections.abc
import shlex


def slurm_conf(settings: collections.abc.Mapping[str, str]) -> str:
    """Write the command that sets these in slurm.conf, one per line as slurmutils reads them."""
    option = "juju config slurmctld slurm-conf-parameters"
    names = "|".join(settings)
    lines = " ".join(shlex.quote(f"{name}={value}") for name, value in settings.items())
    return f"""{option}="$({option} | grep -viE '^[[:space:]]*({names})[[:space:]]*='; printf '%s\\n' {lines})\""""


def partition_config(partition: str, name: str, value: str) -> str:
    """Write the command that sets this in a partition's one line.

    The partition has the name of slurmd's application.
    """
    option = f"juju config {shlex.quote(partition)} partition-config"
    earlier = f"(^|[[:space:]]+){name}=[^[:space:]]*"
    return (
        f"""{option}="$({option} | sed -E 's/{earlier}//Ig') {shlex.quote(f"{name}={value}")}\""""
    )
