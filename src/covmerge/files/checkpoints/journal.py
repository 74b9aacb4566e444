"""The finished work items of a merge, one JSON line each, so that a killed merge can be resumed.

    {"plan":"<hash>","format":2,"of":{"recipe":{},"sources":{}},"crc":"<hex>"}
    {"tensor":"h.0.attn.c_attn.weight","rows":[0,768],"checksum":"<hex>","stats":{},"crc":"<hex>"}

Each line is appended by a single `write`. A kill leaves at most one torn line, the last one, and
its work counts as not done. Every other line must match the checksum at its end. The journal alone
does not prove that rows were written: a resumed merge reads their bytes and compares checksums.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Collection, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

from covmerge.base.errors import CheckpointError, InputError
from covmerge.base.settings import Hint
from covmerge.base.text import shown, some
from covmerge.base.types import Json
from covmerge.files.checkpoints.json_file import as_object, dumps, shorten
from covmerge.files.stores.local import LocalFolder
from covmerge.files.stores.store import StoredFile

# Lines of JSON that each end in a checksum, so that a line torn by a crash or a file system is found.

_SEAL = re.compile(rb',"crc":"[0-9a-f]{8}"}')
_SEAL_BYTES = len(',"crc":"01234567"}')


def sealed(record: Mapping[str, Json], what: str) -> bytes:
    r"""Return a record as a line with its checksum; `what` names the record in an error.

    Raises:
        InputError: the record has a value that JSON cannot hold, such as NaN.

    Example:
        >>> sealed({"a": 1}, "record")
        b'{"a":1,"crc":"561bacaf"}\n'
    """
    text = dumps(record, what=what).encode()
    return text[:-1] + _seal(text) + b"\n"


def parsed(line: bytes) -> dict[str, Any]:
    """Return the record of a line, without checking its checksum.

    Raises:
        ValueError: the line is no JSON object.
    """
    try:
        record = json.loads(line)
    except RecursionError as error:
        raise ValueError(str(error)) from error
    if not isinstance(record, dict):
        raise ValueError("it is not a JSON object")
    return cast("dict[str, Any]", record)


def check_seal(line: bytes) -> None:
    """Check that a line, given without its newline, matches its checksum.

    Raises:
        ValueError: the line does not match.
    """
    text, seal = line[:-_SEAL_BYTES] + b"}", line[-_SEAL_BYTES:]
    if not _SEAL.fullmatch(seal) or seal != _seal(text):
        raise ValueError("its checksum is another")


def _seal(text: bytes) -> bytes:
    """Return the end of a line with the record `text`: its checksum as the last key."""
    return f',"crc":"{zlib.crc32(text):08x}"}}'.encode()


# Differences between two JSON values as text, to tell what changed since a merge began.

_LONGEST = 60  # number of characters shown of a value


def changes(before: object, now: Mapping[str, object], listed: Collection[str]) -> list[str]:
    """Return texts of what changed: each changed value below `listed` keys; of other keys, only the key.

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
    """Yield a text for each key whose value differs, with both values.

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


FORMAT = 2

_MAX_BYTES = 2**30
COMPUTED = "computed"  # how results are computed, see `RunOptions.computed`
THREADS = "threads"  # number of threads for large matrices, see `RunOptions.threads_for`
ORDER = "order of experts"
PROCESSOR = "processor"  # of the machine that began the merge; another one may resume it
_LISTED = (
    "covmerge",
    "torch",
    "recipe",
    ORDER,
    COMPUTED,
    THREADS,
)  # messages show the values of these keys
_MOST_CHANGES = 5  # number of changes that a message names

Key = tuple[str, tuple[int, int]]


@dataclass(frozen=True)
class Entry:
    """One finished work item: rows `[rows[0], rows[1])` of dimension 0 of a tensor."""

    tensor: str  # name of the output's tensor
    rows: tuple[int, int]  # first row, and one past the last row
    checksum: str  # of the written bytes, from `ShardWriter.write`
    # The method's diagnostics; they are reported after a resumed merge too.
    stats: Mapping[str, Json] = field(default_factory=dict[str, Json])

    @property
    def key(self) -> Key:
        """The key of the work item."""
        return self.tensor, self.rows

    def as_json(self) -> dict[str, Json]:
        """Return the entry as plain JSON."""
        return dict(vars(self))

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Entry:
        """Return the entry for a JSON record; unknown keys are ignored.

        Raises:
            ValueError: the record is no journal entry.
        """
        match record:
            case {
                "tensor": str(tensor),
                "rows": [int(start), int(stop)],
                "checksum": str(checksum),
                "stats": {},  # any mapping
            } if 0 <= start <= stop:
                return cls(tensor, (start, stop), checksum, record["stats"])
            case _:
                raise ValueError("it is not a journal entry")


class Journal:
    """An append-only record of finished work; use `create` or `resume`, from one thread at a time.

    Attributes:
        processor: the processor that began the merge, from `of`; None: unknown.

    Example:
        >>> from tempfile import mkdtemp
        >>> path = Path(mkdtemp()) / "journal.jsonl"
        >>> Journal.create(path, plan_hash="1f").append(Entry("w", (0, 4), "c0ffee"))
        >>> Journal.resume(path, plan_hash="1f").finished["w", (0, 4)].checksum
        'c0ffee'
    """

    def __init__(
        self, path: Path, finished: dict[Key, Entry], processor: str | None = None
    ) -> None:
        self._folder, self._name = LocalFolder(path.parent), path.name
        self._finished = finished
        self.processor = processor

    @classmethod
    def create(cls, path: Path, plan_hash: str, of: Mapping[str, Json] | None = None) -> Journal:
        """Start an empty journal for a plan; an existing journal is an error.

        `of` has the values behind the plan's hash, so that a message can name what changed.

        Raises:
            InputError: `path` exists, or cannot be written.
        """
        folder = LocalFolder(path.parent)
        if folder.exists(path.name):
            raise InputError(
                f"{path} exists: pass {Hint('resume')} to go on, {Hint('overwrite')} to start again"
            )
        folder.put(path.name, sealed({"plan": plan_hash, "format": FORMAT, "of": of}, "journal"))
        return cls(path, {})

    @classmethod
    def resume(cls, path: Path, plan_hash: str, of: Mapping[str, Json] | None = None) -> Journal:
        """Read a journal to continue it; a torn last line is cut off. Arguments are those of `create`.

        If two lines have the same rows (recomputed after a failed check), the later line counts.

        Raises:
            InputError: the journal belongs to another plan: recipe, sources or version changed.
            CheckpointError: the journal cannot be read, or a line other than a torn last one is
                damaged.
        """
        folder = LocalFolder(path.parent)
        lines, size = _complete_lines(StoredFile(folder, path.name))
        with _named_line(path, 1):
            if not lines:
                raise ValueError("it is missing")
            known = _check_plan(path, lines[0], plan_hash, of)
        finished: dict[Key, Entry] = {}
        for number, line in enumerate(lines[1:], start=2):
            with _named_line(path, number):
                record = parsed(line)
                check_seal(line)
                entry = Entry.from_json(record)
            finished[entry.key] = entry
        folder.truncate(path.name, size)
        return cls(path, finished, known.get(PROCESSOR))

    @property
    def finished(self) -> Mapping[Key, Entry]:
        """Finished entries by tensor and rows, in the order of their lines."""
        return MappingProxyType(self._finished)

    def append(self, entry: Entry) -> None:
        """Record finished work, whose bytes must already have been written.

        Raises:
            InputError: the statistics have a value that JSON cannot hold, such as NaN.
            ResourceError: the disk is full; the journal is then as it was before.
        """
        line = sealed(entry.as_json(), f"journal entry of '{entry.tensor}'")
        self._folder.append(self._name, line)
        self._finished[entry.key] = entry


def _complete_lines(file: StoredFile) -> tuple[list[bytes], int]:
    """Return the lines that end in a newline, and their total number of bytes."""
    try:
        size = file.stamp()[0]
        content = b"" if size > _MAX_BYTES else file.read(size, follow=False)
    except OSError as error:
        raise CheckpointError(
            f"cannot read the journal {file}: {error.strerror}; start over with {Hint('overwrite')}"
        ) from error
    if size > _MAX_BYTES:
        raise CheckpointError(
            f"cannot read the journal {file}: it is larger than {_MAX_BYTES} bytes, which none is; "
            f"start over with {Hint('overwrite')}"
        )
    size = content.rfind(b"\n") + 1
    return content[:size].split(b"\n")[:-1], size


def _check_plan(
    path: Path, line: bytes, plan_hash: str, of: Mapping[str, Json] | None
) -> Mapping[str, Any]:
    """Return the journal's `of`; raise if the journal belongs to another plan."""
    head = parsed(line)  # the checksum is checked once the format is known
    if head.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} has format {shorten(head.get('format'))}, this version of covmerge reads {FORMAT}: "
            f"resume with the version that began the merge, or start over with {Hint('overwrite')}"
        )
    check_seal(line)
    known = as_object(head.get("of"))
    if head.get("plan") != plan_hash:
        changed = changes(known, {**of, PROCESSOR: known.get(PROCESSOR)}, _LISTED) if of else []
        what = (
            some(changed, _MOST_CHANGES, between="; ")
            if changed
            else ("the recipe, its sources or covmerge changed since")
        )
        raise InputError(
            f"{path} is of another merge: {what}. Take these back to go on, or start over with "
            f"{Hint('overwrite')}"
        )
    return known


@contextmanager
def _named_line(path: Path, number: int) -> Generator[None]:
    """Name the line in an error about its content."""
    try:
        yield
    except ValueError as error:
        raise CheckpointError(
            f"line {number} of the journal {path} is damaged ({error}); start over with "
            f"{Hint('overwrite')}"
        ) from error
