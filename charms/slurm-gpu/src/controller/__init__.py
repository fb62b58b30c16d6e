"""The controller's side: the nodes' lines merged into gres.conf, and what slurm.conf must hold."""
