"""The method where none is named."""

from __future__ import annotations

UNNAMED = ""  # stands where no method is named
PREFERRED = "auto"  # where it is known to do best


def choose(count: int, adapters: int, *, base_inputs: bool) -> tuple[str, str]:
    """Return the name of a method for some experts, and why it is that one.

    Of really trained experts `auto` did best on adapters, and on full models too where it knows what the
    base's layers see. Without that it beat ACE on sentences and fell eight points behind it on a language
    model (docs/auto-log.md).

    Args:
        count: of experts.
        adapters: how many of them are adapters.
        base_inputs: whether there are statistics of the base.

    Example:
        >>> choose(1, 1, base_inputs=False)[0], choose(4, 4, base_inputs=False)[0]
        ('average', 'auto')
        >>> choose(4, 0, base_inputs=False)[0], choose(4, 0, base_inputs=True)[0]
        ('ace', 'auto')
    """
    if count == 1:
        return "average", "one expert alone is added to its base as it is"
    if base_inputs:
        return PREFERRED, "it is known what the base's layers see"
    if adapters == count:
        return PREFERRED, "all experts are adapters"
    return (
        "ace",
        "of full models auto wants to know what the base's layers see (--base-stats random)",
    )
