"""One module per relation interface: the schema that both sides read and write."""
