"""Values that differ from tensor to tensor: by the depth of its layer, or by its name.

Each form has its own key, because a plain list already has a meaning: in a method's parameter it is
one value for each expert, as in `density: [0.6, 0.5, 0.4]`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, cast

from covmerge.base.text import shown, some

BY_DEPTH, BY_NAME, SEARCH = "by_depth", "by_name", "search"
_MAX_ENTRIES = 1000
_SPECIAL, _QUOTED = re.compile(r"[*?[]"), r"[\g<0>]"

_PATTERN: dict[str, Any] = {"type": "string", "minLength": 1}
_PATTERNS: dict[str, Any] = {"type": "array", "minItems": 1, "items": _PATTERN}
SEARCH_SCHEMA: dict[str, Any] = {
    "description": "A value that `covmerge search` chooses.",
    "type": "object",
    "properties": {
        SEARCH: {"type": "array", "minItems": 2, "items": {"type": ["number", "string", "boolean"]}}
    },
    "required": [SEARCH],
    "additionalProperties": False,
}
VARIED_SCHEMA: dict[str, Any] = {
    "description": "A value that differs from tensor to tensor.",
    "oneOf": [
        {
            "type": "object",
            "properties": {
                BY_DEPTH: {
                    "type": "array",
                    "minItems": 1,
                    "items": {"anyOf": [{"type": ["number", "boolean"]}, SEARCH_SCHEMA]},
                }
            },
            "required": [BY_DEPTH],
            "additionalProperties": False,
        },
        {
            "type": "object",
            "properties": {
                BY_NAME: {
                    "type": "array",
                    "minItems": 1,
                    "maxItems": _MAX_ENTRIES,
                    "items": {
                        "type": "object",
                        "properties": {"match": {"oneOf": [_PATTERN, _PATTERNS]}, "value": {}},
                        "required": ["value"],
                        "additionalProperties": False,
                    },
                }
            },
            "required": [BY_NAME],
            "additionalProperties": False,
        },
    ],
}


class Unsaid:
    """The absence of a value for a tensor: no entry of `by_name` matches it."""

    def __repr__(self) -> str:
        return "nothing"


UNSAID = Unsaid()


def is_varied(value: object) -> bool:
    """Return whether a value, or an entry of its list, differs from tensor to tensor.

    Example:
        >>> is_varied({"by_depth": [0, 1]}), is_varied([0.5, {"by_depth": [0, 1]}]), is_varied([1, 2])
        (True, True, False)
    """
    if isinstance(value, list | tuple):
        return any(map(is_varied, cast("Sequence[object]", value)))
    return isinstance(value, Mapping) and (BY_DEPTH in value or BY_NAME in value)


def check_varied(value: object, check: Callable[[object], None] = lambda value: None) -> None:
    """Check the form of a value that may differ from tensor to tensor; `check` is called with each value.

    Raises:
        ValueError: the form is invalid.

    Example:
        >>> check_varied({"by_depth": [0.2, "0.6"]})
        Traceback (most recent call last):
        ValueError: by_depth is [0.2, '0.6']; it is a list of numbers, first layer to last, or truth values
    """
    if isinstance(value, list | tuple):
        for entry in cast("Sequence[object]", value):
            check_varied(entry, check)
    elif not is_varied(value):
        check(value)
    else:
        _check_form(cast("Mapping[str, Any]", value), check)


def value_at(value: object, name: str, depth: float) -> Any:
    """Return the value for one tensor, or `UNSAID` if there is none.

    The depth of its layer is from 0 to 1, and 0 outside all layers.

    Example:
        >>> value_at({"by_depth": [0, 1, 0.5]}, "h.3.fc", 0.75)
        0.75
        >>> value_at({"by_name": [{"match": "*.attn.*", "value": 1}]}, "h.0.fc", 0.0)
        nothing
    """
    if isinstance(value, list | tuple):
        return [value_at(entry, name, depth) for entry in cast("Sequence[object]", value)]
    if not is_varied(value):
        return value
    form = cast("Mapping[str, Any]", value)
    if BY_DEPTH in form:
        return _between(form[BY_DEPTH], depth)
    for entry in form[BY_NAME]:
        if any(fnmatchcase(name, pattern) for pattern in patterns_of(entry)):
            return value_at(entry["value"], name, depth)
    return UNSAID


def patterns_of(entry: Mapping[str, Any]) -> Sequence[str]:
    """Return the patterns of an entry of `by_name`; the entry's value is for names that match one."""
    match: str | Sequence[str] = entry.get("match", "*")
    return (match,) if isinstance(match, str) else match


