"""The common part of the stand-ins for Slurm charms: statuses, deferral, databags, files."""
