"""The bank: many small sets of experts over many kinds of bases, and how every method does on each."""

from typing import Literal

# What `covmerge bank score` scores: see `run.score`.
What = Literal["methods", "candidates", "constants", "inputs", "halves", "criteria"]
