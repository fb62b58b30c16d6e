"""Every option of the program, declared once: flag, action parameter, check, help and reference follow from it."""
