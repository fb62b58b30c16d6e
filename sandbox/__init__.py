"""The bundle on one machine: systemd hosts, charm classes under ops.testing, Juju's events."""
