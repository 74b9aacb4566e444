"""Checkpoints, adapters and quantised formats, where they lie and what their tensors are."""
