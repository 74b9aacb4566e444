"""Lines of JSON that each end in their own checksum: a line that a crash or a file system tore is found."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping
from typing import Any, cast

from covmerge.base.types import Json
from covmerge.files.checkpoints.strict_json import dumps

_SEAL = re.compile(rb',"crc":"[0-9a-f]{8}"}')
_SEAL_BYTES = len(',"crc":"01234567"}')


def sealed(record: Mapping[str, Json], what: str) -> bytes:
    r"""Return a record as a line with its checksum; `what` names it in an error.

    Raises:
        InputError: it holds what JSON cannot, such as NaN.

    Example:
        >>> sealed({"a": 1}, "record")
        b'{"a":1,"crc":"561bacaf"}\n'
    """
    text = dumps(record, what=what).encode()
    return text[:-1] + _seal(text) + b"\n"


def parsed(line: bytes) -> dict[str, Any]:
    """Return the record of a line; its checksum is not looked at.

    Raises:
        ValueError: it is no JSON object.
    """
    try:
        record = json.loads(line)
    except RecursionError as error:
        raise ValueError(str(error)) from error
    if not isinstance(record, dict):
        raise ValueError("it is not a JSON object")
    return cast("dict[str, Any]", record)


def check_seal(line: bytes) -> None:
    """Compare a line, without its end, with its checksum.

    Raises:
        ValueError: they differ.
    """
    text, seal = line[:-_SEAL_BYTES] + b"}", line[-_SEAL_BYTES:]
    if not _SEAL.fullmatch(seal) or seal != _seal(text):
        raise ValueError("its checksum is another")


def _seal(text: bytes) -> bytes:
    """The end of a line whose record is `text`: its checksum as the last key."""
    return f',"crc":"{zlib.crc32(text):08x}"}}'.encode()
