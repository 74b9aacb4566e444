"""What a merge has finished, one JSON line a work item, so that a killed merge can be resumed.

    {"plan":"<hash>","format":2,"of":{"recipe":{},"sources":{}},"crc":"<hex>"}
    {"tensor":"h.0.attn.c_attn.weight","rows":[0,768],"checksum":"<hex>","stats":{},"crc":"<hex>"}

A line is appended by a single `write`: a kill leaves at most one torn line, the last, and that is
taken for work not done. Any other line must have the checksum that it ends in. Of the rows the
journal only claims: a resumed merge reads the bytes back and compares.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

from covmerge.base.errors import CheckpointError, InputError
from covmerge.base.settings import Hint
from covmerge.base.text import some
from covmerge.base.types import Json
from covmerge.files.checkpoints.differences import changes
from covmerge.files.checkpoints.json_file import shorten
from covmerge.files.checkpoints.sealed import check_seal, parsed, sealed
from covmerge.files.stores.local import local_file
from covmerge.files.stores.store import StoredFile, WritableFile

FORMAT = 2

_MAX_BYTES = 2**30
COMPUTED = "computed"  # how, see `RunOptions.computed`
THREADS = "threads"  # that computed large matrices, see `RunOptions.threads_for`
ORDER = "order of experts"
PROCESSOR = "processor"  # that began the merge; another one may go on with it
_LISTED = (
    "covmerge",
    "torch",
    "recipe",
    ORDER,
    COMPUTED,
    THREADS,
)  # of what a hash covers, the keys whose values messages show
_MOST_CHANGES = 5  # that are named

Key = tuple[str, tuple[int, int]]


@dataclass(frozen=True)
class Entry:
    """One finished work item: rows `[rows[0], rows[1])` of dimension 0 of a tensor.

    Attributes:
        tensor: its name in the output.
        rows: first row, and one past the last.
        checksum: of the bytes written, as `ShardWriter.write` returns it.
        stats: the method's diagnostics; it goes to the report of a resumed merge as well.
    """

    tensor: str
    rows: tuple[int, int]
    checksum: str
    stats: Mapping[str, Json] = field(default_factory=dict[str, Json])

    @property
    def key(self) -> Key:
        """What identifies the work item."""
        return self.tensor, self.rows

    def as_json(self) -> dict[str, Json]:
        """The same as plain JSON."""
        return {
            "tensor": self.tensor,
            "rows": self.rows,
            "checksum": self.checksum,
            "stats": self.stats,
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Entry:
        """Return the entry that was written as JSON; other keys are passed over.

        Raises:
            ValueError: it is none.
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
    """An append-only record of finished work; use `create` or `resume`. One thread at a time.

    Attributes:
        processor: what began the merge, as `of` says; None: it does not say.

    Example:
        >>> from tempfile import mkdtemp
        >>> path = Path(mkdtemp()) / "journal.jsonl"
        >>> Journal.create(path, plan_hash="1f").append(Entry("w", (0, 4), "c0ffee"))
        >>> Journal.resume(path, plan_hash="1f").finished["w", (0, 4)].checksum
        'c0ffee'
    """

    def __init__(
        self, file: WritableFile, finished: dict[Key, Entry], processor: str | None = None
    ) -> None:
        self._file = file
        self._finished = finished
        self.processor = processor

    @classmethod
    def create(
        cls, path: Path | WritableFile, plan_hash: str, of: Mapping[str, Json] | None = None
    ) -> Journal:
        """Start an empty journal for the plan; a journal that exists is an error.

        Args:
            path: the journal.
            plan_hash: tells the plan from others.
            of: what the hash is of, as far as a user can tell it, to name what changed.

        Raises:
            InputError: `path` exists, or cannot be written.
        """
        file = local_file(path)
        if file.store.exists(file.name):
            raise InputError(
                f"{file} exists: pass {Hint('resume')} to go on, {Hint('overwrite')} to start again"
            )
        line = sealed({"plan": plan_hash, "format": FORMAT, "of": of}, "journal")
        file.store.create(file.name, len(line), line, needed=len(line))
        return cls(file, {})

    @classmethod
    def resume(
        cls, path: Path | WritableFile, plan_hash: str, of: Mapping[str, Json] | None = None
    ) -> Journal:
        """Read a journal and go on with it; a torn last line is cut off. The arguments are `create`'s.

        Of two lines for the same rows (recomputed after a failed check) the later one counts.

        Raises:
            InputError: the journal belongs to another plan: recipe, sources or version changed.
            CheckpointError: it cannot be read, or a line other than a torn last one is damaged.
        """
        file = local_file(path)
        lines, size = _complete_lines(file)
        if not lines:
            raise _damaged(file, 1, "it is missing")
        known = _check_plan(file, lines[0], plan_hash, of)
        finished: dict[Key, Entry] = {}
        for number, line in enumerate(lines[1:], start=2):
            entry = _parse_entry(file, number, line)
            finished[entry.key] = entry
        file.store.truncate(file.name, size)
        return cls(file, finished, known.get(PROCESSOR))

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
        line = sealed(entry.as_json(), f"journal entry of '{entry.tensor}'")
        self._file.store.append(self._file.name, line)
        self._finished[entry.key] = entry


def _complete_lines(file: StoredFile) -> tuple[list[bytes], int]:
    """The lines that end in a newline, and their bytes in all."""
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
    file: StoredFile, line: bytes, plan_hash: str, of: Mapping[str, Json] | None
) -> Mapping[str, Any]:
    """Return what the journal's plan is of, if it is this one."""
    head = _parse(file, 1, line)  # its checksum is looked at when its format is known
    if head.get("format") != FORMAT:
        raise CheckpointError(
            f"{file} has format {shorten(head.get('format'))}, this version of covmerge reads {FORMAT}: "
            f"resume with the version that began the merge, or start over with {Hint('overwrite')}"
        )
    _check_seal(file, 1, line)
    known = head.get("of")
    known = cast("dict[str, Any]", known) if isinstance(known, dict) else {}
    if head.get("plan") != plan_hash:
        changed = changes(known, {**of, PROCESSOR: known.get(PROCESSOR)}, _LISTED) if of else []
        what = (
            some(changed, _MOST_CHANGES, between="; ")
            if changed
            else ("the recipe, its sources or covmerge changed since")
        )
        raise InputError(
            f"{file} is of another merge: {what}. Take these back to go on, or start over with "
            f"{Hint('overwrite')}"
        )
    return known


def _parse_entry(file: StoredFile, number: int, line: bytes) -> Entry:
    record = _parse(file, number, line)
    _check_seal(file, number, line)
    try:
        return Entry.from_json(record)
    except ValueError as error:
        raise _damaged(file, number, str(error)) from error


def _parse(file: StoredFile, number: int, line: bytes) -> dict[str, Any]:
    try:
        return parsed(line)
    except ValueError as error:
        raise _damaged(file, number, str(error)) from error


def _check_seal(file: StoredFile, number: int, line: bytes) -> None:
    try:
        check_seal(line)
    except ValueError as error:
        raise _damaged(file, number, str(error)) from error


def _damaged(file: StoredFile, number: int, why: str) -> CheckpointError:
    return CheckpointError(
        f"line {number} of the journal {file} is damaged ({why}); start over with {Hint('overwrite')}"
    )
