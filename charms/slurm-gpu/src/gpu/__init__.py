"""This machine's GPUs (detect), and their Gres and gres.conf lines."""
