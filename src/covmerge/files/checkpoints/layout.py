"""The place of every byte of the output, known before any tensor is computed.

A safetensors file is `u64 header length | JSON header | data`. Names, shapes and dtypes determine
everything except the data. So a merge's plan has every offset, and tensors can be written in any
order.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import torch

from covmerge.base.errors import InputError, TensorError
from covmerge.base.types import TensorHeader

HEADS_FOLDER = "heads"  # folder for task heads of single experts, beside the model
MAX_HEADER_BYTES = 100_000_000  # readers of the format refuse larger headers
MAX_TENSORS = 300_000  # of one checkpoint; Kimi K2 Thinking has 210,000

_ALIGNMENT = 8

_DTYPE_NAMES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "complex64": "C64",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}
# Looked up by name, because older releases of torch lack the newest dtypes.
SAFETENSORS_NAMES: Mapping[torch.dtype, str] = MappingProxyType(
    {getattr(torch, ours): theirs for ours, theirs in _DTYPE_NAMES.items() if hasattr(torch, ours)}
)


@dataclass(frozen=True)
class Slot:
    """The place of one tensor: bytes `offset` to `offset + nbytes` of its file."""

    offset: int
    nbytes: int
    header: TensorHeader

    def span(self, rows: range | None = None) -> tuple[int, int]:
        """Return the first byte and the number of bytes of `rows` of the first axis (None: all rows).

        Raises:
            TensorError: `rows` is not a contiguous range inside the tensor.
        """
        if rows is None:
            return self.offset, self.nbytes
        name, shape = self.header.name, self.header.shape
        inside = bool(shape) and rows.step == 1 and 0 <= rows.start <= rows.stop <= shape[0]
        if not inside:
            raise TensorError(f"'{name}' of shape {shape} has no contiguous rows {rows}")
        row = self.nbytes // shape[0] if shape[0] else 0
        return self.offset + rows.start * row, len(rows) * row


@dataclass(frozen=True)
class Shard:
    """One safetensors file of the output."""

    file_name: str  # a name without folders, inside the output folder
    # The file's first bytes: length, JSON, and spaces up to a multiple of 8.
    header: bytes = field(repr=False)
    # Slots by tensor name, in the order of their offsets.
    entries: Mapping[str, Slot] = field(repr=False)
    size: int  # in bytes


@dataclass(frozen=True)
class Layout:
    """The files of the output, with the place of each tensor."""

    shards: tuple[Shard, ...]
    stem: str = "model"

    @property
    def index_name(self) -> str:
        """Name of the index, which lists the shard of each tensor."""
        return f"{self.stem}.safetensors.index.json"

    @property
    def data_size(self) -> int:
        """Number of bytes of all tensors, without the files' headers."""
        return sum(shard.size - len(shard.header) for shard in self.shards)

    @property
    def size(self) -> int:
        """Number of bytes of all files."""
        return sum(shard.size for shard in self.shards)


def plan_layout(
    headers: Sequence[TensorHeader],
    shard_size: int,
    metadata: Mapping[str, str] | None = None,
    stem: str = "model",
) -> Layout:
    """Assign tensors to shards in the given order.

    A shard ends when the next tensor would bring its data over `shard_size` bytes. A larger tensor
    is alone in its shard. Names begin with `stem` and follow transformers. Every file has the metadata, and
    `"format": "pt"` too.

    Raises:
        TensorError: no tensors, a duplicate name, or a dtype that the format cannot hold.
        InputError: `shard_size` is not positive.

    Example:
        >>> headers = [TensorHeader(name, (4,), torch.float32) for name in "abc"]
        >>> [(s.file_name, list(s.entries)) for s in plan_layout(headers, 32).shards]
        [('model-00001-of-00002.safetensors', ['a', 'b']), ('model-00002-of-00002.safetensors', ['c'])]
    """
    if shard_size <= 0:
        raise InputError(f"shard size {shard_size} is not positive: pass a size such as 5GB")
    if not headers:
        raise TensorError("there is no tensor to write: the merge would be an empty model")
    _refuse_duplicates(headers)
    groups = list(_greedy(headers, shard_size))
    return Layout(
        tuple(
            plan_shard(_shard_name(stem, number, len(groups)), group, metadata)
            for number, group in enumerate(groups, start=1)
        ),
        stem,
    )


