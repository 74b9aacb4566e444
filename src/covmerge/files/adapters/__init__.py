"""Adapters: readers that show any library's adapter over its base as one checkpoint."""
