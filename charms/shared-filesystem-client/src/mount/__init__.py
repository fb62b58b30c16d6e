"""One mount on this machine: its settings, its plan, systemd's units, the verdict on it, the actions."""
