"""Score models with a scorer that the caller names."""
