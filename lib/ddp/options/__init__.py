"""Every option of the program, declared once, for flags, actions, checks, help and reference."""
