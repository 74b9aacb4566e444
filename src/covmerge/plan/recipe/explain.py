"""Pydantic's errors in terms of the recipe: the place, the key, and what is allowed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from covmerge.base.errors import RecipeError, did_you_mean
from covmerge.base.settings import Caller, Hint, setting_named
from covmerge.files.checkpoints.json_file import shorten
from covmerge.plan.recipe.schema import Expert, Recipe, WithRun, subtract
from covmerge.plan.recipe.sections import RUN, TokenRow
from covmerge.plan.recipe.strict_yaml import KeyPath, Origin

_MARKS = ("[key]", "[number]", "[varied]")
# Forms that may replace a mapping.
_SHORT: Mapping[type[BaseModel], str] = {
    Expert: "a path, org/name@revision or ",
    TokenRow: "an expert's name, base, zero or ",
}
# The caller behind a recipe that is in no file, by the name of its origin.
_CALLERS: Mapping[str, Caller] = {"command line": "flags", "arguments": "python"}
_STORED_DTYPES = ("bfloat16", "float16")
_MOST = 50  # more lines than anybody reads
_WANTED = {
    "string_type": "text",
    "string_too_short": "text that is not empty",
    "dict_type": "a mapping",
    "tuple_type": "a list",
    "too_short": "a mapping with at least one entry, name: source",
}


def explain(error: ValidationError, origin: Origin) -> RecipeError:
    """Return one RecipeError with a line for each of pydantic's errors."""
    details = error.errors(include_url=False)
    # Pydantic lists unknown keys last, but people read a file from the top.
    details.sort(key=lambda detail: origin.line(_path(detail)))
    lines = [_line(detail, origin) for detail in details[:_MOST]]
    if more := len(details) - len(lines):
        lines.append(f"{origin.name}: {more} more problems")
    return RecipeError("\n".join(lines))


def key_path(path: KeyPath) -> str:
    """Return a key path in the usual notation.

    Example:
        >>> key_path(("rules", 0, "use")), key_path(("experts", "my model"))
        ('rules[0].use', "experts['my model']")
    """
    text = ""
    for key in path:
        if isinstance(key, str) and re.fullmatch(r"[\w-]+", key):
            text += f".{key}" if text else key
        else:
            text += f"[{key!r}]"
    return text


def _path(detail: ErrorDetails) -> KeyPath:
    # Pydantic marks an error in a mapping's key by a last "[key]", and the schema marks the forms
    # of a weight.
    return tuple(key for key in detail["loc"] if key not in _MARKS)


def _line(detail: ErrorDetails, origin: Origin) -> str:
    path = _path(detail)
    where = origin.where(path)
    kind = detail["type"]
    if kind == "extra_forbidden":
        known = _model_at(path[:-1]).model_fields
        hint = did_you_mean(str(path[-1]), known)
        return f"{where}: unknown key {path[-1]!r} in {_place(path[:-1], origin)}.{hint}"
    if kind == "invalid_key":
        return f"{where}: the key {path[-1]!r} in {_place(path[:-1], origin)} is not text"
    if kind == "missing" and isinstance(path[-1], int):
        return f"{where}: {_place(path[:-1], origin)} is too short: it lacks entry {path[-1] + 1}"
    if kind == "missing":
        description = _model_at(path[:-1]).model_fields[str(path[-1])].description
        return f"{where}: {_place(path[:-1], origin)} lacks the key {path[-1]!r}. {description}"
    if kind == "value_error":
        place = "" if path == ("output",) else f"{_place(path, origin)}: "
        return f"{where}: {place}{detail['ctx']['error']}"  # pyright: ignore[reportTypedDictNotRequiredAccess] - always there for this type
    given, hint = detail["input"], ""
    if path == ("dtype",) and given in _STORED_DTYPES:
        hint = f", which is computed in; to store another pass {Hint('out_dtype', given)}"
    if path[-1:] == ("weight",) and isinstance(given, int | float) and given < 0:
        hint = f"; {subtract()}"
    place = _place(path, origin)
    value = "empty" if given is None else shorten(given)
    return f"{where}: {place} is {value}; it must be {_wanted(detail)}{hint}"


def _wanted(detail: ErrorDetails) -> str:
    kind = detail["type"]
    if kind in ("model_type", "model_attributes_type"):
        model = _model_at(_path(detail))
        short = _SHORT.get(model, "")
        return f"{short}a mapping with the keys {', '.join(model.model_fields)}"
    ctx: Mapping[str, Any] = detail.get("ctx", {})
    if "expected" in ctx:
        return str(ctx["expected"])
    return _WANTED.get(kind, detail["msg"].removeprefix("Input should be "))


def _model_at(path: KeyPath) -> type[BaseModel]:
    """Return the model of the part of a recipe at a path, or of the part around it."""
    model: type[BaseModel] = WithRun if path[:1] == (RUN,) else Recipe
    for key in path:
        field = model.model_fields.get(str(key))
        model = (None if field is None else _model_in(field.annotation)) or model
    return model


def _model_in(annotation: object) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_model_in, get_args(annotation))), None)


def _place(path: KeyPath, origin: Origin) -> str:
    if not path:
        return "the recipe"
    return setting_named(path, _CALLERS.get(origin.name, "recipe")) or key_path(path)
