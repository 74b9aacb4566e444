"""mergekit's `modules`: parts of a composite model that are merged from models of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any, cast

from covmerge.plan.recipe.mergekit.reading import Part
from covmerge.plan.recipe.varied import BY_NAME, is_varied

WHOLE = "default"  # what mergekit calls the one module of a model that is not composite
# What is in none of the others of its model: names of it have nothing else in common.
_REST = ("text_decoder", "shared", WHOLE)
_VISION = ("*vision_tower.*", "*vision_model.*", "*visual.*")  # a model has one of them
# By what the names of a module's tensors are known; what stands first has the first word.
_PATTERNS: Mapping[str, Sequence[str]] = {
    "multi_modal_projector": (
        *("*multi_modal_projector.*", "*visual.merger.*"),
        "*visual.deepstack_merger_list.*",
    ),
    "vision_tower": _VISION,
    "vision_model": _VISION,
    "encoder": ("encoder.*", "model.encoder.*"),
    "decoder": ("decoder.*", "model.decoder.*"),
}
# Modules to distinguish from a module, where the recipe leaves them out.
_BESIDE = {
    "text_decoder": ("multi_modal_projector", "vision_tower"),
    "vision_tower": ("multi_modal_projector",),
    "vision_model": ("multi_modal_projector",),
    "shared": ("encoder", "decoder"),
}


def by_module(part: Part, values: Mapping[str, Any], elsewhere: Any) -> Any:
    """Return values of modules as one: a plain one where all have it, else one by name.

    Args:
        part: the recipe, for errors.
        values: by module; a list has one value of each model.
        elsewhere: the value for tensors of modules that the recipe leaves out; None: whatever it is.

    Raises:
        RecipeError: a value that goes by name already.
    """
    of_each = {
        name: cast("list[Any]", value) for name, value in values.items() if isinstance(value, list)
    }
    if of_each:
        places = range(len(next(iter(of_each.values()))))
        return [
            by_module(
                part,
                {n: of_each[n][i] if n in of_each else value for n, value in values.items()},
                elsewhere,
            )
            for i in places
        ]
    if any(is_varied(value) and BY_NAME in value for value in values.values()):
        part.refuse(
            "filters beside several modules: leave them out, print the recipe (`covmerge import-mergekit`) "
            "and write them into its `by_name`",
            "modules",
        )
    rest = next((name for name in values if name in _REST), None)
    if elsewhere is None:
        elsewhere = next(iter(values.values())) if rest is None else values[rest]
    known = {name: values[name] for name in values if name != rest}
    patterns = [_patterns(name) for name in known]
    beside = [other for name in values for other in _BESIDE.get(name, ())]
    known |= {name: elsewhere for name in beside if _patterns(name) not in patterns}
    otherwise = elsewhere if rest is None else values[rest]
    entries = [
        {"match": _patterns(name), "value": known[name]} for name in sorted(known, key=_order)
    ]
    while entries and entries[-1]["value"] == otherwise:
        entries.pop()
    return {BY_NAME: [*entries, {"value": deepcopy(otherwise)}]} if entries else otherwise


def _patterns(name: str) -> list[str]:
    """Patterns of a module's names; mergekit calls one that it found by itself by their first part."""
    return list(_PATTERNS.get(name, (f"{name}*",)))


def _order(name: str) -> tuple[int, int]:
    known = list(_PATTERNS)
    return (known.index(name), 0) if name in known else (len(known), -len(name))
