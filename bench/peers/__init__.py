"""What runs the peers' own programs: nothing of theirs is written again here, and none of their code is copied."""
