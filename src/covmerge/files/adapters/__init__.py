"""Adapters: read over their base as one checkpoint, whatever library wrote them."""
