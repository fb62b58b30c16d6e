"""Remedies that several modules give."""

from ddp.problem import Step

# slurmctld looks an account up to sign what starts a job (fetch_identity() in cred.c), not when it is submitted.
# Without one a batch job is held: JobHeldAdmin in 24.11.5.
HELD = ("JobHeldAdmin", "slurm_cred_create failure")
START_SLURMCTLD = Step("start-slurmctld", "is slurmctld up? see: scontrol ping")
# Slurm is not configured on this host
USE_LOGIN_NODE = Step("start-slurmctld", "use a login node, or see: scontrol ping")
CHECK_FILESYSTEM = Step("check-filesystem", "is the filesystem's server up? see: findmnt")
