"""The bundle on one machine: systemd hosts, charms' own classes under ops.testing, Juju's events."""
