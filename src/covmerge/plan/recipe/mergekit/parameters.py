"""Parameters of a mergekit recipe as parameters of the corresponding covmerge method."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, cast

from covmerge.base.errors import did_you_mean
from covmerge.base.text import shown
from covmerge.maths.methods import registry
from covmerge.plan.recipe.mergekit.methods import METHODS, REQUIRED, Parameter, TheirMethod
from covmerge.plan.recipe.mergekit.models import Reference
from covmerge.plan.recipe.mergekit.pieces import Piece, Theirs
from covmerge.plan.recipe.mergekit.reading import Part, as_finite, as_number
from covmerge.plan.recipe.varied import BY_DEPTH, BY_NAME, containing

# mergekit's values of a parameter, from the nearest place outwards, as one value of covmerge.

Read = Callable[[object], Any]


def setting(
    parameter: str,
    places: Sequence[Part],
    default: object,
    whose: str,
    read: Read = as_finite,
    *,
    of_model: bool = False,
) -> Any:
    """Return a parameter's value: one value, or values by depth or by name.

    A filter selects names that contain it. If no filter of a place matches, the next place decides.

    Args:
        parameter: mergekit's name of the parameter.
        places: the `parameters` of model, slice and recipe, in this order.
        default: the value if the recipe gives none; `REQUIRED`: that is an error.
        whose: the method or model that has the parameter, for errors.
        read: converts the file's value, or raises ValueError that says what it should be.
        of_model: whether each model may have its own value.
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
            + (": say it there, as in `{model: ..., " if of_model else ": say it, as in `")
            + f"parameters: {{{parameter}: 1.0}}"
            + ("}`" if of_model else "`")
        )
    return _by_name(entries, default)


def _by_name(entries: Sequence[dict[str, Any]], otherwise: Any) -> Any:
    return {BY_NAME: [*entries, {"value": otherwise}]} if entries else otherwise


def _conditions(part: Part, parameter: str, read: Read) -> Iterator[tuple[str | None, Any]]:
    """Yield patterns with their values; the pattern None matches every name."""
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
        mapping, place = cast("Mapping[str, Any]", entry), (*part.path, parameter, number)
        condition = Part(mapping, place, part.origin, part.log)
        condition.check_keys(("filter", "value"))
        if "value" not in condition.data:
            condition.refuse(f"a filter of `{parameter}` has no `value`")
        text = condition.data.get("filter")
        if not (text is None or isinstance(text, str)):
            condition.refuse(f"the filter {shown(text)} is not text", "filter")
        match = None if text in (None, "*", "") else containing(str(text))
        yield match, _value(condition, "value", parameter, read)


def _value(part: Part, key: str, parameter: str, read: Read) -> Any:
    """Return one value, or a list of numbers or truth values by depth; None: there is no value."""
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


_OF_A_LAYER = re.compile(r"(^|\.)\d")  # matches in "layers.1" and "1.mlp", but not in "ln_1"


def parameters(theirs: Theirs, piece: Piece) -> dict[str, Any]:
    """Return all of the method's parameters for a piece."""
    around = theirs.around(piece)
    if not theirs.is_theirs:
        return _of_ours(theirs, piece, around)
    _check(theirs, piece, around)
    method = theirs.method
    settings = {
        name: setting(name, around, spec.default, theirs.name, partial(_one, method, spec))
        for name, spec in method.shared.items()
    }
    found = {
        spec.ours: settings[name] for name, spec in method.shared.items() if spec.ours is not None
    }
    for name, spec in method.each.items():
        values = {
            theirs.models[source.model]: setting(
                name,
                [source.part.part("parameters"), *around],
                spec.default,
                str(source.model),
                partial(_one, method, spec),
                of_model=True,
            )
            for source in theirs.merged(piece)
        }
        found[str(spec.ours)] = _for_each(theirs, values)
    return _joined_switches(method, theirs.part, found)


def _one(method: TheirMethod, parameter: Parameter, value: object) -> Any:
    """Return one value of a parameter, checked against covmerge's method."""
    found = parameter.read(value)
    ours = registry.get(method.ours)
    if parameter.ours is not None and ours.has(parameter.ours):  # NuSLERP's are one parameter here
        ours.check(parameter.ours, found)
    return found


