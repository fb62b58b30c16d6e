"""What runs on the machine by itself, without the charm: Python's standard library only."""
