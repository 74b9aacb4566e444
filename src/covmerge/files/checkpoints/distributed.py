"""Folders of torch.distributed.checkpoint (DCP), as FSDP and similar libraries save them.

    .metadata           a pickle: every tensor's dtype and shape, its chunks, and their places
    __0_0.distcp        one file for each writer: tensors as `torch.save` writes them, one after
                        another, or all of them as one safetensors file

The pickle is read as records (`unpickler.py`), so that no class in it is created and no function
called. A tensor is composed of its chunks; only the wanted rows are read.
"""

from __future__ import annotations

import io
import math
import re
from collections import defaultdict
from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import IO, Any, cast

from torch import Tensor

from covmerge.base.errors import CheckpointError
from covmerge.base.text import some
from covmerge.base.threads import ThreadPool
from covmerge.base.types import TensorHeader
from covmerge.files.checkpoints.base import check_name, check_unchanged
from covmerge.files.checkpoints.header import SafetensorsFile, open_stored, read_into
from covmerge.files.checkpoints.json_file import shorten
from covmerge.files.checkpoints.layout import MAX_TENSORS, SAFETENSORS_NAMES
from covmerge.files.checkpoints.pickle_bounds import ZIP_MAGIC
from covmerge.files.checkpoints.pickled import load_archive, load_metadata
from covmerge.files.checkpoints.pieces import Piece, Pieced, PiecedFiles
from covmerge.files.checkpoints.unpickler import (
    Inert,
    Laid,
    Sealed,
    attributes,
    kind_of,
    numbers,
    whole_booleans,
)
from covmerge.files.stores.store import Opened, Stamp, Store, StoredFile, child

METADATA = ".metadata"
_FSDP = re.compile(r"pytorch_model_fsdp_[0-9]+", re.ASCII)  # in a trainer's checkpoint

_NEXT = "convert it where it was saved, with torch.distributed.checkpoint.format_utils.dcp_to_torch_save"
_MAX_BYTES = 2**28
_MAX_STEPS = 20_000_000  # one chunk takes 70 steps
_MAX_DIMS = 64
_PADDING = 2**20  # bytes that a writer may leave after its last tensor
_AT_ONCE = 8
DTYPES = {str(dtype): dtype for dtype in SAFETENSORS_NAMES}
_MODEL = "model"  # the trainers' name of the model among everything they save


@dataclass(frozen=True)
class _Chunk:
    """A part of a tensor, and its place in a file."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int


@dataclass(frozen=True)
class _Entry:
    """A tensor and its key in the metadata."""

    key: str
    header: TensorHeader
    chunks: Sequence[_Chunk]


def open_distributed(store: Store, names: Collection[str]) -> DistributedFiles | None:
    """Open a folder of DCP, or the DCP folder in a trainer's checkpoint; return None if there is none."""
    if METADATA in names:
        return DistributedFiles(StoredFile(store, METADATA))
    folders = [name for name in store.folders() if _FSDP.fullmatch(name)]
    inner = [store.inside(name) for name in folders]
    found = [StoredFile(one, METADATA) for one in inner if one.is_file(METADATA)]
    return DistributedFiles(found[0]) if len(found) == 1 else None


