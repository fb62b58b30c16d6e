"""What a cluster can do: collectives measured, training steps predicted."""
