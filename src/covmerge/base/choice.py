"""The method where none is named."""

from __future__ import annotations

UNNAMED = ""  # stands where no method is named
UNNAMED_NOTE = "no method is named: "  # and so a note begins that says which is taken
ALONE, PREFERRED = "average", "auto"  # of one expert, and of several
# What help, docstrings, schema and docs say; `tests/e2e/test_choice.py` holds them to it.
TAKEN = f"`{ALONE}` of one expert alone, which is added to its base, and `{PREFERRED}` of several"


def choose(count: int) -> tuple[str, str]:
    """Return the name of a method for some experts, and why it is that one.

    In the mean over the bank's sets of experts `auto` loses less than any single method without data
    (lab/docs/bank.md).

    Args:
        count: of experts.

    Example:
        >>> choose(1)[0], choose(4)[0]
        ('average', 'auto')
    """
    if count == 1:
        return ALONE, "one expert alone is added to its base, by its weight"
    return PREFERRED, "that is the default for several experts and needs no parameter"
