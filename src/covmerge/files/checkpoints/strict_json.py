"""JSON that says the same to every reader: no NaN, no silent casts, bytes fixed by the value."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import cast

from covmerge.base.errors import InputError
from covmerge.base.types import Json

Plain = None | bool | int | float | str | list["Plain"] | dict[str, "Plain"]


def dumps(value: Json, *, what: str, indent: int | None = None) -> str:
    """Return `value` as JSON text; keys keep their order, and without `indent` it is one line.

    Args:
        value: strings, finite numbers, booleans, None, and sequences and mappings of these.
        what: what is being written; it begins the path in an error.
        indent: spaces a level.

    Raises:
        InputError: a number is not finite, a key is not a string, or a value is of another type;
            the message holds the path to it.

    Example:
        >>> dumps({"b": [1, 2.5], "a": None}, what="stats")
        '{"b":[1,2.5],"a":null}'
        >>> dumps({"layers": [{"loss": float("nan")}]}, what="stats")
        Traceback (most recent call last):
        covmerge.base.errors.InputError: stats.layers[0].loss is nan: JSON has finite numbers only
    """
    separators = (",", ":") if indent is None else None
    # ASCII, because a path whose bytes are not UTF-8 is a string that cannot be encoded otherwise.
    return json.dumps(_plain(value, what), indent=indent, separators=separators)


def _plain(value: object, path: str) -> Plain:
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            if not math.isfinite(value):
                raise InputError(f"{path} is {value}: JSON has finite numbers only")
            return value
        case Mapping():
            return _plain_mapping(cast("Mapping[object, object]", value), path)
        case Sequence() if not isinstance(value, (bytes, bytearray, memoryview)):
            items = cast("Sequence[object]", value)
            return [_plain(item, f"{path}[{i}]") for i, item in enumerate(items)]
        case _:
            raise InputError(f"{path} is a {type(value).__name__}: JSON cannot hold it, convert it")


def _plain_mapping(value: Mapping[object, object], path: str) -> dict[str, Plain]:
    plain: dict[str, Plain] = {}
    for key, item in value.items():
        if not isinstance(key, str):
            raise InputError(f"{path} has the key {key!r}: JSON keys are strings, convert it")
        plain[key] = _plain(item, f"{path}.{key}")
    return plain
