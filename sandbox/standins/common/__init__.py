"""What the stand-ins for upstream's Slurm charms share: statuses and deferral, databags, Slurm's files and commands."""
