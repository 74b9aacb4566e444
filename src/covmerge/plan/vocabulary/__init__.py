"""The output's vocabulary, if its sources have different ones."""
