"""Checks that experts fit their base, the same in an inspection and in a merge."""
