"""The common part of the stand-ins for upstream's Slurm charms: statuses, deferral, databags, files, commands."""
