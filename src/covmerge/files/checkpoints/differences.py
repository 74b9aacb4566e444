"""Where two JSON values differ, as text: what changed between the begin of a merge and its resumption."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from typing import cast

from covmerge.base.text import shown
from covmerge.files.checkpoints.json_file import shorten

_LONGEST = 60  # characters of a value


def changes(before: object, now: Mapping[str, object], listed: Collection[str]) -> list[str]:
    """Name what changed: each value under the keys `listed`, of other keys that they did.

    Example:
        >>> before = {"recipe": {"k": 1}, "base": {"size": 5}}
        >>> changes(before, {"recipe": {"k": 2}, "base": {"size": 6}}, ["recipe"])
        ['recipe.k was 1 and is now 2', 'base changed']
    """
    old = _mapping(before) or {}
    found = [text for key in listed for text in differences(old.get(key), now.get(key), key)]
    others = sorted({*old, *now} - {*listed})
    return found + [
        f"{key} changed" for key in others if [*differences(old.get(key), now.get(key))]
    ]


def differences(before: object, now: object, path: str = "") -> Iterator[str]:
    """Name each key whose value is another, with both values.

    Args:
        before: a JSON value.
        now: another.
        path: of keys, which led here.

    Example:
        >>> list(differences({"method": "ace", "eps": 1}, {"method": "ties"}))
        ['eps was 1 and is not set now', "method was 'ace' and is now 'ties'"]
    """
    old, new = _mapping(before), _mapping(now)
    if old is None or new is None:
        if json.dumps(before) != json.dumps(now):
            yield from _change(path, before, now)
        return
    for key in sorted({*old, *new}):
        inner = f"{path}.{key}" if path else key
        if key in old and key in new:
            yield from differences(old[key], new[key], inner)
        else:
            yield from _change(inner, old.get(key), new.get(key))


def _mapping(value: object) -> Mapping[str, object] | None:
    return cast("Mapping[str, object]", value) if isinstance(value, Mapping) else None


def _change(path: str, before: object, now: object) -> Iterator[str]:
    if before is None:
        yield f"{path} was not set and is now {_shown(now)}"
    elif now is None:
        yield f"{path} was {_shown(before)} and is not set now"
    else:
        yield f"{path} was {_shown(before)} and is now {_shown(now)}"


def _shown(value: object) -> str:
    return shorten(value) if isinstance(value, str) else shown(value)[:_LONGEST]
