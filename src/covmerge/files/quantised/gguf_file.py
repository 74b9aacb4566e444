"""A GGUF file, read by ranges of rows; blocks of quantised numbers are shown as their bytes.

A layer's experts are stored as a stack, `(experts, d_out, d_in)`. Each expert is shown as a tensor of its
own, `blk.0.ffn_up_exps.7.weight` of `blk.0.ffn_up_exps.weight`. Its bytes are contiguous, so it can be
read, hashed and written separately.

A large model may be several files, `NAME-00001-of-00003.gguf`, each with a header of its own. The first has
the metadata, and may have no tensors.

A file is `GGUF | u32 version | u64 tensors | u64 entries | metadata | tensors' names, shapes, types and
offsets | data`, all little-endian, the data aligned. The header is parsed here, so that nothing in a
stranger's file is trusted before its sizes are checked. The package `gguf` decodes the blocks of a type.
"""

from __future__ import annotations

import importlib
import re
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NoReturn

import torch

from covmerge.base.errors import CheckpointError
from covmerge.base.types import Json, TensorHeader
from covmerge.files.checkpoints.base import check_name
from covmerge.files.checkpoints.header import SlottedFile, open_stored, read_into
from covmerge.files.checkpoints.json_file import shorten
from covmerge.files.checkpoints.layout import MAX_HEADER_BYTES, MAX_TENSORS, Slot
from covmerge.files.stores.store import Opened, StoredFile

GGUF = ".gguf"
INSTALL = "pip install 'covmerge[gguf]'"