def plan_shard(
    file_name: str,
    headers: Sequence[TensorHeader],
    metadata: Mapping[str, str] | None = None,
) -> Shard:
    """Assign places to tensors in one file.

    The format allows no padding between tensors. The only way to align each tensor to its dtype is
    to put wider dtypes first; tensors of one width keep the given order.

    Raises:
        TensorError: a duplicate or reserved name, a dtype that the format cannot hold, or a header
            larger than readers accept.
    """
    _refuse_duplicates(headers)
    ordered = sorted(headers, key=lambda header: -header.dtype.itemsize)
    text: dict[str, object] = {"__metadata__": {**(metadata or {}), "format": "pt"}}
    end = 0
    for header in ordered:
        start, end = end, end + header.nbytes
        text[header.name] = {
            "dtype": _safetensors_name(header),
            "shape": header.shape,
            "data_offsets": (start, end),
        }
    packed = _pack(text, file_name)
    return Shard(file_name, packed, _slots(ordered, len(packed)), len(packed) + end)


def _greedy(headers: Iterable[TensorHeader], shard_size: int) -> Iterator[list[TensorHeader]]:
    group: list[TensorHeader] = []
    filled = 0
    for header in headers:
        if group and filled + header.nbytes > shard_size:
            yield group
            group, filled = [], 0
        group.append(header)
        filled += header.nbytes
    yield group


def _shard_name(stem: str, number: int, count: int) -> str:
    return (
        f"{stem}.safetensors" if count == 1 else f"{stem}-{number:05d}-of-{count:05d}.safetensors"
    )


def _slots(headers: Iterable[TensorHeader], offset: int) -> Mapping[str, Slot]:
    slots: dict[str, Slot] = {}
    for header in headers:
        slots[header.name] = Slot(offset, header.nbytes, header)
        offset += header.nbytes
    return slots


def _pack(text: Mapping[str, object], file_name: str) -> bytes:
    try:
        body = json.dumps(text, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError as error:
        raise TensorError(
            f"a name in the header of {file_name} is not valid Unicode ({error}): rename the tensor"
        ) from error
    body += b" " * (-len(body) % _ALIGNMENT)
    if len(body) > MAX_HEADER_BYTES:
        raise TensorError(
            f"the header of {file_name} would be {len(body)} bytes for {len(text) - 1} tensors, "
            f"and readers refuse more than {MAX_HEADER_BYTES}: pass a smaller shard size"
        )
    return len(body).to_bytes(8, "little") + body


def _safetensors_name(header: TensorHeader) -> str:
    if header.name == "__metadata__":
        raise TensorError("a tensor is named '__metadata__', which safetensors reserves: rename it")
    if header.dtype not in SAFETENSORS_NAMES:
        raise TensorError(
            f"'{header.name}' is {header.dtype}, which safetensors cannot hold: "
            f"convert it to one of {', '.join(map(str, SAFETENSORS_NAMES))}"
        )
    return SAFETENSORS_NAMES[header.dtype]


def _refuse_duplicates(headers: Iterable[TensorHeader]) -> None:
    names: set[str] = set()
    for header in headers:
        if header.name in names:
            raise TensorError(f"'{header.name}' is listed twice: every tensor is written once")
        names.add(header.name)


# masks/<expert>.safetensors: one bit for each element of an expert, beside a unified model.

MASKS_FOLDER = "masks"


def packed_header(header: TensorHeader) -> TensorHeader:
    """Return the header of a tensor's packed mask: 8 elements of a row per byte, of a vector one."""
    shape = header.shape
    if len(shape) > 1:
        shape = (*shape[:-1], -(-shape[-1] // 8))
    return TensorHeader(header.name, shape, torch.uint8)
