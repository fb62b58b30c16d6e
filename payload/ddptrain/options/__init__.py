"""The options of the commands, and the settings that a run records, without torch or data."""