_VERSIONS = (2, 3)
_MAX_ENTRIES = 2**16
_MAX_TEXT = 2**20
_MAX_DIMENSIONS = 4
_MAX_BYTES = 2**63 - 1
_PIECE = 2**18
_ALIGNMENT = 32
# struct's formats for metadata, by GGUF's numbers of their types.
_NUMBERS = {
    **{0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?"},
    **{10: "<Q", 11: "<q", 12: "<d"},
}
_TEXT, _ARRAY = 8, 9
_STACKED = re.compile(r"ffn_(gate|up|down)_exps\.weight$")
_PART = re.compile(r"(?P<stem>.*)-[0-9]{5}-of-(?P<count>[0-9]{5})\.gguf", re.ASCII | re.S)
_NUMBER, COUNT, _OF_ALL = "split.no", "split.count", "split.tensors.count"
_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(eq=False, repr=False)
class GgufSettings(dict[str, Json]):
    """The header of a GGUF file, in the place of a config's quantisation settings.

    It is a type that no config.json can state.

    Attributes:
        file: the file; of several parts the first.
        metadata: the numbers and texts of the metadata.
        types: GGUF's names of the tensors' types, in the order of the data.
        tensors: the tensors, in the order of the data.
        count: number of tensors in the file, where a stack of experts is one.
        start: where the metadata end, in bytes from the start of the file.
        alignment: alignment of the data in bytes.
        places: the places of numbers in the metadata, each with its format for `struct`, by key.
        stacks: for each stack of experts, the names of its matrices, in order.
    """

    file: StoredFile
    metadata: Mapping[str, Json]
    types: Mapping[str, str]
    tensors: Mapping[str, TensorHeader]
    count: int
    start: int
    alignment: int
    places: Mapping[str, tuple[int, str]]
    stacks: Mapping[str, tuple[str, ...]]

    def __post_init__(self) -> None:
        self["quant_method"] = "gguf"


def part_names(name: str) -> list[str]:
    """Return the names of all parts of a model, given that of one; a whole model's name alone.

    Example:
        >>> part_names("m-00002-of-00002.gguf"), part_names("m.gguf")
        (['m-00001-of-00002.gguf', 'm-00002-of-00002.gguf'], ['m.gguf'])
    """
    part = _PART.fullmatch(name)
    if part is None:
        return [name]
    count = int(part["count"])
    return [f"{part['stem']}-{n:05}-of-{count:05}.gguf" for n in range(1, count + 1)] or [name]


def joined(parts: Sequence[GgufSettings]) -> GgufSettings:
    """Return the settings of a model from those of all its parts, in order.

    Raises:
        CheckpointError: they are not all the parts of one model, in order.
    """
    first, total = parts[0], sum(part.count for part in parts)
    for place, part in enumerate(parts):
        metadata = part.metadata
        number, count = (metadata.get(key, 0) for key in (_NUMBER, COUNT))
        if count in (0, 1) and len(parts) == 1:
            continue
        if (number, count) != (place, len(parts)):
            raise CheckpointError(
                f"{part.file} says split.no {shorten(number)} and split.count {shorten(count)}, and is "
                f"opened as {place} of {len(parts)}: put all parts into one folder, with the names that "
                "llama.cpp gives them (NAME-00001-of-00002.gguf), or join them (llama.cpp's gguf-split "
                "--merge)"
            )
        if metadata.get(_OF_ALL, total) != total:
            raise CheckpointError(
                f"{part.file} is of a model of {shorten(metadata[_OF_ALL])} tensors, and its parts have "
                f"{total}: they are of different models, fetch them again"
            )
    if not total:
        raise CheckpointError(
            f"{first.file} has no tensors: fetch the file again, or convert it anew"
        )
    twice = [
        n for n, count in Counter(n for part in parts for n in part.tensors).items() if count > 1
    ]
    if twice:
        raise CheckpointError(
            f"{first.file} and its other parts have '{twice[0]}' twice: fetch them again"
        )
    return replace(
        first,
        types={name: kind for part in parts for name, kind in part.types.items()},
        tensors={name: header for part in parts for name, header in part.tensors.items()},
        stacks={name: names for part in parts for name, names in part.stacks.items()},
    )


class GgufFile(SlottedFile):
    """A GGUF file whose header has been checked.

    Attributes:
        headers: headers by the file's names; a row of a tensor of blocks is its bytes.
        settings: see `GgufSettings`.
    """

    def __init__(self, file: StoredFile) -> None:
        with open_stored(file) as opened:
            stamp = opened.stamp
            parser = _Header(opened, stamp[0], str(file))
            metadata, entries = parser.metadata(), parser.entries()
        _check_slots([slot for slot, _ in entries], stamp[0], str(file))
        super().__init__(file, stamp, {slot.header.name: slot for slot, _ in entries})
        self.settings = GgufSettings(
            file=file,
            metadata=metadata,
            types={slot.header.name: kind for slot, kind in entries},
            tensors=dict(self.headers),
            count=parser.count,
            start=parser.start,
            alignment=parser.alignment,
            places=parser.places,
            stacks=parser.stacks,
        )


class _Header:
    """A parser of a header, which reads from the beginning and never beyond the header's limits."""

    def __init__(self, opened: Opened, size: int, where: str) -> None:
        self._opened, self._where = opened, where
        self._size = min(size, MAX_HEADER_BYTES)
        self._place = 0
        self._held = b""
        self._start = 0
        if self._bytes(4) != b"GGUF":
            self._refuse("does not begin with GGUF")
        version, self.count, self._entries = (self._number(f) for f in ("<I", "<Q", "<Q"))
        if version not in _VERSIONS:
            self._refuse(f"is GGUF version {version}, and {_VERSIONS} can be read")
        if self.count > MAX_TENSORS or self._entries > _MAX_ENTRIES:
            self._refuse(f"claims {self.count} tensors and {self._entries} entries")
        self.alignment, self.start = _ALIGNMENT, 0
        self.places: dict[str, tuple[int, str]] = {}
        self.stacks: dict[str, tuple[str, ...]] = {}

    def metadata(self) -> dict[str, Json]:
        """Return the numbers and texts of the metadata; lists are skipped."""
        found: dict[str, Json] = {}
        for _ in range(self._entries):
            key, kind = self._text(), self._number("<I")
            if kind in _NUMBERS:
                self.places[key] = self._place, _NUMBERS[kind]
            value = self._value(kind)
            if value is not None:
                found[key] = value
        alignment = found.get("general.alignment", _ALIGNMENT)
        if type(alignment) is not int or not 0 < alignment <= 2**16 or alignment & (alignment - 1):
            self._refuse(f"has an alignment of {shorten(alignment)}")
        self.alignment, self.start = alignment, self._place
        return found

    def entries(self) -> list[tuple[Slot, str]]:
        """Return the tensors with GGUF's names of their types, in the order of the data."""
        package = gguf_package()
        entries = [self._entry() for _ in range(self.count)]
        start = -(-self._place // self.alignment) * self.alignment
        found: list[tuple[Slot, str]] = []
        for name, shape, number, offset in entries:
            try:
                kind = package.GGMLQuantizationType(number)
            except ValueError:
                self._refuse(f"has '{name}' of the type {number}, which gguf does not know")
            header = self._header(package, name, shape, kind)
            if offset % self.alignment:
                self._refuse(f"has '{name}' at {offset}, which is not aligned")
            slot = Slot(start + offset, header.nbytes, header)
            if _STACKED.search(name) and len(shape) == 3:
                if (count := len(found) + shape[0]) > MAX_TENSORS:
                    self._refuse(f"has '{name}', by which its matrices are {count}")
                slots = _matrices(slot)
                self.stacks[name] = tuple(matrix.header.name for matrix in slots)
            else:
                slots = [slot]
            found.extend((part, str(kind.name)) for part in slots)
        return sorted(found, key=lambda entry: entry[0].offset)

    def _header(self, package: Any, name: str, shape: tuple[int, ...], kind: Any) -> TensorHeader:
        block, size = package.GGML_QUANT_SIZES[kind]
        if shape[-1] % block or prod(shape) // block * size > _MAX_BYTES:
            self._refuse(f"has '{name}' of {list(shape)}, no whole number of blocks of {block}")
        if kind.name in _PLAIN:
            return TensorHeader(name, shape, _PLAIN[kind.name])
        return TensorHeader(name, (*shape[:-1], shape[-1] // block * size), torch.uint8)

    def _entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._text()
        check_name(name, f"{self._where}: tensor {shorten(name)}")
        count = self._number("<I")
        if not 0 < count <= _MAX_DIMENSIONS:
            self._refuse(f"has '{name}' of {count} dimensions")
        shape = tuple(self._number("<Q") for _ in range(count))[::-1]  # fastest axis first
        if not all(0 < size <= _MAX_BYTES for size in shape) or prod(shape) > _MAX_BYTES:
            self._refuse(f"has '{name}' of {list(shape)}")
        return name, shape, self._number("<I"), self._number("<Q")

    def _value(self, kind: int) -> Json:
        if kind in _NUMBERS:
            return self._number(_NUMBERS[kind])
        if kind == _TEXT:
            return self._text()
        if kind != _ARRAY:
            self._refuse(f"has a value of type {kind}")
        inner, count = self._number("<I"), self._number("<Q")
        if inner in _NUMBERS:
            self._skip(count * struct.calcsize(_NUMBERS[inner]))
        elif inner == _TEXT:
            for _ in range(min(count, self._size)):
                self._skip(self._number("<Q"))
        else:
            self._refuse(f"has a list of values of type {inner}")
        return None

    def _text(self) -> str:
        length = self._number("<Q")
        if length > _MAX_TEXT:
            self._refuse(f"has a text of {length} bytes")
        try:
            return self._bytes(length).decode()
        except UnicodeDecodeError:
            self._refuse("has a text that is not valid Unicode")

    def _number(self, form: str) -> Any:
        (value,) = struct.unpack(form, self._bytes(struct.calcsize(form)))
        return value

    def _bytes(self, count: int) -> bytes:
        begin = self._place
        self._skip(count)
        if not self._start <= begin <= self._place <= self._start + len(self._held):
            held = bytearray(max(count, min(_PIECE, self._size - begin)))
            read_into(memoryview(held), self._opened, begin, self._where)
            self._held, self._start = bytes(held), begin
        return self._held[begin - self._start : self._place - self._start]

    def _skip(self, count: int) -> None:
        self._place += count
        if self._place > self._size:
            self._refuse(f"has a header that does not end within {self._size} bytes")

    def _refuse(self, why: str) -> NoReturn:
        raise CheckpointError(f"{self._where} {why}: fetch the file again, or convert it anew")


def _matrices(stack: Slot) -> list[Slot]:
    """Return the slots of the matrices of a stack."""
    count, *rest = stack.header.shape
    stem = stack.header.name.removesuffix("weight")
    size = stack.nbytes // count
    return [
        Slot(
            stack.offset + number * size,
            size,
            TensorHeader(f"{stem}{number}.weight", tuple(rest), stack.header.dtype),
        )
        for number in range(count)
    ]


def _check_slots(slots: list[Slot], size: int, where: str) -> None:
    """Check that tensors lie within the file, have different names, and do not overlap."""
    end, names = 0, set[str]()
    for slot in slots:
        name = slot.header.name
        if name in names or slot.offset < end or slot.offset + slot.nbytes > size:
            fault = "is there twice" if name in names else "lies over another, or past the end"
            raise CheckpointError(f"{where}: tensor '{name}' {fault}: fetch the file again")
        names.add(name)
        end = slot.offset + slot.nbytes


def gguf_package() -> Any:
    """Return the package `gguf`.

    Raises:
        CheckpointError: it is not installed.
    """
    try:
        return importlib.import_module("gguf")
    except ImportError:
        raise CheckpointError(f"to read GGUF takes the package gguf: {INSTALL}") from None


def block_of(kind: str) -> tuple[int, int]:
    """Return how many numbers a block of a type has, and how many bytes."""
    package = gguf_package()
    return package.GGML_QUANT_SIZES[package.GGMLQuantizationType[kind]]
