"""What can be asked for: each action is a function from its options to a result."""
