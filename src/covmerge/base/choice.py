"""The method where none is named."""

from __future__ import annotations

UNNAMED = ""  # stands where no method is named
ALONE, PREFERRED = "average", "auto"  # of one expert, and of several
# What help, docstrings, schema and docs say; `tests/e2e/test_choice.py` holds them to it.
TAKEN = f"`{ALONE}` of one expert alone, which is added to its base, and `{PREFERRED}` of several"


def choose(count: int) -> tuple[str, str]:
    """Return the name of a method for some experts, and why it is that one.

    In the mean of all suites of really trained experts `auto` is above every other method without data,
    with the base's inputs and without (docs/auto-results.md has those on which it is not).

    Args:
        count: of experts.

    Example:
        >>> choose(1)[0], choose(4)[0]
        ('average', 'auto')
    """
    if count == 1:
        return ALONE, "one expert alone is added to its base, by its weight"
    return PREFERRED, "that is the default for several experts and needs no parameter"
