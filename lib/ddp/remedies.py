"""Remedies that several modules give, and the settings of slurm.conf that they name.

Upstream's charms take what slurmutils' schema accepts (slurmctld config.py, slurmd config.py; case matters), and a
rejected value stops slurmctld's charm from handling any event. So a test parses each line below with that schema.
"""

from ddp.base import Settings
from ddp.problem import Step

# slurmctld looks the account up to sign what starts a job (fetch_identity() in cred.c), not when it is submitted.
# Without one srun prints this (slurm_errno.c), and a batch job is held: JobHeldAdmin in 24.11.5.
NO_CREDENTIAL = "Error generating job credential"
HELD = ("JobHeldAdmin", "slurm_cred_create failure")

KILL_WAIT = "KillWait=30"
PROCTRACK = "ProctrackType=proctrack/cgroup"
SELECT = "SelectType=select/cons_tres"
JOB_REQUEUE = "JobRequeue=1"
MAX_ARRAY_SIZE = "MaxArraySize=1001"
PREEMPT_MODE = "PreemptMode=requeue"  # of a partition: slurmutils rejects it for the cluster


def unknown_account(settings: Settings) -> tuple[str, Step]:
    """Give the error of a slurmctld that does not know the submit user, and the remedy."""
    text = f"slurmctld does not know the account {settings.user} (uid {settings.uid})"
    add = f"useradd --no-create-home --uid {settings.uid} {settings.user}"
    return text, Step("add-account", f"on slurmctld's host, as root: {add}", {"command": add})


def slurm_conf(line: str) -> Step:
    """Put a setting into slurm.conf."""
    return Step("slurm-conf", f"set {line} in slurm.conf, then: scontrol reconfigure", {"line": line})


def partition_config(partition: str, setting: str) -> Step:
    """Put a setting into a partition's line of slurm.conf."""
    text = f"set {setting} in the line of partition {partition} in slurm.conf, then: scontrol reconfigure"
    return Step("partition-config", text, {"partition": partition, "setting": setting})


def start_slurmctld() -> Step:
    """Make the controller respond."""
    return Step("start-slurmctld", "is slurmctld up? see: scontrol ping")


def check_filesystem() -> Step:
    """Make the server of the shared filesystem respond."""
    return Step("check-filesystem", "is the filesystem's server up? see: findmnt")


def change_owner(user: str, path: str) -> Step:
    """Give a path to an account."""
    return Step("change-owner", f"as root, on the filesystem's server or here: chown {user} {path}")
