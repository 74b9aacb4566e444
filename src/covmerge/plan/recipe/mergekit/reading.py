"""The keys of a mergekit recipe, read and checked."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, cast

from covmerge.base.errors import RecipeError, did_you_mean
from covmerge.base.settings import Hint
from covmerge.base.text import shown
from covmerge.plan.recipe.strict_yaml import KeyPath, Origin, unquoted

_MARKS = ("merge_method", "models", "modules", "base_model")  # no recipe of covmerge has them

_DTYPES = ("float32", "float16", "bfloat16", "float64")


def is_mergekit(keys: Collection[str]) -> bool:
    """Return whether these are keys of a mergekit recipe."""
    return any(key in keys for key in _MARKS)


@dataclass(frozen=True)
class ImportLog:
    """How strictly a recipe is read, and messages about it."""

    # Whether unknown keys and parameters are left out with a warning; mergekit leaves them out
    # without one.
    lenient: bool = False
    warnings: list[str] = field(default_factory=list[str])  # messages about what was left out
    notes: list[str] = field(default_factory=list[str])  # other notes for the reader


@dataclass(frozen=True)
class Part:
    """A mapping in a recipe, with its place in the file and the settings for reading."""

    data: Mapping[str, Any]
    path: KeyPath
    origin: Origin
    log: ImportLog

    def refuse(self, problem: str, *keys: str | int) -> NoReturn:
        """Raise a RecipeError about this place, or about one below it."""
        raise RecipeError(f"{self.origin.where((*self.path, *keys))}: {problem}")

    def leave_out(self, problem: str, *keys: str | int) -> None:
        """Refuse something that mergekit ignores, or warn about it if `lenient` is set."""
        if not self.log.lenient:
            self.refuse(
                f"{problem} mergekit passes over it; {Hint('lenient')} does, with a warning", *keys
            )
        self.log.warnings.append(
            f"{self.origin.where((*self.path, *keys))}: {problem} It is left out ({Hint('lenient')})"
        )

    def check_keys(self, known: Collection[str]) -> None:
        for key in self.data:
            if key not in known:
                self.leave_out(f"unknown key {key!r}.{did_you_mean(key, known)}", key)

    def part(self, key: str) -> Part:
        """Return the mapping under a key, or an empty one."""
        return self._below(self.data.get(key), key)

    def parts(self, key: str) -> list[Part]:
        """Return the mappings in the list under a key."""
        found = self.data.get(key)
        if not isinstance(found, list) or not found:
            self.refuse(
                f"`{key}` is {shown(cast('object', found))}; it is a list with at least one entry",
                key,
            )
        entries = cast("Sequence[object]", found)
        return [self._below(entry, key, number) for number, entry in enumerate(entries)]

    def dtype(self, key: str) -> str | None:
        value = self.data.get(key)
        if value is None:
            return None
        name = str(value).removeprefix("torch.")
        if name not in _DTYPES:
            self.refuse(f"{key} is {shown(value)}; it is one of {', '.join(_DTYPES)}", key)
        return name

    def _below(self, value: object, *keys: str | int) -> Part:
        if value is None:
            value = {}
        if not isinstance(value, Mapping):
            self.refuse(f"{shown(value)} is not a mapping", *keys)
        return Part(cast("Mapping[str, Any]", value), (*self.path, *keys), self.origin, self.log)


# The values that mergekit accepts as numbers and as truth values.

_TRUE, _FALSE = ("true", "yes", "on", "t", "y"), ("false", "no", "off", "f", "n")


def as_number(value: object) -> int | float:
    """Return a number, which may be in quotes, or raise ValueError.

    Example:
        >>> as_number("1e-1")
        0.1
    """
    found = as_finite(value)
    if isinstance(found, bool) or not isinstance(found, int | float):
        raise ValueError("it is a number, such as 0.5")
    return found


def as_whole(value: object) -> int:
    """Return a whole number, or raise ValueError; 10.0 counts as 10.

    Example:
        >>> as_whole(10.0), as_whole("3")
        (10, 3)
    """
    found = as_number(value)
    if found != int(found):
        raise ValueError("it is a whole number, such as 10")
    return int(found)


def as_switch(value: object) -> bool:
    """Return a truth value, given as one or as a word or number that mergekit takes; else raise ValueError.

    Example:
        >>> as_switch(True), as_switch("off"), as_switch(1)
        (True, False, True)
    """
    found = unquoted(value)
    if isinstance(found, int | float) and found in (0, 1):
        return bool(found)
    word = found.strip().lower() if isinstance(found, str) else ""
    if word in (*_TRUE, *_FALSE):
        return word in _TRUE
    raise ValueError("it is true or false")


def as_finite(value: object) -> object:
    """Return a value without quotes if it is then a number or truth value; Inf and NaN raise ValueError.

    Example:
        >>> as_finite("2"), as_finite("bfloat16")
        (2, 'bfloat16')
    """
    found = unquoted(value)
    try:
        number = float(found) if isinstance(found, float | str) else 0.0  # Python accepts "nan"
    except ValueError:
        return found
    if not math.isfinite(number):
        raise ValueError("numbers must be finite")
    return found