def own_weight(theirs: Theirs, piece: Piece, model: Reference) -> Any:
    """Return a model's weight for covmerge methods without a `weight` parameter, or None."""
    if theirs.is_theirs or registry.get(theirs.method.ours).has("weight"):
        return None
    around = theirs.around(piece)
    for source in piece.sources:
        parts = [source.part.part("parameters"), *around]
        if source.model == model and any("weight" in part.data for part in parts):
            return setting("weight", parts, 1.0, str(model), as_number)
    return None


def _of_ours(theirs: Theirs, piece: Piece, around: Sequence[Part]) -> dict[str, Any]:
    """Return parameters of a covmerge method; parameters of mergekit's methods are left out with a note."""
    method = registry.get(theirs.method.ours)
    of_mergekit = {name for m in METHODS.values() for name in (*m.shared, *m.each)}
    found: dict[str, Any] = {}
    left_out: set[str] = set()
    of_models = [source.part.part("parameters") for source in piece.sources]
    for part in (*reversed(around), *of_models):
        for key in part.data:
            if method.has(key) and part not in of_models:
                found[key] = setting(key, around, None, method.name)
            elif key in of_mergekit:
                left_out.add(key)
            else:
                known = [parameter.name for parameter in method.parameters]
                part.leave_out(
                    f"{method.name} has no parameter {key!r}.{did_you_mean(key, known)}", key
                )
    if left_out - {"weight"}:
        theirs.part.log.notes.append(
            f"{', '.join(sorted(left_out - {'weight'}))}: parameters of mergekit's methods, which "
            f"{method.name} has not; they are left out"
        )
    return found


def _for_each(theirs: Theirs, values: Mapping[str, Any]) -> Any:
    """Return the models' common value, or a list with one value for each model of the recipe."""
    first = next(iter(values.values()))
    if all(value == first for value in values.values()):
        return first
    return [values.get(name, first) for name in theirs.models.values()]


def _check(theirs: Theirs, piece: Piece, around: Sequence[Part]) -> None:
    """Raise if the method does not have a parameter, or does not have it in that place."""
    shared, each = theirs.method.shared, theirs.method.each
    for part in around:
        for key in part.data:
            if key == "weight" and key not in each:
                _say_no_weight(theirs)
            elif key not in shared and key not in each:
                hint = did_you_mean(key, [*shared, *each])
                part.leave_out(f"{theirs.name} has no parameter {key!r}.{hint}", key)
    for source in piece.sources:
        part = source.part.part("parameters")
        for key in part.data:
            if key in shared and key not in each:
                part.leave_out(f"{key!r} of a model: it is one for all, under `parameters`.", key)
            elif key == "weight" and key not in each:
                _say_no_weight(theirs)
            elif key not in each:
                part.leave_out(
                    f"{theirs.name} has no parameter {key!r}.{did_you_mean(key, each)}", key
                )
    if piece.renumbers:
        parts = [source.part.part("parameters") for source in theirs.merged(piece)]
        for part in (*parts, *around):
            for key in each:
                _check_filters(part, key)


def _say_no_weight(theirs: Theirs) -> None:
    """Note that weights have no effect; this is no error, as they may remain from another method."""
    note = f"a model's `weight` changes nothing: {theirs.name} has none"
    if note not in theirs.part.log.notes:
        theirs.part.log.notes.append(note)


def _check_filters(part: Part, key: str) -> None:
    """Raise if a filter has a layer number of the source, because names here are the output's."""
    for entry in _listed(part.data.get(key)):
        mapping = cast("Mapping[str, object]", entry)
        text = mapping.get("filter") if isinstance(entry, Mapping) else None
        if isinstance(text, str) and _OF_A_LAYER.search(text):
            part.refuse(
                f"the filter {text!r} has a number, which in mergekit is that of the source's layer, and "
                "here names are the output's, where that layer has another: write a slice for it",
                key,
            )


def _joined_switches(method: TheirMethod, part: Part, found: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters with NuSLERP's two switches as covmerge's one parameter."""
    if method.ours != "nuslerp":
        return found
    whole, rows = found.pop("nuslerp_flatten"), found.pop("nuslerp_row_wise")
    if not isinstance(whole, bool) or not isinstance(rows, bool):
        part.refuse(
            "nuslerp_flatten and nuslerp_row_wise are true or false for all tensors", "parameters"
        )
    return {**found, "by": "tensor" if whole else "columns" if rows else "rows"}
