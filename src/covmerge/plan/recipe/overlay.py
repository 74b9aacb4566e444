"""Settings, named as arguments in Python, laid over what a recipe says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from covmerge.base.errors import RecipeError, did_you_mean
from covmerge.base.settings import KEYS, Hint
from covmerge.plan.recipe.schema import output_as

# What adds to what a recipe says, and takes nothing away.
_ADDED = ("parameters", "tensors")


def lay_over(recipe: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the data of a recipe with settings put where `KEYS` says.

    Args:
        recipe: what it says; a part may be a mapping, or one of the recipe's models.
        settings: by their names in Python; others than `KEYS` has are left out.

    Raises:
        RecipeError: a setting is of an expert that there is not, or a form is none.
    """
    data = dict(recipe)
    for name, value in settings.items():
        match KEYS.get(name, "").split("."):
            case [""]:
                pass
            case ["experts", _, key]:
                data["experts"] = _of_experts(name, data["experts"], key, value)
            case [section, key]:
                given = output_as(value) if name == "form" else {key: value}
                data[section] = {**dict(data.get(section, {})), **given}
            case ["allow"]:
                data[name] = list(dict.fromkeys((*data.get(name, ()), *value)))
            case [key]:
                data[key] = {**dict(data.get(key, {})), **value} if name in _ADDED else value
            case _:
                raise AssertionError(name)
    return data


def _of_experts(
    name: str, experts: Mapping[str, Any], key: str, given: Mapping[str, Any]
) -> dict[str, Any]:
    found = dict(experts)
    for expert, value in given.items():
        if expert not in found:
            raise RecipeError(
                f"{Hint(name)} of '{expert}': there is no such expert."
                + did_you_mean(expert, found)
            )
        found[expert] = {**dict(found[expert]), key: value}
    return found
