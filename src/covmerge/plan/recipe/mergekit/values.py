"""What mergekit takes for a number, and for a truth value."""

from __future__ import annotations

import math

from covmerge.plan.recipe.strict_yaml import unquoted

_TRUE, _FALSE = ("true", "yes", "on", "t", "y"), ("false", "no", "off", "f", "n")


def as_number(value: object) -> int | float:
    """Return a number, quoted or not.

    Raises:
        ValueError: it is none, or not a finite one.

    Example:
        >>> as_number("1e-1")
        0.1
    """
    found = as_finite(value)
    if isinstance(found, bool) or not isinstance(found, int | float):
        raise ValueError("it is a number, such as 0.5")
    return found


def as_whole(value: object) -> int:
    """Return a whole number; one with a point too, if there is nothing behind it.

    Raises:
        ValueError: it is none.

    Example:
        >>> as_whole(10.0), as_whole("3")
        (10, 3)
    """
    found = as_number(value)
    if found != int(found):
        raise ValueError("it is a whole number, such as 10")
    return int(found)


def as_switch(value: object) -> bool:
    """Return a truth value: true or false, or one of the words and numbers that mergekit takes for it.

    Raises:
        ValueError: it is none.

    Example:
        >>> as_switch(True), as_switch("off"), as_switch(1)
        (True, False, True)
    """
    found = unquoted(value)
    if isinstance(found, int | float) and found in (0, 1):
        return bool(found)
    word = found.strip().lower() if isinstance(found, str) else ""
    if word in (*_TRUE, *_FALSE):
        return word in _TRUE
    raise ValueError("it is true or false")


def as_finite(value: object) -> object:
    """Return a value without its quotes, if it would be a number or a truth value without them.

    Raises:
        ValueError: it is a number that is not finite.

    Example:
        >>> as_finite("2"), as_finite("bfloat16")
        (2, 'bfloat16')
    """
    found = unquoted(value)
    try:
        number = float(found) if isinstance(found, float | str) else 0.0  # "nan" is one to Python
    except ValueError:
        return found
    if not math.isfinite(number):
        raise ValueError("numbers must be finite")
    return found
