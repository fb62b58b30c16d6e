"""What units publish to each other. Besides charm.py, only these modules import ops."""
