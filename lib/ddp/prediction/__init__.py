"""A training step's time, from measurements on the cluster, and its memory."""
