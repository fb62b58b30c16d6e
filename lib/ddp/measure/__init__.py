"""A cluster's performance: collectives measured, training steps predicted."""
