"""YAML 1.2's core schema, read strictly, with the line of every key.

PyYAML parses the syntax, and this module interprets the values. PyYAML's own constructor follows
YAML 1.1, where `1e-5` is text, `on` is true, `1:30` is 90, `012` is 10, and the second of two equal
keys wins. A number with a leading zero is refused, because it differs between YAML 1.1 and 1.2.
Tags are refused too, and anchors are limited so that a small file cannot become a large value.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NoReturn, cast

import yaml
from yaml.events import (
    AliasEvent,
    CollectionEndEvent,
    DocumentStartEvent,
    Event,
    MappingStartEvent,
    ScalarEvent,
    SequenceStartEvent,
)

from covmerge.base.errors import RecipeError

KeyPath = tuple[str | int, ...]
_Scalar = None | bool | int | float | str

_MAX_DEPTH = 32
_MAX_ALIASES = 16
_MAX_VALUES = 10_000  # PyYAML reads a few thousand values a second

# Plain scalars, in the order of YAML 1.2 (section 10.3.2). Only true and false are booleans: in
# YAML 1.1, an expert named `no` or `on` would silently get another name.
_NULL = re.compile(r"|~|null|Null|NULL")
_BOOL = re.compile(r"true|True|TRUE|false|False|FALSE")
_LEADING_ZERO = re.compile(r"[-+]?0[0-9]+", re.ASCII)
_INTEGER = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", re.ASCII)
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", re.ASCII)
_SPECIAL_FLOAT = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
# Python's time for a long integer is quadratic; no integer in a recipe has so many digits.
_LONGEST_INTEGER = 40
_FAST = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader


def yaml_events(text: str, *, fast: bool = False) -> Iterator[Event]:
    """Parse a document into events, one by one; `fast` by libyaml if it is there, whose errors say less.

    Raises:
        yaml.YAMLError: the text is no YAML. PyYAML also raises ValueError and OverflowError (for an
            escape beyond Unicode).
    """
    events = yaml.parse(text, Loader=_FAST if fast else yaml.SafeLoader)  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
    return cast("Iterator[Event]", events)


@dataclass(frozen=True)
class Origin:
    """The origin of a recipe: a name for messages, and the line of each key path.

    The empty path is used for documents after the first, with the line where they start.
    """

    name: str
    lines: dict[KeyPath, int] = field(default_factory=dict[KeyPath, int])

    def line(self, path: KeyPath) -> int:
        """Return the line of a key path or of its nearest parent; 0 if none is known."""
        for length in range(len(path), -1, -1):
            if path[:length] in self.lines:
                return self.lines[path[:length]]
        return 0

    def where(self, path: KeyPath) -> str:
        """Return "name:line" for a key path, or only the name if no line is known."""
        line = self.line(path)
        return f"{self.name}:{line}" if line else self.name


def parse_yaml(text: str, name: str) -> tuple[Any, Origin]:
    """Return the value of a YAML document (None if it is empty), and the line of every key in it.

    Raises:
        RecipeError: the text is not YAML, or covmerge refuses it: a duplicate key, a key that is
            not text, a tag, too many values or aliases, nesting that is too deep, or a second
            document.
    """
    documents = parse_documents(text, name)
    if len(documents) > 1:
        _, second = documents[1]
        raise RecipeError(
            f"{second.where(())}: a second document starts here, and a recipe is one. Several, as stages "
            "of mergekit's, are merged by `covmerge merge FILE OUT`; a dry run, and all else, is of one "
            "document in a file of its own, without its `name`"
        )
    return documents[0]


def parse_documents(text: str, name: str) -> list[tuple[Any, Origin]]:
    """Return the value of each document, at least one, like `parse_yaml`."""
    try:
        return _Builder(text, name).documents()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark else ""
        hint = ""
        if error.context in ("while scanning an alias", "while scanning an anchor"):
            hint = "; quote a pattern that starts with '*' or '&', as in match: '*.mlp.*'"
        raise RecipeError(f"{name}{line}: not valid YAML: {error.problem}{hint}") from error
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        raise RecipeError(f"{name}: not valid YAML: {error}") from error


class _Builder:
    """Builds the value of one document from PyYAML's events."""

    def __init__(self, text: str, name: str) -> None:
        self._events = yaml_events(text)
        self._origin = Origin(name)
        self._anchors: dict[str, Any] = {}
        self._aliases = 0
        self._values = 0
        self._inside_anchor = False

    def documents(self) -> list[tuple[Any, Origin]]:
        next(self._events)  # the start of the stream
        found: list[tuple[Any, Origin]] = []
        while isinstance(start := next(self._events), DocumentStartEvent):
            self._anchors, self._origin = {}, Origin(self._origin.name)
            if found:
                self._origin.lines[()] = _line(start)
            found.append((self._value(next(self._events), ()), self._origin))
            next(self._events)  # the end of the document
        return found or [(None, self._origin)]

    def _value(self, event: Event, path: KeyPath) -> Any:
        self._values += 1
        if self._values > _MAX_VALUES:
            self._refuse(event, f"more than {_MAX_VALUES} values; a recipe is a short YAML file")
        if isinstance(event, AliasEvent):
            return self._alias(event)
        assert isinstance(event, ScalarEvent | SequenceStartEvent | MappingStartEvent)
        if event.tag is not None:
            self._refuse(event, f"the tag {event.tag!r} is refused; write a plain value")
        if event.anchor is None:
            return self._content(event, path)
        if self._inside_anchor:
            self._refuse(event, f"the anchor '&{event.anchor}' lies inside an anchored value")
        self._inside_anchor = True
        value = self._content(event, path)
        self._inside_anchor = False
        self._anchors[event.anchor] = value
        return value

    def _content(
        self, event: ScalarEvent | SequenceStartEvent | MappingStartEvent, path: KeyPath
    ) -> Any:
        if isinstance(event, ScalarEvent):
            return self._scalar(event)
        if len(path) >= _MAX_DEPTH:
            self._refuse(event, f"nested more than {_MAX_DEPTH} levels deep")
        if isinstance(event, SequenceStartEvent):
            return self._sequence(path)
        return self._mapping(path)

    def _sequence(self, path: KeyPath) -> list[Any]:
        values: list[Any] = []
        for event in self._until_end():
            here = (*path, len(values))
            self._origin.lines[here] = _line(event)
            values.append(self._value(event, here))
        return values

    def _mapping(self, path: KeyPath) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for event in self._until_end():
            key = self._scalar(event) if isinstance(event, ScalarEvent) else event
            if not isinstance(key, str):
                written = f"{event.value!r} " if isinstance(event, ScalarEvent) else ""
                self._refuse(event, f"the key {written}is not text; put it in quotes")
            here = (*path, key)
            if key in values:
                first = self._origin.lines[here]
                self._refuse(event, f"the key {key!r} is already given in line {first}")
            self._origin.lines[here] = _line(event)
            values[key] = self._value(next(self._events), here)
        return values

    def _until_end(self) -> Iterator[Event]:
        while not isinstance(event := next(self._events), CollectionEndEvent):
            yield event

    def _alias(self, event: AliasEvent) -> Any:
        name = str(event.anchor)
        self._aliases += 1
        if self._aliases > _MAX_ALIASES:
            self._refuse(event, f"more than {_MAX_ALIASES} aliases; write the values out")
        # An alias inside an anchored value could double the size with every step, or contain itself.
        if self._inside_anchor:
            self._refuse(event, f"the alias '*{name}' lies inside an anchored value; write it out")
        if name not in self._anchors:
            self._refuse(
                event,
                f"the alias '*{name}' has no anchor before it; if it is a pattern, quote it",
            )
        return self._anchors[name]

    def _scalar(self, event: ScalarEvent) -> _Scalar:
        if event.tag is not None:
            self._refuse(event, f"the tag {event.tag!r} is refused; write a plain value")
        text = str(event.value)
        plain: bool = event.implicit[0]
        if plain and _LEADING_ZERO.fullmatch(text):
            # 012 is 10 in YAML 1.1, which mergekit reads, and 12 in YAML 1.2.
            self._refuse(
                event,
                f"{text} is another number in YAML 1.1 than in 1.2: write it without the zero, or quote "
                "it if it is text",
            )
        try:
            return _core_schema(text) if plain else _join_surrogates(text)
        except ValueError as error:
            self._refuse(event, str(error))

    def _refuse(self, event: Event, problem: str) -> NoReturn:
        raise RecipeError(f"{self._origin.name}:{_line(event)}: {problem}")


