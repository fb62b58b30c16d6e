"""One module per measure. Each has `run(scratch) -> list[Row]`."""
