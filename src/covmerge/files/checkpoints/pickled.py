"""Pickle files, read as records of their tensors without running anything that the pickles name.

`torch.save(module)` and `pickle.dump(module)` store a program: which classes to create and which
functions to call. `unpickler.py` reads this program. This module has the file formats around it,
and finds the tensors' numbers in them.
"""

from __future__ import annotations

import io
import os
import pickletools
import struct
import zipfile
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from io import BufferedReader
from pathlib import Path
from typing import IO, cast

import torch

from covmerge.base.errors import CheckpointError
from covmerge.files.checkpoints.pickle_bounds import (
    MAX_STEPS,
    ZIP_MAGIC,
    check_archive,
    check_steps,
    check_whole,
)
from covmerge.files.checkpoints.unpickler import NEXT, Loading, Storage, StorageOf, Unpickler
from covmerge.files.stores.regular_file import failing_as, open_regular

ReadAt = Callable[[int, int], bytearray]  # reads some bytes of a file, from an offset on
_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C  # the number at the start of torch's format from before 1.6
_LFS_MAGIC = b"vers"
_ORDER = b"little"
_PLAIN = (
    "torch.",
    "builtins.",
    "__builtin__.",
    "collections.",
)  # modules of a state dict's classes


def load_records(path: Path) -> object:
    """Return the records of a file of `torch.save` (of any version) or `pickle.dump`.

    Plain values are returned unchanged, tensors as `Laid`, and other objects as `Inert`.
    """
    return load_noted(path)[0]


def load_noted(path: Path) -> tuple[object, tuple[str, ...]]:
    """Return the records of a file, like `load_records`, and notes about how they were read."""
    where, notes = str(path), list[str]()
    with _readable(where, "a pickle"), _opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        loading = Loading(where, size)
        magic = file.read(len(ZIP_MAGIC))
        if magic == _LFS_MAGIC:
            raise CheckpointError(
                f"{where} is a Git LFS pointer, not the weights themselves: run `git lfs pull` there"
            )
        if magic == ZIP_MAGIC:
            records = _load_archive(file, size, loading, partial(_read_at, path))
        else:
            check_whole(size, where)
            file.seek(0)
            records = _load_bytes(file.read(), loading)
            notes.append(
                f"{where} is no zip archive, as torch has written since 1.6: all {size} bytes are in memory"
            )
    if any(not origin.startswith(_PLAIN) for origin in loading.kinds):
        notes.append(
            f"{where} is a pickle: its tensors were read, and nothing that it names was run"
        )
    return records, tuple(notes)


def load_archive(file: IO[bytes], size: int, where: str, read_at: ReadAt) -> object:
    """Return the records of a zip of `torch.save`, like `load_records`; `read_at` reads its bytes later."""
    with _readable(where, "a tensor"):
        return _load_archive(file, size, Loading(where, size), read_at)


def load_metadata(data: bytes, where: str, steps: int) -> object:
    """Return the records of a plain pickle without tensors, like `load_records`."""
    with _readable(where, "metadata"):
        return _unpickle(data, Loading(where, len(data)), _no_storage(where), steps)


@contextmanager
def _readable(where: str, what: str) -> Generator[None]:
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # hostile bytes make zipfile and the unpickler raise anything
        reason = (str(error).strip().splitlines() or [""])[0]
        raise CheckpointError(
            f"{where} cannot be read as {what} ({type(error).__name__}: {reason}): {NEXT}"
        ) from error


def _load_archive(file: IO[bytes], size: int, loading: Loading, read_at: ReadAt) -> object:
    """Read a zip of torch: `*/data.pkl`, and one member `*/data/KEY` for each storage."""
    with zipfile.ZipFile(file) as archive:
        check_archive(archive, loading.where)
        return _load_members(archive, file, size, loading, read_at)


def _load_members(
    archive: zipfile.ZipFile, file: IO[bytes], size: int, loading: Loading, read_at: ReadAt
) -> object:
    where = loading.where
    found = [entry for entry in archive.infolist() if entry.filename.endswith("/data.pkl")]
    if len(found) != 1:
        raise CheckpointError(f"{where} has {len(found)} members data.pkl, not one: {NEXT}")
    folder = found[0].filename.removesuffix("data.pkl")
    if (order := f"{folder}byteorder") in archive.namelist():
        with archive.open(order) as member:
            if member.read(len(_ORDER)) != _ORDER:
                raise CheckpointError(
                    f"{where} has the bytes of its numbers in another order: {NEXT}"
                )

    def storage(dtype: torch.dtype, key: str, count: int) -> Storage:
        member = f"{folder}data/{key}"
        try:
            entry = archive.getinfo(member)
        except KeyError:
            raise CheckpointError(f"{where} has no member {member}: {NEXT}") from None
        # The real size of the member, not the size that the pickle states, limits what is allocated. A
        # storage of bytes may end in a few bytes that are no whole number.
        if entry.compress_size != entry.file_size or entry.file_size // dtype.itemsize != count:
            raise CheckpointError(
                f"{where}: {member} holds {entry.compress_size} bytes, and {count} numbers of {dtype} "
                f"take {count * dtype.itemsize}: {NEXT}"
            )
        start = _data_start(file, entry)
        if start + entry.file_size > size:
            raise CheckpointError(f"{where}: {member} goes on after the end of the file: {NEXT}")

        def read(first: int, wanted: int) -> bytearray:
            return read_at(start + first * dtype.itemsize, wanted * dtype.itemsize)

        return Storage(dtype, count, read)

    return _unpickle(archive.read(found[0]), loading, storage)