def unquoted(value: object) -> object:
    """Return the number or truth value in a quoted text; other values are not changed.

    Example:
        >>> unquoted("1e-1"), unquoted("true"), unquoted("bfloat16"), unquoted(2)
        (0.1, True, 'bfloat16', 2)
    """
    if not isinstance(value, str):
        return value
    with suppress(ValueError):  # too large for a number
        if isinstance(plain := _core_schema(value.strip()), int | float):
            return plain
    return value


def _core_schema(text: str) -> _Scalar:
    """Return the value of a plain scalar in YAML 1.2."""
    if _NULL.fullmatch(text):
        return None
    if _BOOL.fullmatch(text):
        return text.lower() == "true"
    if _INTEGER.fullmatch(text):
        if len(text) > _LONGEST_INTEGER:
            raise ValueError(f"the number {text[:_LONGEST_INTEGER]}... is too large")
        return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))
    if _FLOAT.fullmatch(text):
        if math.isinf(value := float(text)):
            raise ValueError(f"the number {text[:_LONGEST_INTEGER]} is too large")
        return value
    if _SPECIAL_FLOAT.fullmatch(text):
        return float(text.replace(".", ""))
    return text


def _join_surrogates(text: str) -> str:
    """Join the two escapes in JSON for a character beyond U+FFFF, which PyYAML leaves separate."""
    try:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le")
    except UnicodeDecodeError:
        raise ValueError("the text holds half of a surrogate pair") from None


def _line(event: Event) -> int:
    return int(event.start_mark.line) + 1
