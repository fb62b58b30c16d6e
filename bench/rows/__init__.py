"""One module per measure. Each has `run(scratch) -> list[Row]` and takes less than three minutes on two cores."""
