"""mergekit's settings of a parameter, from the nearest place outwards, as one value of ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

from covmerge.base.text import shown
from covmerge.plan.recipe.mergekit.methods import REQUIRED
from covmerge.plan.recipe.mergekit.reading import Part
from covmerge.plan.recipe.mergekit.values import as_finite
from covmerge.plan.recipe.varied import BY_DEPTH, BY_NAME, containing

Read = Callable[[object], Any]


def setting(
    parameter: str,
    places: Sequence[Part],
    default: object,
    whose: str,
    read: Read = as_finite,
) -> Any:
    """Return a parameter's value: a plain one, or one by depth or by name.

    A filter is for names that contain it, and where none of a place's fits the next place decides.

    Args:
        parameter: mergekit's name of it.
        places: the `parameters` of model, slice and recipe, in this order.
        default: what holds where nothing is said; `REQUIRED`: that is an error.
        whose: what it is the parameter of, for errors.
        read: makes one value of it of what stands in the file; raises ValueError with what it should be.
    """
    entries: list[dict[str, Any]] = []
    for part in places:
        if parameter not in part.data:
            continue
        for match, value in _conditions(part, parameter, read):
            if value is None:
                continue
            if match is None:
                return _by_name(entries, value)
            entries.append({"match": match, "value": value})
    if default is REQUIRED:
        where = places[0]
        where.refuse(
            f"{whose} has no `{parameter}`"
            + (" where no filter fits" if entries else "")
            + ": say it, as in `parameters: {"
            + parameter
            + ": 1.0}`"
        )
    return _by_name(entries, default)


def filters(part: Part, parameter: str) -> Iterator[str]:
    """Return the texts that a parameter's filters look for."""
    for entry in _listed(part.data.get(parameter)):
        if isinstance(entry, Mapping):
            mapping = cast("Mapping[str, object]", entry)
            if isinstance(mapping.get("filter"), str):
                yield str(mapping["filter"])


def _by_name(entries: Sequence[dict[str, Any]], otherwise: Any) -> Any:
    return {BY_NAME: [*entries, {"value": otherwise}]} if entries else otherwise


def _conditions(part: Part, parameter: str, read: Read) -> Iterator[tuple[str | None, Any]]:
    """Patterns with their values; None: whatever the name."""
    given = part.data[parameter]
    entries = _listed(given)
    if not any(isinstance(entry, Mapping) for entry in entries):
        yield None, _value(part, parameter, parameter, read)
        return
    for number, entry in enumerate(entries):
        if not isinstance(entry, Mapping):
            part.refuse(
                f"`{parameter}` has {shown(entry)} beside filters; write {{value: {shown(entry)}}}",
                parameter,
            )
        condition = Part(
            cast("Mapping[str, Any]", entry),
            (*part.path, parameter, number),
            part.origin,
            part.log,
        )
        condition.check_keys(("filter", "value"))
        if "value" not in condition.data:
            condition.refuse(f"a filter of `{parameter}` has no `value`")
        text = condition.data.get("filter")
        if not (text is None or isinstance(text, str)):
            condition.refuse(f"the filter {shown(text)} is not text", "filter")
        match = None if text in (None, "*", "") else containing(str(text))
        yield match, _value(condition, "value", parameter, read)


def _value(part: Part, key: str, parameter: str, read: Read) -> Any:
    """One value, or a list of numbers or truth values by depth; None where nothing is said."""
    given: object = part.data[key]
    if given is None:
        return None
    if not isinstance(given, list):
        return _read(part, given, parameter, read, key)
    numbers = [
        _read(part, entry, parameter, read, key, place)
        for place, entry in enumerate(cast("list[object]", given))
    ]
    if not numbers:
        return None
    switches = [isinstance(n, bool) for n in numbers]
    if not all(isinstance(n, int | float) for n in numbers) or any(switches) != all(switches):
        part.refuse(
            f"`{parameter}` is {shown(numbers)}; a gradient is a list of numbers, or of truth values",
            key,
        )
    return {BY_DEPTH: numbers} if len(numbers) > 1 else numbers[0]


def _read(part: Part, value: object, parameter: str, read: Read, *keys: str | int) -> Any:
    try:
        return read(value)
    except ValueError as error:
        part.refuse(f"`{parameter}` is {shown(value)}; {error}", *keys)


def _listed(value: object) -> Sequence[object]:
    return cast("Sequence[object]", value) if isinstance(value, list) else [value]
