"""Helpers for parts of a recipe: a strict model, and methods and steps with parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict

from covmerge.base.errors import RecipeError
from covmerge.plan.recipe.strict_yaml import parse_yaml

# The base class of a recipe's parts: unknown keys are refused, and values cannot change.


class StrictModel(BaseModel):
    """A part of a recipe."""

    model_config = ConfigDict(extra="forbid", frozen=True)


# `NAME(KEY=VALUE, ...)`: a method or step with its parameters, in the same notation everywhere.

_OPEN, _CLOSED = "([{", ")]}"


def read_call(text: str, beside: Mapping[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
    """Return the name and the parameters of a call; values are YAML, as in a recipe.

    The parameters in `beside` were given elsewhere.

    Raises:
        RecipeError: the text is not a call, or a parameter is given twice.

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
    """Split a text at the commas outside of brackets.

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
