"""The method where none is named."""

from __future__ import annotations

AUTO = "auto"  # no method is named: what the experts are decides


def choose(count: int, adapters: int) -> tuple[str, str]:
    """Return the name of a method for some experts, and why it is that one.

    No method suits all. Of really trained experts ACE did well on full models, and took adapters
    below their base, where Core Space did best of what needs no data (README.md). It needs all of
    them by their factors, so a mixture of both kinds is merged as full models are.

    Args:
        count: of experts.
        adapters: how many of them are adapters.

    Example:
        >>> choose(1, 1)[0], choose(4, 4)[0], choose(4, 0)[0], choose(4, 1)[0]
        ('average', 'core_space', 'ace', 'ace')
    """
    if count == 1:
        return "average", "one expert alone is added to its base as it is"
    if adapters == count:
        return "core_space", "all experts are adapters, on which ace mostly falls below the base"
    if adapters:
        return "ace", "core_space, the choice for adapters, has no place for full models"
    return "ace", "the experts are full models"
