"""What the charms and the sandbox must agree on: commands, files, units, interface schemas."""