class DistributedFiles(PiecedFiles):
    """The model's tensors in a folder of DCP; optimizer and trainer states are ignored."""

    def __init__(self, metadata: StoredFile) -> None:
        where = str(metadata)
        chosen, left, self._ends = _entries(metadata)
        names = sorted({chunk.file for entry in chosen for chunk in entry.chunks})
        files = [child(metadata.store, name) for name in names]
        with ThreadPool(_AT_ONCE) as pool:  # remote files are slow to open
            found = pool.map(_inspect, files)
            self._stamps = dict(zip(names, found, strict=True))
        self._file = {file.name: file for file in files}
        self._whole = {
            name: SafetensorsFile(self._file[name])
            for name, (_, magic) in self._stamps.items()
            if magic != ZIP_MAGIC
        }
        for entry in chosen:
            self._check(entry, f"{where}: tensor '{entry.key}'")
        self._laid: dict[_Chunk, Laid] = {}
        tensors = [
            Pieced(
                entry.header,
                [Piece(c.offsets, c.sizes, partial(self._read, entry, c)) for c in entry.chunks],
            )
            for entry in chosen
        ]
        super().__init__(where, (metadata, *files), tensors, f"{where}: {left}" if left else "")
        self._check_apart(chosen, where)
        self._check_ends()

    def _read(self, entry: _Entry, chunk: _Chunk, rows: range | None) -> Tensor:
        """Read a chunk, or some of its rows."""
        file = self._file[chunk.file]
        if chunk.file in self._whole:
            part = self._whole[chunk.file].read(entry.key, rows)
        else:
            if chunk not in self._laid:
                self._laid[chunk] = self._find(entry, chunk, f"{file}: tensor '{entry.key}'")
            part = self._laid[chunk].tensor(rows)
        return whole_booleans(part, f"{file}: '{entry.key}'")

    def _find(self, entry: _Entry, chunk: _Chunk, where: str) -> Laid:
        """Return the place of a chunk's numbers in its bytes."""

        def read_at(start: int, count: int) -> bytearray:
            data = bytearray(count)
            with self._opened(chunk) as opened:
                read_into(memoryview(data), opened, chunk.start + start, where)
            return data

        with self._opened(chunk) as opened:
            data = cast("IO[bytes]", _Slice(opened, chunk, where))
            laid = load_archive(data, chunk.length, where, read_at)
        known = (entry.header.dtype, chunk.sizes)
        if not isinstance(laid, Laid) or (laid.dtype, laid.shape) != known:
            raise CheckpointError(
                f"{where} is no tensor of shape {list(chunk.sizes)} and {entry.header.dtype} there, as "
                f"{METADATA} says: the files are of different checkpoints, fetch them again"
            )
        return laid

    @contextmanager
    def _opened(self, chunk: _Chunk) -> Generator[Opened]:
        file = self._file[chunk.file]
        with open_stored(file) as opened:
            check_unchanged(file, self._stamps[chunk.file][0], opened.stamp)
            yield opened

    def _check(self, entry: _Entry, where: str) -> None:
        """Raise if a file does not have the bytes of one of an entry's chunks."""
        for chunk in entry.chunks:
            size = math.prod(chunk.sizes) * entry.header.dtype.itemsize
            (held, *_), _ = self._stamps[chunk.file]
            if chunk.file in self._whole:
                found = self._whole[chunk.file].headers.get(entry.key)
                if found is None or (found.shape, found.dtype) != (chunk.sizes, entry.header.dtype):
                    raise CheckpointError(
                        f"{where} is not in {chunk.file} as {METADATA} says: the files are of different "
                        "checkpoints, fetch them again"
                    )
            elif chunk.start + chunk.length > held or size > chunk.length:
                raise CheckpointError(
                    f"{where} has {size} bytes in {chunk.file} from {chunk.start}, which is {held} bytes "
                    "long: it was cut short, fetch it again"
                )

    def _check_apart(self, entries: Sequence[_Entry], where: str) -> None:
        """Raise if chunks share bytes, because a small file could then pass for a model of any size."""
        spans: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for entry in entries:
            for chunk in entry.chunks:
                if chunk.file not in self._whole:
                    spans[chunk.file].append((chunk.start, chunk.start + chunk.length))
            # A safetensors file has only one tensor with a given name.
            whole = [chunk.file for chunk in entry.chunks if chunk.file in self._whole]
            if len(set(whole)) < len(whole):
                raise CheckpointError(
                    f"{where} says of two chunks of '{entry.key}' that they are the same tensor of a "
                    "file: fetch the files again"
                )
        for name, places in spans.items():
            places.sort()
            if any(stop > start for (_, stop), (start, _) in pairwise(places)):
                raise CheckpointError(
                    f"{where} says of two chunks that they have the same bytes of {name}: fetch the "
                    "files again"
                )

    def _check_ends(self) -> None:
        """Raise if a file goes on far beyond the metadata's bytes, because all of it would be hashed."""
        for name, ((size, *_), _) in self._stamps.items():
            if name not in self._whole and size > self._ends[name] + _PADDING:
                raise CheckpointError(
                    f"{self._file[name]} has {size} bytes, and {METADATA} names none after the first "
                    f"{self._ends[name]}: fetch the files again"
                )


