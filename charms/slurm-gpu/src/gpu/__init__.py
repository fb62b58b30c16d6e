"""This machine's GPUs: which there are (detect), and the Gres and gres.conf lines that describe them."""
