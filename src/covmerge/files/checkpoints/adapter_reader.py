"""How checkpoints find adapters; `files/adapters` imports this folder, so only a call imports it."""

from __future__ import annotations


def adapter_reader():
    """Return the module that recognises and opens adapters."""
    from covmerge.files.adapters import checkpoint

    return checkpoint