class _Slice(io.RawIOBase):
    """The bytes of a chunk as a file for `zipfile`, which reads only a few bytes at its end."""

    def __init__(self, opened: Opened, chunk: _Chunk, where: str) -> None:
        self._opened, self._chunk, self._where = opened, chunk, where
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._chunk.length}[whence]
        if base + offset < 0:
            raise ValueError("a place before the first byte")
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        target = memoryview(buffer).cast("B")
        count = min(len(target), max(0, self._chunk.length - self._at))
        read_into(target[:count], self._opened, self._chunk.start + self._at, self._where)
        self._at += count
        return count


def _inspect(file: StoredFile) -> tuple[Stamp, bytes]:
    """Return the stamp of a file of tensors, and its first bytes, which tell its format."""
    with open_stored(file) as opened:
        stamp = opened.stamp
        magic = bytearray(min(len(ZIP_MAGIC), stamp[0]))
        read_into(memoryview(magic), opened, 0, str(file))
    return stamp, bytes(magic)


def _entries(metadata: StoredFile) -> tuple[list[_Entry], str, Mapping[str, int]]:
    """Read the metadata; return the model's tensors, a note on the others, and the end of each file."""
    where = str(metadata)
    with open_stored(metadata) as opened:
        size = opened.stamp[0]
        if size > _MAX_BYTES:
            raise CheckpointError(f"{where} has {size} bytes, and {_MAX_BYTES} are read: {_NEXT}")
        data = bytearray(size)
        read_into(memoryview(data), opened, 0, where)
    content = _fields(load_metadata(bytes(data), where, _MAX_STEPS), "Metadata", where)
    declared = _mapping(content, "state_dict_metadata", where)
    paths = attributes(content.get("planner_data"))
    tensors = {
        _text(key, where): value
        for key, value in declared.items()
        if kind_of(value) != "BytesStorageMetadata"
    }
    if len(tensors) > MAX_TENSORS:
        raise CheckpointError(
            f"{where} has {len(tensors)} tensors, and {MAX_TENSORS} are read: {_NEXT}"
        )
    named, left = _of_model({key: _path(paths.get(key), key) for key in tensors}, where)
    places: dict[tuple[str, tuple[int, ...] | None], Mapping[object, object]] = {}
    ends: dict[str, int] = defaultdict(int)
    for index, info in _mapping(content, "storage_data", where).items():
        known, place = _fields(index, "MetadataIndex", where), _fields(info, "_StorageInfo", where)
        name = _text(place.get("relative_path"), where)
        ends[name] = max(ends[name], sum(_sizes((place.get("offset"), place.get("length")), where)))
        if (key := _text(known.get("fqn"), where)) in named:
            offset = known.get("offset")
            at = None if offset is None else _sizes(offset, where)
            places[key, at] = place
    found = [
        _entry(key, name, _fields(tensors[key], "TensorStorageMetadata", where), places, where)
        for key, name in named.items()
    ]
    return found, left, ends


