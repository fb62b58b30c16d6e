"""The commands that change Slurm's configuration through upstream's charms.

These accept what slurmutils' schema accepts (slurmctld config.py, slurmd config.py; case matters), and a refused value
stops slurmctld's charm from handling any event. So a test parses each line below with that schema.
"""

from ddp.base import Settings
from slurm_ddp.slurm import advice

# slurmctld looks the account up to sign what starts a job (fetch_identity() in cred.c), not when it is submitted. Where
# it has none, srun prints this (slurm_errno.c), and a batch job is held: JobHeldAdmin in 24.11.5.
NO_CREDENTIAL = "Error generating job credential"
HELD = ("JobHeldAdmin", "slurm_cred_create failure")

KILL_WAIT = "KillWait=30"
PROCTRACK = "ProctrackType=proctrack/cgroup"
SELECT = "SelectType=select/cons_tres"
JOB_REQUEUE = "JobRequeue=1"
MAX_ARRAY_SIZE = "MaxArraySize=1001"
PREEMPT_MODE = "PreemptMode=requeue"  # of a partition: slurmutils refuses it for the cluster


def unknown_account(settings: Settings) -> tuple[str, str]:
    """Return the error where slurmctld does not know the submit user, and the command that adds the account."""
    text = f"slurmctld does not know the account {settings.user} (uid {settings.uid})"
    add = f"juju exec --application slurmctld -- useradd --no-create-home --uid {settings.uid} {settings.user}"
    return text, add


def slurm_conf(line: str) -> str:
    """Return the command that puts a setting into slurm.conf."""
    name, _, value = line.partition("=")
    return advice.slurm_conf({name: value})


def partition_config(partition: str, setting: str) -> str:
    """Return the command that puts a setting into a partition's line."""
    name, _, value = setting.partition("=")
    return advice.partition_config(partition, name, value)
