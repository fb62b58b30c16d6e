"""One mount on this machine: its settings, its plan, systemd's units, its verdict, the actions."""
