"""Checkpoints: read lazily and by rows from wherever they are, written crash-safe to a destination.

To read, `open_checkpoint`; every kind of source then looks the same (`Checkpoint`). To write,
`plan_layout`, `ShardWriter` and `Journal` inside a `Staging`.
"""
