"""This machine's GPUs: what is there (detect), and the Gres and gres.conf lines for it."""
