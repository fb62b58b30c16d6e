"""What submission and reports ask Slurm: partitions, batch jobs, and who may run where."""
