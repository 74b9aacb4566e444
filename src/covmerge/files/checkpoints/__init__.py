"""Checkpoints: read lazily and by rows from any place, and written crash-safely to a destination.

To read, use `open_checkpoint`; it returns a `Checkpoint` for every kind of source. To write, use
`plan_layout`, `ShardWriter` and `Journal` inside a `Staging`.
"""
