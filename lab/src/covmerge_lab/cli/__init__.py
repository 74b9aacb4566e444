"""The commands that the lab adds to `covmerge`, one module each."""
