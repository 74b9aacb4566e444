"""What a merge has finished, one JSON line a work item, so that a killed merge can be resumed.

    {"plan":"<hash>","format":2,"crc":"<hex>"}
    {"tensor":"h.0.attn.c_attn.weight","rows":[0,768],"checksum":"<hex>","stats":{},"crc":"<hex>"}

A line is appended by a single `write`: a kill leaves at most one torn line, the last, and that is
taken for work not done. Any other line must have the checksum that it ends in. Of the rows the
journal only claims: whoever resumes reads the bytes back and compares.
"""

from __future__ import annotations

import errno
import json
import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

from covmerge.checkpoints.strict_json import dumps
from covmerge.errors import CheckpointError, InputError
from covmerge.stores.descriptor import open_descriptor
from covmerge.stores.disk import disk_errors
from covmerge.stores.regular_file import read_regular
from covmerge.types import Json

FORMAT = 2

_MAX_BYTES = 2**30
_SEAL = re.compile(rb',"crc":"[0-9a-f]{8}"}')
_SEAL_BYTES = len(',"crc":"01234567"}')

Key = tuple[str, tuple[int, int]]


@dataclass(frozen=True)
class Entry:
    """One finished work item: rows `[rows[0], rows[1])` of dimension 0 of a tensor.

    Attributes:
        tensor: its name in the output.
        rows: first row, and one past the last.
        checksum: of the bytes written, as `ShardWriter.write` returns it.
        stats: what the method noticed; it goes to the report of a resumed merge as well.
    """

    tensor: str
    rows: tuple[int, int]
    checksum: str
    stats: Mapping[str, Json] = field(default_factory=dict[str, Json])

    @property
    def key(self) -> Key:
        """What identifies the work item."""
        return self.tensor, self.rows


class Journal:
    """An append-only record of finished work; use `create` or `resume`. One thread at a time.

    Example:
        >>> from tempfile import mkdtemp
        >>> path = Path(mkdtemp()) / "journal.jsonl"
        >>> with Journal.create(path, plan_hash="1f") as journal:
        ...     journal.append(Entry("w", (0, 4), "c0ffee"))
        >>> with Journal.resume(path, plan_hash="1f") as journal:
        ...     journal.finished["w", (0, 4)].checksum
        'c0ffee'
    """

    def __init__(self, path: Path, finished: dict[Key, Entry], size: int) -> None:
        self._path = path
        self._finished = finished
        self._size = size
        with disk_errors(path):
            self._fd = open_descriptor(path, os.O_WRONLY | os.O_APPEND)
            os.ftruncate(self._fd, size)

    @classmethod
    def create(cls, path: Path, plan_hash: str) -> Journal:
        """Start an empty journal for the plan; a journal that exists is an error.

        Raises:
            InputError: `path` exists, or cannot be written.
        """
        if os.path.lexists(path):
            raise InputError(f"{path} exists: pass --resume to go on, --overwrite to start again")
        line = _line({"plan": plan_hash, "format": FORMAT}, "journal")
        unfinished = path.with_name(f"{path.name}.new")
        with disk_errors(path):
            unfinished.write_bytes(line)
            unfinished.replace(path)
        return cls(path, {}, len(line))

    @classmethod
    def resume(cls, path: Path, plan_hash: str) -> Journal:
        """Read a journal and go on with it; a torn last line is cut off.

        Of two lines for the same rows (recomputed after a failed check) the later one counts.

        Raises:
            InputError: the journal belongs to another plan: recipe, sources or version changed.
            CheckpointError: it cannot be read, or a line other than a torn last one is damaged.
        """
        lines, size = _complete_lines(path)
        if not lines:
            raise _damaged(path, 1, "it is missing")
        _check_plan(path, lines[0], plan_hash)
        finished: dict[Key, Entry] = {}
        for number, line in enumerate(lines[1:], start=2):
            entry = _parse_entry(path, number, line)
            finished[entry.key] = entry
        return cls(path, finished, size)

    @property
    def finished(self) -> Mapping[Key, Entry]:
        """Entries by tensor and rows, in the order of their lines."""
        return MappingProxyType(self._finished)

    def append(self, entry: Entry) -> None:
        """Record finished work; its bytes must have been written before.

        Raises:
            InputError: the statistics hold what JSON cannot, such as NaN.
            ResourceError: the disk is full; the journal is then as it was before.
        """
        record: dict[str, Json] = {
            "tensor": entry.tensor,
            "rows": entry.rows,
            "checksum": entry.checksum,
            "stats": entry.stats,
        }
        line = _line(record, f"journal entry of '{entry.tensor}'")
        with disk_errors(self._path):
            self._write_line(line)
        self._finished[entry.key] = entry

    def close(self) -> None:
        """Close the file; the journal can be resumed later."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write_line(self, line: bytes) -> None:
        if os.write(self._fd, line) < len(line):
            # The disk is full. A torn line would spoil the journal if another followed: cut it off.
            os.ftruncate(self._fd, self._size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._size += len(line)


def _line(record: Mapping[str, Json], what: str) -> bytes:
    text = dumps(record, what=what).encode()
    return text[:-1] + _seal(text) + b"\n"


def _seal(text: bytes) -> bytes:
    """The end of a line whose record is `text`: its checksum as the last key."""
    return f',"crc":"{zlib.crc32(text):08x}"}}'.encode()


def _complete_lines(path: Path) -> tuple[list[bytes], int]:
    """The lines that end in a newline, and their bytes in all."""
    try:
        content = read_regular(path, _MAX_BYTES, follow=False)
    except (CheckpointError, FileNotFoundError) as error:
        raise CheckpointError(
            f"cannot read the journal {path}: {error}; start over with --overwrite"
        ) from error
    size = content.rfind(b"\n") + 1
    return content[:size].split(b"\n")[:-1], size


def _check_plan(path: Path, line: bytes, plan_hash: str) -> None:
    head = _parse(path, 1, line)  # its checksum is looked at when its format is known
    if head.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} has format {head.get('format')!r}, this version of covmerge reads {FORMAT}: "
            "resume with the version that began the merge, or start over with --overwrite"
        )
    _check_seal(path, 1, line)
    if head.get("plan") != plan_hash:
        raise InputError(
            f"{path} belongs to plan {head.get('plan')}, and the plan is now {plan_hash}: the "
            "recipe, its sources or covmerge changed since; start over with --overwrite"
        )


def _parse_entry(path: Path, number: int, line: bytes) -> Entry:
    record = _parse(path, number, line)
    _check_seal(path, number, line)
    match record:
        case {
            "tensor": str(tensor),
            "rows": [int(start), int(stop)],
            "checksum": str(checksum),
            "stats": {},  # any mapping
        } if 0 <= start <= stop:
            return Entry(tensor, (start, stop), checksum, record["stats"])
        case _:
            raise _damaged(path, number, "it is not a journal entry")


def _parse(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, number, str(error)) from error
    if not isinstance(record, dict):
        raise _damaged(path, number, "it is not a JSON object")
    return cast("dict[str, Any]", record)


def _check_seal(path: Path, number: int, line: bytes) -> None:
    text, seal = line[:-_SEAL_BYTES] + b"}", line[-_SEAL_BYTES:]
    if not _SEAL.fullmatch(seal) or seal != _seal(text):
        raise _damaged(path, number, "its checksum is another")


def _damaged(path: Path, number: int, why: str) -> CheckpointError:
    return CheckpointError(
        f"line {number} of the journal {path} is damaged ({why}); start over with --overwrite"
    )
