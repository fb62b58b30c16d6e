"""The data of other units and applications. Besides charm.py, only these modules import ops."""
