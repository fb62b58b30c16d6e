"""What other units and applications publish and are given. Besides charm.py, only these modules import ops."""
