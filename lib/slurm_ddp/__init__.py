"""Code that the charms, ddp and the sandbox share: commands, files, units, interface schemas."""
