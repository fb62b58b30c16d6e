"""Questions to Slurm, for submission and reports: partitions, batch jobs, permissions."""
