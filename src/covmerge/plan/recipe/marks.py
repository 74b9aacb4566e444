"""Where a recipe marks values for a search, and where it may."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from covmerge.base.errors import RecipeError
from covmerge.plan.recipe.explain import key_path
from covmerge.plan.recipe.strict_yaml import KeyPath, Origin
from covmerge.plan.recipe.varied import SEARCH

FORMS = (
    "write [low, high], [low, high, log], or a list of choices of one kind: three numbers or more, or two "
    "texts or more"
)


def marks_in(data: object, origin: Origin) -> Iterator[tuple[KeyPath, object]]:
    """Yield the place of each marked value, and what it may be.

    Raises:
        RecipeError: a mark where nothing can be searched, or with other keys beside it.
    """
    for place, value in _walk(data, ()):
        if not _may_be_marked(place):
            if len(value) == 1 and isinstance(value[SEARCH], list | tuple):
                raise RecipeError(
                    f"{origin.where(place)}: {key_path(place)} cannot be searched: weights, parameters "
                    "and methods can"
                )
        elif len(value) > 1:
            others = ", ".join(key for key in value if key != SEARCH)
            raise RecipeError(
                f"{origin.where(place)}: {key_path(place)}: `search` stands alone: remove {others}"
            )
        else:
            yield place, value[SEARCH]


def refuse_marks(data: object, origin: Origin) -> None:
    """Refuse a recipe with marked values, which only a search can carry out.

    Raises:
        RecipeError: it has one.
    """
    for place, _ in marks_in(data, origin):
        raise RecipeError(
            f"{origin.where(place)}: {key_path(place)} is marked by `search`, and only `covmerge search` "
            "chooses such values: call it in place of this, or write one value"
        )


def _walk(data: object, place: KeyPath) -> Iterator[tuple[KeyPath, Mapping[str, Any]]]:
    """Every mapping with the key `search`, which is a mark where one may stand."""
    if isinstance(data, Mapping):
        mapping = cast("Mapping[str, Any]", data)
        if SEARCH in mapping:
            yield place, mapping
        for key, value in mapping.items():
            yield from _walk(value, (*place, key))
    elif isinstance(data, list | tuple):
        for number, value in enumerate(cast("Sequence[object]", data)):
            yield from _walk(value, (*place, number))


def _may_be_marked(place: KeyPath) -> bool:
    """Whether a search may choose what stands here, in covmerge's recipes and in mergekit's."""
    if "match" in place or "filter" in place:
        return False
    match place:
        case ("method",) | ("merge_method",) | ("rules", _, "method"):
            return True
        case ("experts", _, "weight", *_):
            return True
        case ("before" | "after", _, _, _, *_) | ("rules", _, "before" | "after", _, _, _, *_):
            return True
        case _:
            return "parameters" in place[:-1]
