"""What a GPU does, on one: skipped where there is none."""
