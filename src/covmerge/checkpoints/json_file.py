"""JSON objects written by strangers: bounded in size, without keys that hide each other."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any, cast

from covmerge.errors import CheckpointError

MAX_JSON_BYTES = 100_000_000


def read_object(path: Path) -> dict[str, Any]:
    """Read the JSON object that is a whole file.

    Raises:
        CheckpointError: the file cannot be read, is larger than 100 MB, or is not a JSON object.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_JSON_BYTES + 1)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    if len(data) > MAX_JSON_BYTES:
        raise CheckpointError(
            f"{path} is larger than {MAX_JSON_BYTES} bytes, which no such file needs to be: "
            "is it the right file?"
        )
    return parse_object(data, str(path))


def parse_object(data: bytes, where: str) -> dict[str, Any]:
    """Parse a JSON object in UTF-8; a key that stands twice is an error, at every level.

    Args:
        data: the text, nothing else.
        where: what is being parsed, for errors.

    Raises:
        CheckpointError: it is not such an object.

    Example:
        >>> parse_object(b'{"a": [1]}', "config.json")
        {'a': [1]}
        >>> parse_object(b'{"a": 1, "a": 2}', "config.json")
        Traceback (most recent call last):
        covmerge.errors.CheckpointError: config.json has the key 'a' twice, and nothing says which \
holds: remove one
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

    try:
        value: object = json.loads(data.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{where} is not valid JSON ({error}): fetch the file again"
        ) from error
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{where} holds a JSON {type(value).__name__}, an object is needed: "
            "is it the right file?"
        )
    return cast("dict[str, Any]", value)


def shorten(value: object) -> str:
    """Return `repr(value)`, cut to a length that an error message can bear."""
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
