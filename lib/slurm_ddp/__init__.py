"""What the charms of slurm-ddp and the sandbox must agree on: commands, files, units and interface schemas."""