def patterns_in(value: object, where: str = "") -> Iterator[tuple[str, Sequence[str]]]:
    """Yield the key and the patterns of each entry of a recipe's `by_name` that has patterns.

    Example:
        >>> list(patterns_in({"weight": {"by_name": [{"match": "*.mlp.*", "value": 0}, {"value": 1}]}}))
        [('weight', ('*.mlp.*',))]
    """
    if isinstance(value, Mapping):
        mapping = cast("Mapping[str, object]", value)
        for key, inner in mapping.items():
            if key == BY_NAME:
                for entry in cast("Sequence[Mapping[str, Any]]", inner):
                    if "match" in entry:
                        yield where, patterns_of(entry)
            else:
                yield from patterns_in(inner, f"{where}.{key}" if where else key)
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(cast("Sequence[object]", value)):
            yield from patterns_in(inner, f"{where}[{number}]")


def containing(text: str) -> str:
    """Return a pattern for names that contain a text.

    Example:
        >>> containing("attn"), containing("h[0]")
        ('*attn*', '*h[[]0]*')
    """
    return f"*{_SPECIAL.sub(_QUOTED, text)}*"


def _between(points: Sequence[float], depth: float) -> float:
    """Interpolate between points evenly spaced from 0 to 1; of truth values, take the last before."""
    place = depth * (len(points) - 1)
    before = int(place)
    if isinstance(points[0], bool):
        return points[before]
    after = min(len(points) - 1, before + 1)
    share = place - before
    value = (1 - share) * points[before] + share * points[after]
    whole = all(isinstance(point, int) for point in points) and value == int(value)
    return int(value) if whole else value


def _check_form(form: Mapping[str, Any], check: Callable[[object], None]) -> None:
    if len(form) > 1:
        raise ValueError(
            f"{shown(dict(form))} has the keys {', '.join(form)}; write {{{BY_DEPTH}: [...]}} or "
            f"{{{BY_NAME}: [...]}}"
        )
    if BY_DEPTH in form:
        given: object = form[BY_DEPTH]
        points = cast("Sequence[object]", given) if isinstance(given, list | tuple) else ()
        switches = all(isinstance(point, bool) for point in points)
        if not points or not (switches or all(map(is_number, points))):
            raise ValueError(
                f"{BY_DEPTH} is {_shown(form[BY_DEPTH])}; it is a list of numbers, first layer to last, or "
                "truth values"
            )
        for point in points:
            check(point)
        return
    entries: object = form[BY_NAME]
    if not isinstance(entries, list | tuple) or not entries:
        raise ValueError(
            f"{BY_NAME} is {_shown(form[BY_NAME])}; it is a list of {{match: PATTERN, value: VALUE}}"
        )
    count = len(cast("Sequence[object]", entries))
    if count > _MAX_ENTRIES:
        raise ValueError(
            f"{BY_NAME} has {count} entries, and may have {_MAX_ENTRIES}: one pattern may be for many names"
        )
    for number, entry in enumerate(cast("Sequence[object]", entries)):
        _check_entry(entry, f"{BY_NAME}[{number}]", check)


def _check_entry(entry: object, where: str, check: Callable[[object], None]) -> None:
    fields = cast("Mapping[str, object]", entry)
    if not isinstance(entry, Mapping) or not {"value"} <= set(fields) <= {"match", "value"}:
        raise ValueError(
            f"{where} is {shown(fields)}; write {{match: PATTERN, value: VALUE}}, or {{value: VALUE}} for "
            "all other tensors"
        )
    match = fields.get("match", "*")
    several = cast("Sequence[object]", match) if isinstance(match, list | tuple) else [match]
    patterns = several or [""]
    if not all(isinstance(pattern, str) and pattern for pattern in patterns):
        raise ValueError(
            f"{where}.match is {shown(cast('object', match))}; it is a pattern of names, such as "
            "'*.mlp.*', or a list of them"
        )
    if is_varied(fields["value"]) and BY_NAME in cast("Mapping[str, object]", fields["value"]):
        raise ValueError(f"{where}.value is `{BY_NAME}` again; write its entries into this list")
    check_varied(fields["value"], check)


def _shown(value: object) -> str:
    """Return a value as text for a message; of a long list, only the first few entries."""
    if not isinstance(value, list | tuple):
        return shown(value)
    return f"[{some(map(shown, cast('Sequence[object]', value)))}]"


def is_number(value: object) -> bool:
    """Return whether a value is a number; booleans, which are numbers in Python, do not count."""
    return isinstance(value, int | float) and not isinstance(value, bool)
