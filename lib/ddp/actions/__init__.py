"""The actions: each is a function from its options to a result."""
