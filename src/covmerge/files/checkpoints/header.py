"""The header of a safetensors file, checked before anything is allocated from it.

A file is `u64 length (little-endian) | JSON header of that length | data`. For each tensor, the
header has its dtype, its shape and the range of its bytes `[begin, end)` in the data. Together the
tensors must cover the data exactly once, and the data must end with the file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor

from covmerge.base.errors import CheckpointError
from covmerge.base.types import TensorHeader
from covmerge.files.checkpoints.base import WeightFile, check_name, check_unchanged, find_header
from covmerge.files.checkpoints.json_file import parse_object, shorten
from covmerge.files.checkpoints.layout import MAX_HEADER_BYTES, SAFETENSORS_NAMES, Slot
from covmerge.files.stores.regular_file import failing_as
from covmerge.files.stores.store import Opened, Stamp, StoredFile

LENGTH_BYTES = 8

_DTYPES = {name: dtype for dtype, name in SAFETENSORS_NAMES.items()}
# Two numbers a byte, and torch counts such a pair as one element. No torch has a dtype of 6 bits.
_PAIRS = {"F4": getattr(torch, "float4_e2m1fn_x2", None)}
_SUB_BYTE = ("F4", "F6_E2M3", "F6_E3M2")
_KEYS = {"dtype", "shape", "data_offsets"}
_MAX_DIMENSIONS = 64  # torch's own limit for most operations
_MAX_BYTES = 2**63 - 1
_CUT_SHORT = "the download was probably cut short, fetch the file again"


def parse_header(text: bytes, file_size: int, where: str) -> Mapping[str, Slot]:
    """Return the place of each tensor, in the order of the data; `text` is the JSON header.

    Raises:
        CheckpointError: the header departs from the format in any way; the message has the file,
            the tensor and the numbers.

    Example:
        >>> text = b'{"w": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}'
        >>> parse_header(text, 8 + len(text) + 24, "model.safetensors")["w"].header.shape
        (2, 3)
    """
    if not text.startswith(b"{"):
        raise CheckpointError(
            f"{where} has a header that does not begin with '{{': is it a safetensors file?"
        )
    entries = parse_object(text, f"the header of {where}")
    _texts(entries.pop("__metadata__", None), where)
    start = LENGTH_BYTES + len(text)
    slots = sorted(
        (_slot(name, entry, start, where) for name, entry in entries.items()),
        key=lambda slot: (slot.offset, slot.nbytes),
    )
    _check_cover(slots, start, file_size, where)
    return MappingProxyType({slot.header.name: slot for slot in slots})


def _texts(metadata: object, where: str) -> dict[str, str]:
    if metadata is None:  # or null, as MLX writes it
        return {}
    texts = isinstance(metadata, dict) and all(
        isinstance(value, str) for value in cast("dict[str, object]", metadata).values()
    )
    if not texts:
        raise CheckpointError(
            f"{where} has a __metadata__ that is not a mapping of strings to strings: "
            "save the file again"
        )
    return cast("dict[str, str]", metadata)


def _slot(name: str, entry: object, start: int, where: str) -> Slot:
    where = f"{where}: tensor {shorten(name)}"
    check_name(name, where)
    if not isinstance(entry, dict) or set(cast("dict[str, object]", entry)) != _KEYS:
        raise CheckpointError(
            f"{where} has the entry {shorten(cast('object', entry))}, not just dtype, shape and "
            "data_offsets: save the file again"
        )
    fields = cast("dict[str, Any]", entry)
    dtype = _dtype(fields["dtype"], where)
    shape = _sizes(fields["shape"], "shape", where)
    if fields["dtype"] in _PAIRS:
        shape = _in_pairs(shape, where)
    header = TensorHeader(name, shape, dtype)
    _check_bytes(header, where)
    offsets = _sizes(fields["data_offsets"], "data_offsets", where)
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(
            f"{where} has data_offsets {list(offsets)}, not a begin and an end: save the file again"
        )
    begin, end = offsets
    if end - begin != header.nbytes:
        raise CheckpointError(
            f"{where} is {fields['dtype']} of shape {list(shape)}, which takes {header.nbytes} "
            f"bytes, and its data_offsets {list(offsets)} give {end - begin}: save the file again"
        )
    return Slot(start + begin, header.nbytes, header)


def _dtype(name: object, where: str) -> torch.dtype:
    if isinstance(name, str) and name in _DTYPES:
        return _DTYPES[name]
    pair = _PAIRS.get(name) if isinstance(name, str) else None
    if pair is not None:
        return pair
    if name in _SUB_BYTE:
        raise CheckpointError(
            f"{where} is {name}, packed numbers of less than a byte with which nothing can be "
            "computed: dequantise the checkpoint first"
        )
    raise CheckpointError(
        f"{where} has the dtype {shorten(name)}, which torch {torch.__version__} and this version "
        f"do not read: convert it to one of {', '.join(_DTYPES)}"
    )


def _in_pairs(shape: tuple[int, ...], where: str) -> tuple[int, ...]:
    if not shape or shape[-1] % 2:
        raise CheckpointError(
            f"{where} is F4 of shape {list(shape)}, whose rows are no whole bytes: save the file again"
        )
    return (*shape[:-1], shape[-1] // 2)


def _sizes(value: object, key: str, where: str) -> tuple[int, ...]:
    """Check and return a list of sizes; booleans, which are integers in Python, are refused."""
    items = cast("list[object]", value if isinstance(value, list) else [value])
    listed = isinstance(value, list) and len(items) <= _MAX_DIMENSIONS
    if not listed or not all(type(item) is int and 0 <= item <= _MAX_BYTES for item in items):
        raise CheckpointError(
            f"{where} has the {key} {shorten(cast('object', value))}, not a list of at most "
            f"{_MAX_DIMENSIONS} non-negative 64-bit integers: save the file again"
        )
    return tuple(cast("list[int]", items))


def _check_bytes(header: TensorHeader, where: str) -> None:
    # An empty tensor has a dimension of 0, but torch still multiplies the other ones for strides.
    size = header.dtype.itemsize
    for length in header.shape:
        size *= max(length, 1)
    if size > _MAX_BYTES:
        raise CheckpointError(
            f"{where} has the shape {list(header.shape)}, whose bytes overflow 64 bits: "
            "save the file again"
        )


def _check_cover(slots: Iterable[Slot], start: int, file_size: int, where: str) -> None:
    """Check that sorted slots cover the data of the file exactly once, without hole or overlap."""
    end = start
    for slot in slots:
        name = shorten(slot.header.name)
        begin, stop = slot.offset - start, slot.offset - start + slot.nbytes
        if slot.offset + slot.nbytes > file_size:
            raise CheckpointError(
                f"{where}: tensor {name} takes bytes {begin} to {stop} of the data, and the file "
                f"holds {file_size - start} bytes of data: {_CUT_SHORT}"
            )
        if slot.offset != end:
            fault = "overlaps the tensor before it" if slot.offset < end else "leaves a hole"
            raise CheckpointError(
                f"{where}: tensor {name} begins at byte {begin} of the data, where {end - start} "
                f"was expected, and so {fault}: save the file again"
            )
        end += slot.nbytes
    if end != file_size:
        raise CheckpointError(
            f"{where} is {file_size} bytes long, and its header describes {end}: {_CUT_SHORT}"
        )


# Reading bytes of a stored file completely or with an error that names the file; files of tensors.


class SlottedFile(WeightFile):
    """A file in which each tensor is stored in one piece, row by row.

    The file is opened again for every read. Otherwise the shards of a model and all its experts
    would be more open files than a process may have.

    Attributes:
        stamp: the stamp of the file when its header was read.
        slots: the places of its tensors, by name, already checked against the file's size.
    """

    def __init__(self, file: StoredFile, stamp: Stamp, slots: Mapping[str, Slot]) -> None:
        self._file = file
        self.stamp = stamp
        self.slots = slots
        self.headers = MappingProxyType({name: slot.header for name, slot in slots.items()})

    def read(self, name: str, rows: range | None = None) -> Tensor:
        header = find_header(self.headers, name, rows, str(self._file))
        offset, nbytes = self.slots[name].span(rows)
        data = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        with open_stored(self._file) as opened:
            check_unchanged(self._file, self.stamp, opened.stamp)
            read_into(data.numpy().data, opened, offset, f"{self._file}: tensor '{name}'")
        if header.dtype is torch.bool and nbytes and int(data.max()) > 1:
            raise CheckpointError(
                f"{self._file}: tensor '{name}' is BOOL and holds bytes other than 0 and 1: "
                "save the file again"
            )
        shape = header.shape if rows is None else (len(rows), *header.shape[1:])
        return data.view(header.dtype).reshape(shape)


def current_stamp(file: StoredFile) -> Stamp:
    """Return the current stamp of a file that existed before."""
    with failing_as(f"{file} cannot be read any more"):
        return file.stamp()


def open_stored(file: StoredFile) -> Opened:
    """Open a file for reading."""
    with failing_as(f"{file} cannot be opened"):
        return file.open()


def read_into(target: memoryview, opened: Opened, offset: int, where: str) -> None:
    """Fill memory with the bytes of a file from an offset on.

    Raises:
        CheckpointError: the disk fails, or the file ends early.
    """
    done = 0
    while done < len(target):
        with failing_as(f"{where} cannot be read at byte {offset + done}"):
            count = opened.read_at(target[done:], offset + done)
        if count == 0:
            raise CheckpointError(
                f"{where} ends at byte {offset + done}, {len(target) - done} bytes early: "
                "fetch the file again"
            )
        done += count


# One safetensors file, whose rows are read directly into the memory of a tensor.
#
# The file is not memory-mapped. So a merge uses the memory that its plan says, not what the kernel
# keeps resident, and a failing disk raises an error and not a signal.


class SafetensorsFile(SlottedFile):
    """A safetensors file whose header has been checked."""

    def __init__(self, file: StoredFile) -> None:
        with open_stored(file) as opened:
            stamp = opened.stamp
            slots = parse_header(_header_of(opened, str(file)), stamp[0], str(file))
        super().__init__(file, stamp, slots)

    def header_text(self) -> bytes:
        """Return its JSON header, read once more: it may have 100 MB."""
        with open_stored(self._file) as opened:
            check_unchanged(self._file, self.stamp, opened.stamp)
            return _header_of(opened, str(self._file))

    def metadata(self) -> dict[str, str]:
        """Return the metadata of its header, read once more."""
        header = parse_object(self.header_text(), f"the header of {self._file}")
        return _texts(header.get("__metadata__"), str(self._file))


def _header_of(opened: Opened, where: str) -> bytes:
    """Return the JSON header, after checking that its length is possible."""
    size = opened.stamp[0]
    if size < LENGTH_BYTES:
        raise CheckpointError(
            f"{where} is {size} bytes long, and a safetensors file has 8 or more: {_CUT_SHORT}"
        )
    start = bytearray(LENGTH_BYTES)
    read_into(memoryview(start), opened, 0, where)
    if bytes(start) == b"version ":
        raise CheckpointError(
            f"{where} is a Git LFS pointer, not the weights themselves: run `git lfs pull` there"
        )
    length = int.from_bytes(start, "little")
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{where} claims a header of {length} bytes, and {MAX_HEADER_BYTES} is the most that "
            "safetensors allows: is it a safetensors file?"
        )
    if LENGTH_BYTES + length > size:
        raise CheckpointError(
            f"{where} claims a header of {length} bytes, and the whole file has {size}: {_CUT_SHORT}"
        )
    header = bytearray(length)
    read_into(memoryview(header), opened, LENGTH_BYTES, where)
    return bytes(header)
