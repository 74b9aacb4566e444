"""GGUF: blocks of the types that `gguf` can make, and llama.cpp's changes to tensors, made again."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from covmerge.base.types import TensorHeader
from covmerge.files.checkpoints.layout import Layout, Shard, Slot
from covmerge.files.quantised.gguf import PLAIN, GgufTensor
from covmerge.files.quantised.gguf_file import block_of, gguf_package
from covmerge.files.quantised.packed import Packed, pieces
from covmerge.files.quantised.writing.packing import Blocks, Packing, Part
from covmerge.maths.linalg.stored import stored_as

# The place of every byte of a GGUF file, known before the first tensor is computed.
#
# The part of a base's file before its tensors is copied byte for byte, with tokenizer and hyper-parameters.
# Only the number of tensors and the descriptions of tensors change. The format's reader is `gguf_file`.

GGUF_NAME = "model.gguf"
_TENSORS_AT = 8  # place of the number of tensors in the file


@dataclass(frozen=True)
class GgufHead:
    """The parts of a GGUF file beside the tensors that are merged.

    Attributes:
        start: the bytes from the first to the end of the metadata.
        alignment: alignment of the data in bytes.
        types: GGUF's name of each tensor's type, in the order of the data.
        fixed: the bytes of tensors that are no parameters; they come first.
        stacks: for each stack of experts, the names of its matrices, which have one type.
    """

    start: bytes = field(repr=False)
    alignment: int
    types: Mapping[str, str] = field(repr=False)
    fixed: Mapping[str, tuple[TensorHeader, bytes]] = field(repr=False)
    stacks: Mapping[str, tuple[str, ...]] = field(repr=False)


def plan_gguf(head: GgufHead, headers: Sequence[TensorHeader]) -> Layout:
    """Return the layout of one file, with aligned tensors in the order of the head."""
    stored = {header.name: header for header in headers}
    fixed = {name: header for name, (header, _) in head.fixed.items()}
    written = fixed | {name: stored[name] for name in head.types if name in stored}
    stack_of = {name: stack for stack, names in head.stacks.items() for name in names}
    infos = bytearray()
    places: dict[str, int] = {}
    end = count = 0
    for name, header in written.items():
        stack = stack_of.get(name)
        if stack is None or name == head.stacks[stack][0]:
            end = _aligned(end, head.alignment)
            stacked = () if stack is None else (len(head.stacks[stack]),)
            infos += _info(stack or name, stacked, header, head.types[name], end)
            count += 1
        places[name] = end
        end += header.nbytes
    end = _aligned(end, head.alignment)
    start = bytearray(head.start)
    struct.pack_into("<Q", start, _TENSORS_AT, count)
    start += infos
    start += bytes(_aligned(len(start), head.alignment) - len(start))
    data = len(start)
    for _, content in head.fixed.values():
        start += content
        start += bytes(_aligned(len(start), head.alignment) - len(start))
    slots = {
        name: Slot(data + places[name], header.nbytes, header)
        for name, header in written.items()
        if name not in fixed
    }
    return Layout((Shard(GGUF_NAME, bytes(start), slots, data + end),))


def _info(
    name: str, stacked: tuple[int, ...], header: TensorHeader, kind: str, place: int
) -> bytes:
    """Return the description of a tensor in a header: name, sizes, type and place of the data."""
    width = _numbers(kind, header.shape[-1])
    axes = (*stacked, *header.shape[:-1], width)[::-1]  # the file has the fastest axis first
    text = name.encode()
    number = int(gguf_package().GGMLQuantizationType[kind])
    sizes = struct.pack(f"<I{len(axes)}QIQ", len(axes), *axes, number, place)
    return struct.pack("<Q", len(text)) + text + sizes


def _aligned(place: int, alignment: int) -> int:
    return -(-place // alignment) * alignment


PLAIN_TYPES: Mapping[torch.dtype, str] = MappingProxyType(
    {dtype: kind for kind, dtype in PLAIN.items()}
)
WRITTEN = (*PLAIN, "Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0")
# For a type that is not written, the type to use instead; it has at least a bit more. llama.cpp searches
# scales or uses unevenly spaced numbers, which plain rounding does not.
HIGHER: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "Q2_K"), "Q4_0"),
        **dict.fromkeys(("TQ1_0", "TQ2_0", "IQ3_XXS", "IQ3_S", "Q3_K"), "Q4_0"),
        **dict.fromkeys(("Q4_K", "IQ4_NL", "IQ4_XS", "MXFP4", "NVFP4"), "Q5_0"),
        **dict.fromkeys(("Q5_K", "Q6_K"), "Q8_0"),
    }
)


@dataclass(frozen=True)
class ToBlocks:
    """Rounding to a tensor's type: each number by itself or, in blocks of a row, by `gguf.quantize`."""

    tensor: GgufTensor

    def __call__(self, weights: Tensor) -> tuple[Tensor, ...]:
        kind, order = self.tensor.kind, self.tensor.order
        stored = weights.mT.contiguous() if self.tensor.transposed else weights
        if self.tensor.flat:
            (stored,) = weights
        if self.tensor.more:
            stored = stored + self.tensor.more
        if order is not None:
            groups = stored.view(-1, len(order), *stored.shape[1:])
            mixed = torch.empty_like(groups)
            mixed[:, list(order)] = groups
            stored = mixed.flatten(0, 1)
        if kind in PLAIN:
            return (stored_as(stored, PLAIN[kind]),)
        few = pieces(range(len(stored)), stored.shape[-1])
        return (torch.cat([_packed(stored[rows.start : rows.stop], kind) for rows in few]),)


def of_gguf(packed: Packed, kind: str, shape: tuple[int, ...]) -> Packing | None:
    """Return the packing of a tensor in a type of GGUF; None if its rows are no whole blocks."""
    assert isinstance(packed, GgufTensor)
    (name,) = packed.stored
    width = _numbers(packed.kind, shape[-1])
    blocks = None
    if kind in PLAIN:
        header = TensorHeader(name, (*shape[:-1], width), PLAIN[kind])
    else:
        block, size = block_of(kind)
        if width % block or len(shape) < 2:
            return None
        header = TensorHeader(name, (*shape[:-1], width // block * size), torch.uint8)
        high, wide = (block, 1) if packed.transposed else (1, block)
        blocks = Blocks(high, wide, torch.float16)
    target = replace(packed, kind=kind)
    group = 1 if target.order is None else len(target.order)
    return Packing(target, (Part(header),), ToBlocks(target), target.whole, group, blocks)


def _numbers(kind: str, row: int) -> int:
    """Return the count of numbers in a row: of a row of bytes if the type has blocks."""
    if kind in PLAIN:
        return row
    block, size = block_of(kind)
    return row // size * block


def _packed(rows: Tensor, kind: str) -> Tensor:
    package = gguf_package()
    with np.errstate(all="ignore"):  # numbers that are not finite are found when they are read back
        blocks = package.quantize(rows.numpy(), package.GGMLQuantizationType[kind])
    return cast("Any", torch).from_numpy(blocks)
