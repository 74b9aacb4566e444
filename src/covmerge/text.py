"""Names for people, on terminals and on pages."""

from __future__ import annotations

from collections.abc import Sequence


def printable(text: str) -> str:
    r"""Return text that a terminal shows and does not obey: names come from strangers' files.

    Example:
        >>> printable("layer\x1b[2J\nnext")
        'layer�[2J\nnext'
    """
    return "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text)


def some(names: Sequence[str], limit: int = 4) -> str:
    """Name the first few.

    Example:
        >>> some(["a", "b", "c"], limit=2)
        'a, b and 1 more'
    """
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
