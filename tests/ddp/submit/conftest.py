"""A workspace in a temporary folder, and a host whose Slurm commands are doubles."""

from trainer_fixtures import charm_dir, claims, node, settings, workspace

__all__ = ["charm_dir", "claims", "node", "settings", "workspace"]
