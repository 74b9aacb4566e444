"""A mergekit recipe's parameters as those of the method that it is here."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from covmerge.base.errors import did_you_mean
from covmerge.maths.methods import registry
from covmerge.plan.recipe.mergekit.methods import METHODS, Parameter, TheirMethod
from covmerge.plan.recipe.mergekit.models import Reference
from covmerge.plan.recipe.mergekit.pieces import Piece, Theirs
from covmerge.plan.recipe.mergekit.reading import Part
from covmerge.plan.recipe.mergekit.settings import filters, setting
from covmerge.plan.recipe.mergekit.values import as_number

_OF_A_LAYER = re.compile(r"(^|\.)\d")  # as in "layers.1" and "1.mlp", and not in "ln_1"


def parameters(theirs: Theirs, piece: Piece) -> dict[str, Any]:
    """Return the method's parameters in a piece, all of them.

    Raises:
        RecipeError: one that the method has not, or not where it stands, or that must be said.
    """
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
            )
            for source in theirs.merged(piece)
        }
        found[str(spec.ours)] = _for_each(theirs, values)
    return _joined_switches(method, theirs.part, found)


def _one(method: TheirMethod, parameter: Parameter, value: object) -> Any:
    """Return one value of a parameter, if it is one that our method can have.

    Raises:
        ValueError: it is none.
    """
    found = parameter.read(value)
    ours = registry.get(method.ours)
    if parameter.ours is not None and ours.has(parameter.ours):  # NuSLERP's are one word here
        ours.check(parameter.ours, found)
    return found


def own_weight(theirs: Theirs, piece: Piece, model: Reference) -> Any:
    """Return a model's weight, for methods of covmerge's that have no parameter of this name; or None."""
    if theirs.is_theirs or registry.get(theirs.method.ours).has("weight"):
        return None
    around = theirs.around(piece)
    for source in piece.sources:
        parts = [source.part.part("parameters"), *around]
        if source.model == model and any("weight" in part.data for part in parts):
            return setting("weight", parts, 1.0, str(model), as_number)
    return None


def _of_ours(theirs: Theirs, piece: Piece, around: Sequence[Part]) -> dict[str, Any]:
    """The parameters of a method of covmerge's; what belongs to mergekit's methods is left out."""
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
    """One value if all models have the same, else a list with one of each model of the recipe."""
    first = next(iter(values.values()))
    if all(value == first for value in values.values()):
        return first
    return [values.get(name, first) for name in theirs.models.values()]


def _check(theirs: Theirs, piece: Piece, around: Sequence[Part]) -> None:
    """Refuse parameters that the method has not, or not where they stand."""
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
    """Weights stay in a recipe whose method is changed: that one goes without them is no misspelling."""
    note = f"a model's `weight` changes nothing: {theirs.name} has none"
    if note not in theirs.part.log.notes:
        theirs.part.log.notes.append(note)


def _check_filters(part: Part, key: str) -> None:
    """Refuse filters by the number of a layer of the source: here names are the output's."""
    for text in filters(part, key):
        if _OF_A_LAYER.search(text):
            part.refuse(
                f"the filter {text!r} has a number, which in mergekit is that of the source's layer, and "
                "here names are the output's, where that layer has another: write a slice for it",
                key,
            )


def _joined_switches(method: TheirMethod, part: Part, found: dict[str, Any]) -> dict[str, Any]:
    """NuSLERP's two switches as the one word that they are here."""
    if method.ours != "nuslerp":
        return found
    whole, rows = found.pop("nuslerp_flatten"), found.pop("nuslerp_row_wise")
    if not isinstance(whole, bool) or not isinstance(rows, bool):
        part.refuse(
            "nuslerp_flatten and nuslerp_row_wise are true or false for all tensors", "parameters"
        )
    return {**found, "by": "tensor" if whole else "columns" if rows else "rows"}