def _entry(
    key: str,
    name: str,
    stored: Mapping[object, object],
    places: Mapping[tuple[str, tuple[int, ...] | None], Mapping[object, object]],
    where: str,
) -> _Entry:
    where = f"{where}: tensor {shorten(key)}"
    check_name(name, where)
    shape = _sizes(stored.get("size"), where)
    properties = _record(stored.get("properties"), "TensorProperties", where).state
    # dtype, layout, requires_grad, memory format, pinned
    kinds = cast("tuple[object, ...]", properties) if isinstance(properties, tuple) else ()
    dtype = DTYPES.get(kinds[0].origin) if kinds and isinstance(kinds[0], Sealed) else None
    layout = kinds[1] if len(kinds) > 1 else None
    if dtype is None or not isinstance(layout, Inert) or layout.args != ("torch.strided",):
        raise CheckpointError(f"{where} is no dense tensor of a dtype that can be stored: {_NEXT}")
    if math.prod(max(1, length) for length in shape) * dtype.itemsize >= 2**63:
        raise CheckpointError(f"{where} of shape {list(shape)} is longer than any can be: {_NEXT}")
    listed = stored.get("chunks")
    if not isinstance(listed, list) or not listed:
        raise CheckpointError(f"{where} has no chunks: {_NEXT}")
    chunks: list[_Chunk] = []
    for one in cast("list[object]", listed):
        box = _fields(one, "ChunkStorageMetadata", where)
        offsets, sizes = (_sizes(box.get(part), where) for part in ("offsets", "sizes"))
        info = places.get((key, offsets)) or places.get((key, None))
        inside = len(offsets) == len(sizes) == len(shape) and all(
            first + count <= length
            for first, count, length in zip(offsets, sizes, shape, strict=True)
        )
        if info is None or not inside:
            raise CheckpointError(
                f"{where} of shape {list(shape)} has a chunk at {list(offsets)} that is not in it, or is "
                "in no file: fetch the files again"
            )
        if info.get("transform_descriptors"):
            raise CheckpointError(f"{where} is stored by an extension of torch's: {_NEXT}")
        start, length = _sizes((info.get("offset"), info.get("length")), where)
        chunks.append(
            _Chunk(offsets, sizes, _text(info.get("relative_path"), where), start, length)
        )
    return _Entry(key, TensorHeader(name, shape, dtype), chunks)


def _of_model(paths: Mapping[str, tuple[object, ...]], where: str) -> tuple[dict[str, str], str]:
    """Return the name of each of the model's tensors by its key, and a note on the others.

    The saved object is a model's state dict, or nested dicts with a state dict, mostly under "model".
    """
    tops = {path[0] for path in paths.values() if len(path) > 1}
    inner = {path[:2] for path in paths.values() if len(path) > 2 and path[1] == _MODEL}
    prefix: tuple[object, ...] = ()
    if _MODEL in tops:
        prefix = (_MODEL,)
    elif len(inner) == 1:
        prefix = next(iter(inner))
    elif not any(len(path) == 1 for path in paths.values()) and len(tops) == 1:
        prefix = tuple(tops)
    elif not any(len(path) == 1 for path in paths.values()):
        raise CheckpointError(
            f"{where} has tensors under {some(sorted(map(str, tops)), quoted=True)}, and none of these is "
            f"called '{_MODEL}': {_NEXT}"
        )
    depth = len(prefix)
    found = {
        key: ".".join(map(str, path[depth:]))
        for key, path in paths.items()
        if path[:depth] == prefix and (depth or len(path) == 1)
    }
    if len(set(found.values())) < len(found):
        raise CheckpointError(f"{where} has two tensors of one name: {_NEXT}")
    others = len(paths) - len(found)
    which = f"under '{'.'.join(map(str, prefix))}'" if prefix else "at its top"
    return (
        found,
        f"the {len(found)} tensors {which} were read, and not {others} others" if others else "",
    )


def _fields(record: object, kind: str, where: str) -> Mapping[object, object]:
    """Return the attributes of a record of one class."""
    return attributes(_record(record, kind, where))


def _mapping(content: Mapping[object, object], name: str, where: str) -> Mapping[object, object]:
    found = content.get(name)
    if not isinstance(found, Mapping):
        raise CheckpointError(f"{where} has no {name}: it is no metadata of DCP, {_NEXT}")
    return cast("Mapping[object, object]", found)


def _record(value: object, kind: str, where: str) -> Inert:
    if not isinstance(value, Inert) or kind_of(value) != kind:
        raise CheckpointError(
            f"{where} has a {kind_of(value)} where DCP has a {kind}: fetch it again, or {_NEXT}"
        )
    return value


def _text(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise CheckpointError(
            f"{where} has {shorten(value)} where a name should be: fetch it again"
        )
    return value


def _sizes(value: object, where: str) -> tuple[int, ...]:
    found = numbers(value)
    if found is None or len(found) > _MAX_DIMS:
        raise CheckpointError(f"{where} has {shorten(value)} where sizes should be: fetch it again")
    return found


def _path(value: object, key: str) -> tuple[object, ...]:
    """Return a tensor's path in the saved object; without a path, its key."""
    items = cast("tuple[object, ...]", value) if isinstance(value, tuple) else ()
    return items if items and all(type(part) in (str, int) for part in items) else (key,)