def _data_start(file: IO[bytes], entry: zipfile.ZipInfo) -> int:
    """Return where a member's bytes begin: behind its own header, which alone has the header's length."""
    file.seek(entry.header_offset)
    name, extra = struct.unpack("<26x2H", file.read(30))
    return entry.header_offset + 30 + name + extra


@contextmanager
def _opened(path: Path) -> Generator[BufferedReader]:
    with failing_as(f"{path} cannot be read"), open_regular(path) as file:
        yield file


def _read_at(path: Path, start: int, size: int) -> bytearray:
    data = bytearray(size)
    with _opened(path) as file:
        file.seek(start)
        count = file.readinto(data)
    if count != size:
        raise CheckpointError(f"{path} ends at byte {start + count}: {NEXT}")
    return data


def _load_bytes(data: bytes, loading: Loading) -> object:
    """Read torch's format from before 1.6, or a plain pickle."""
    stream, where = io.BytesIO(data), loading.where
    first = _next_pickle(stream, where)
    found = _unpickle(first, loading, _no_storage(where))
    if found != _LEGACY_MAGIC:
        return found
    for _ in ("protocol", "system"):
        _next_pickle(stream, where)
    declared: dict[str, Storage] = {}
    places: dict[str, memoryview] = {}

    def storage(dtype: torch.dtype, key: str, count: int) -> Storage:
        def read(first: int, wanted: int) -> bytearray:
            part = places[key][first * dtype.itemsize : (first + wanted) * dtype.itemsize]
            return bytearray(part)

        return declared.setdefault(key, Storage(dtype, count, read))

    content = _unpickle(_next_pickle(stream, where), loading, storage)
    keys = _unpickle(_next_pickle(stream, where), loading, _no_storage(where))
    for key in cast("list[str]", keys):
        if key not in declared:
            raise CheckpointError(f"{where} has the storage {key!r}, which nothing uses: {NEXT}")
        places[key] = _legacy_storage(stream, declared[key], f"{where}: storage {key}")
    absent = declared.keys() - places.keys()
    if absent:
        raise CheckpointError(f"{where} has no storage {min(absent)!r}, which tensors use: {NEXT}")
    return content


def _legacy_storage(stream: io.BytesIO, storage: Storage, where: str) -> memoryview:
    """Read a count and that many numbers, without a copy."""
    (count,) = struct.unpack("<q", stream.read(8))
    size, start = storage.count * storage.dtype.itemsize, stream.tell()
    data = stream.getbuffer()[start : start + size]
    stream.seek(start + len(data))
    if count != storage.count or len(data) != size:
        raise CheckpointError(
            f"{where} says {count} numbers of {storage.dtype} and holds {len(data)} bytes, where "
            f"{storage.count} were announced: {NEXT}"
        )
    return data


def _next_pickle(stream: io.BytesIO, where: str, steps: int = MAX_STEPS) -> bytes:
    """Return the bytes of one pickle, checked for steps that would take memory before other checks."""
    start = stream.tell()
    check_steps(stream, where, steps)
    stream.seek(start)
    left = stream.getbuffer().nbytes - start
    for opcode, argument, _ in pickletools.genops(stream):
        # The unpickler's memo is an array, and a step's index sets its length.
        if opcode.name in ("PUT", "BINPUT", "LONG_BINPUT") and cast("int", argument) > left:
            raise CheckpointError(
                f"{where}: the pickle counts {argument} objects in {left} bytes: {NEXT}"
            )
        if opcode.name.startswith("EXT"):
            raise CheckpointError(f"{where}: the pickle names objects by a registry: {NEXT}")
    end = stream.tell()
    return stream.getvalue()[start:end]


def _no_storage(where: str) -> StorageOf:
    def refuse(dtype: torch.dtype, key: str, count: int) -> Storage:
        raise CheckpointError(f"{where} has a storage outside of torch's formats: {NEXT}")

    return refuse


def _unpickle(data: bytes, loading: Loading, storage: StorageOf, steps: int = MAX_STEPS) -> object:
    checked = _next_pickle(io.BytesIO(data), loading.where, steps)
    return Unpickler(checked, loading, storage, _load_bytes).load()
