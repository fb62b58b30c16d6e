"""The servers of a volume that this unit serves, and who uses them."""
