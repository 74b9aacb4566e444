"""JSON objects from untrusted files, bounded in size and without duplicate keys."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from covmerge.base.errors import CheckpointError, InputError
from covmerge.base.text import shown
from covmerge.base.types import Json
from covmerge.files.stores.local import local_file
from covmerge.files.stores.regular_file import failing_as
from covmerge.files.stores.store import StoredFile

# Strict JSON: no NaN, no silent casts, and the same value always gives the same bytes.

Plain = None | bool | int | float | str | list["Plain"] | dict[str, "Plain"]


def dumps(value: Json, *, what: str, indent: int | None = None) -> str:
    """Return `value` as JSON text; keys keep their order, and without `indent` the text is one line.

    `what` names what is being written; it begins the path in an error.

    Raises:
        InputError: a number is not finite, a key is not a string, or a value is of another type;
            the message has the path to it.

    Example:
        >>> dumps({"b": [1, 2.5], "a": None}, what="stats")
        '{"b":[1,2.5],"a":null}'
        >>> dumps({"layers": [{"loss": float("nan")}]}, what="stats")
        Traceback (most recent call last):
        covmerge.base.errors.InputError: stats.layers[0].loss is nan: JSON has finite numbers only
    """
    separators = (",", ":") if indent is None else None
    # ASCII, because the path of a file may be a string that UTF-8 cannot encode.
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
            given = cast("Mapping[object, object]", value)
            if wrong := [key for key in given if not isinstance(key, str)]:
                raise InputError(
                    f"{path} has the key {wrong[0]!r}: JSON keys are strings, convert it"
                )
            return {str(key): _plain(item, f"{path}.{key}") for key, item in given.items()}
        case Sequence() if not isinstance(value, (bytes, bytearray, memoryview)):
            items = cast("Sequence[object]", value)
            return [_plain(item, f"{path}[{i}]") for i, item in enumerate(items)]
        case _:
            raise InputError(f"{path} is a {type(value).__name__}: JSON cannot hold it, convert it")


MAX_JSON_BYTES = 100_000_000
# A value of three bytes takes a hundred bytes of memory. Gemma 3's tokenizer has 1.9 million values.
MAX_VALUES = 3_000_000

_MAX_DEPTH = 64


def read_object(
    file: StoredFile | Path, values: int = MAX_VALUES, *, size: int = MAX_JSON_BYTES
) -> dict[str, Any]:
    """Read a file that is one JSON object."""
    with failing_as(f"{file} cannot be read"):
        found, *_ = local_file(file).stamp()
        if found > size:  # checked before a remote file is fetched
            raise CheckpointError(
                f"{file} has {found} bytes, and no such file needs more than {size}: is it the right "
                "file?"
            )
        data = local_file(file).read(size)
    return parse_object(data, str(file), values)


def unique_keys(where: str) -> Callable[[list[tuple[str, Any]]], dict[str, Any]]:
    """Return a hook for `json.loads` that builds an object of pairs and refuses duplicate keys.

    Example:
        >>> json.loads('{"a": 1, "a": 2}', object_pairs_hook=unique_keys("line 3"))
        Traceback (most recent call last):
        covmerge.base.errors.CheckpointError: line 3 has the key 'a' twice, and nothing says which holds: \
remove one
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict(pairs)
        if len(value) < len(pairs):
            (twice, _), *_ = Counter(key for key, _ in pairs).most_common(1)
            raise CheckpointError(
                f"{where} has the key {shorten(twice)} twice, and nothing says which holds: "
                "remove one"
            )
        return value

    return unique


def parse_object(data: bytes, where: str, values: int = MAX_VALUES) -> dict[str, Any]:
    """Parse a JSON object in UTF-8; a duplicate key is an error at every level.

    Values take far more memory than their bytes, so they are counted before any is created. Commas in texts
    count too.

    Example:
        >>> parse_object(b'{"a": [1]}', "config.json")
        {'a': [1]}
        >>> parse_object(b'{"a": 1, "a": 2}', "config.json")
        Traceback (most recent call last):
        covmerge.base.errors.CheckpointError: config.json has the key 'a' twice, and nothing says which \
holds: remove one
    """
    count = sum(map(data.count, (b",", b"[", b"{")))
    if count > values:
        raise CheckpointError(
            f"{where} has {count} values or more, and no such file needs more than {values}: is it "
            "the right file?"
        )
    try:
        value: object = json.loads(data.decode("utf-8"), object_pairs_hook=unique_keys(where))
    except (ValueError, RecursionError) as error:
        # Python's message says how to lift Python's limit, which does not help here.
        why = "a number has thousands of digits" if "int_max_str_digits" in str(error) else error
        raise CheckpointError(f"{where} is not valid JSON ({why}): fetch the file again") from error
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{where} holds a JSON {type(value).__name__}, an object is needed: "
            "is it the right file?"
        )
    found = cast("dict[str, Any]", value)
    _check_depth(found, where)
    if b"\\ud" in data or b"\\uD" in data:
        _check_texts(found, where)
    return found


def as_object(value: object) -> dict[str, Any]:
    """Return a parsed value if it is a JSON object, else an empty object."""
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def as_list(value: object) -> list[Any]:
    """Return a parsed value if it is a JSON list, else an empty list."""
    return cast("list[Any]", value) if isinstance(value, list) else []


def is_text(text: str) -> bool:
    r"""Return whether a string can be encoded: JSON and pickles can hold half of a surrogate pair.

    Example:
        >>> is_text("\N{GRINNING FACE}"), is_text("\ud83d")
        (True, False)
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def shorten(value: object) -> str:
    """Return a value as `shown` writes it, cut to 200 characters for error messages."""
    text = shown(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def _check_depth(value: dict[str, Any], where: str) -> None:
    # Recursion through a more deeply nested value would reach Python's own limit.
    level: list[Any] = [value]
    for _ in range(_MAX_DEPTH):
        level = [
            item
            for node in level
            for item in (cast("dict[str, Any]", node).values() if isinstance(node, dict) else node)
            if isinstance(item, dict | list)
        ]
        if not level:
            return
    raise CheckpointError(
        f"{where} is nested more than {_MAX_DEPTH} levels deep, which no such file needs to be: is "
        "it the right file?"
    )


def _check_texts(value: dict[str, Any], where: str) -> None:
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        around = text[max(0, error.start - 20) : error.end + 20]
        raise CheckpointError(
            f"{where} holds half of a surrogate pair in {shorten(around)}, which is not valid Unicode: "
            "correct it"
        ) from error
