"""Where every byte of a GGUF file goes, known before the first tensor is computed.

What a base's file has before its tensors is kept byte for byte, tokenizer and hyper-parameters in it;
but for the number of tensors, and what it says of their types. The reader of the format is `gguf_file`.
"""

from __future__ import annotations

import importlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from covmerge.base.types import TensorHeader
from covmerge.files.checkpoints.layout import Layout, Shard, Slot

GGUF_NAME = "model.gguf"
_TENSORS_AT = 8  # where the number of tensors lies


@dataclass(frozen=True)
class GgufHead:
    """What a GGUF file has beside the tensors that are merged.

    Attributes:
        start: from its first byte to the last of its metadata.
        alignment: of the data.
        types: by tensor, in the order of the data, what GGUF calls its type.
        fixed: by tensor, the bytes of those that are no parameters; they come first.
        stacks: by the name of a stack of experts, those of its matrices, which are of one type.
    """

    start: bytes = field(repr=False)
    alignment: int
    types: Mapping[str, str] = field(repr=False)
    fixed: Mapping[str, tuple[TensorHeader, bytes]] = field(repr=False)
    stacks: Mapping[str, tuple[str, ...]] = field(repr=False)


def plan_gguf(head: GgufHead, headers: Sequence[TensorHeader]) -> Layout:
    """Lay tensors out in one file, each aligned, in the order of the head.

    Args:
        head: of the file.
        headers: of what is stored of them, blocks as their bytes.
    """
    package: Any = importlib.import_module("gguf")
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
            infos += _info(package, stack or name, stacked, header, head.types[name], end)
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
    package: Any, name: str, stacked: tuple[int, ...], header: TensorHeader, kind: str, place: int
) -> bytes:
    """What a header says of a tensor: its name, its sizes, its type and where its data begin."""
    numbered = package.GGMLQuantizationType[kind]
    block, size = package.GGML_QUANT_SIZES[numbered]
    row = header.shape[-1]
    width = row // size * block if header.dtype is torch.uint8 else row
    axes = (*stacked, *header.shape[:-1], width)[::-1]  # the fastest comes first
    text = name.encode()
    sizes = struct.pack(f"<I{len(axes)}QIQ", len(axes), *axes, int(numbered), place)
    return struct.pack("<Q", len(text)) + text + sizes


def _aligned(place: int, alignment: int) -> int:
    return -(-place // alignment) * alignment
