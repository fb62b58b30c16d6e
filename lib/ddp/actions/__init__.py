"""The commands on runs; each takes the settings, its options and a log, and returns a result."""
