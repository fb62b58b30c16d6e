"""The bundle on one machine: systemd hosts, the charms' own classes under ops.testing, and Juju's order of events."""
