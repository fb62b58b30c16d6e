"""What the stand-ins for upstream's Slurm charms share: their relation data, munge's key, and Slurm's commands."""
