"""Remedies that several modules give."""

from ddp.problem import Step

# slurmctld looks an account up when a job starts (fetch_identity() in cred.c), not at submission.
# Without one a batch job is held: JobHeldAdmin in 24.11.5.
HELD = ("JobHeldAdmin", "slurm_cred_create failure")
START_SLURMCTLD = Step("start-slurmctld", "is slurmctld up? see: scontrol ping")
# Slurm is not configured on this host
USE_LOGIN_NODE = Step("start-slurmctld", "use a login node, or see: scontrol ping")
CHECK_FILESYSTEM = Step("check-filesystem", "is the filesystem's server up? see: findmnt")
