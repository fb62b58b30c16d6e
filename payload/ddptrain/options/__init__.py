"""The options of the commands, and the settings that a run records. Needs neither torch nor the data."""
