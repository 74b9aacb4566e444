"""Text of strangers' files, for terminals and pages."""

from __future__ import annotations


def printable(text: str) -> str:
    r"""Return text that a terminal shows and does not obey: names come from strangers' files.

    Example:
        >>> printable("layer\x1b[2J\nnext")
        'layer�[2J\nnext'
    """
    return "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text)
