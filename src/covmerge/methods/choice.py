"""The method where none is named."""

from __future__ import annotations

AUTO = "auto"  # stands where no method is named, and is the name of what is taken


def choose(count: int) -> tuple[str, str]:
    """Return the name of a method for so many experts, and why it is that one.

    Example:
        >>> choose(1)[0], choose(4)[0]
        ('average', 'auto')
    """
    if count == 1:
        return "average", "one expert alone is added to its base as it is"
    return AUTO, "which needs no tuning"
