"""What parts of a recipe have in common: known keys, and methods and steps with their parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict

from covmerge.base.errors import RecipeError
from covmerge.plan.recipe.strict_yaml import parse_yaml

# What every part of a recipe is: keys that are known, and nothing that changes.


class StrictModel(BaseModel):
    """A part of a recipe."""

    model_config = ConfigDict(extra="forbid", frozen=True)


# `NAME(KEY=VALUE, ...)`: a method or step with its parameters, written the same wherever one is named.

_OPEN, _CLOSED = "([{", ")]}"


def read_call(text: str, beside: Mapping[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
    """Return the name, and the parameters in parentheses behind it; values are YAML, as in a recipe.

    Args:
        text: what is called, and how.
        beside: parameters that are given elsewhere.

    Raises:
        RecipeError: it is not of this form, or a parameter is given twice.

    Example:
        >>> read_call("linear(weight=[1, -1], normalize=false)")
        ('linear', {'weight': [1, -1], 'normalize': False})
        >>> read_call("ties")
        ('ties', {})
    """
    name, opened, rest = text.strip().partition("(")
    found: dict[str, Any] = dict(beside or {})
    if not opened:
        return name, found
    pairs = [entry.partition("=") for entry in split(rest.removesuffix(")"))]
    whole = name.strip() and rest.endswith(")")
    if not whole or not all(key.strip() and value.strip() for key, _, value in pairs):
        raise RecipeError(
            f"{text.strip()!r} is not NAME(KEY=VALUE,...), such as task_arithmetic(scale=0.3)"
        )
    for key, _, value in pairs:
        if key.strip() in found:
            raise RecipeError(f"{text.strip()!r}: '{key.strip()}' is given twice: give it once")
        found[key.strip()], _ = parse_yaml(value, text.strip())
    return name.strip(), found


def split(text: str) -> list[str]:
    """Split at the commas that are in no brackets.

    Example:
        >>> split("ties, linear(weight=[1, 2])")
        ['ties', ' linear(weight=[1, 2])']
    """
    found, depth = [""], 0
    for letter in text:
        depth += (letter in _OPEN) - (letter in _CLOSED)
        if letter == "," and depth == 0:
            found.append("")
        else:
            found[-1] += letter
    return found
