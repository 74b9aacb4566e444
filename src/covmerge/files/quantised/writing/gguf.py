"""GGUF: blocks of the types that `gguf` makes, and what llama.cpp does to a tensor done again."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from covmerge.base.types import TensorHeader
from covmerge.files.quantised.gguf import PLAIN, Blocks, Whole
from covmerge.files.quantised.packed import Packed, pieces
from covmerge.files.quantised.writing.packing import Packing, Part
from covmerge.maths.linalg.stored import stored_as

PLAIN_TYPES: Mapping[torch.dtype, str] = MappingProxyType(
    {dtype: kind for kind, dtype in PLAIN.items()}
)
WRITTEN = (*PLAIN, "Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0")
# Of the other types the next one here, of a bit more at least than its numbers have: what llama.cpp gains
# by searching scales, or by unevenly spaced numbers, plain rounding does not.
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
    """Numbers of a type of GGUF, each rounded by itself or, in blocks of a row, by `gguf.quantize`.

    Attributes:
        kind: what GGUF calls the type.
        order: see `Blocks`; None: rows are in order.
        transposed: see `Whole`.
        more: see `Whole`.
        flat: see `Whole`.
    """

    kind: str
    order: tuple[int, ...] | None = None
    transposed: bool = False
    more: float = 0.0
    flat: bool = False

    def __call__(self, weights: Tensor) -> tuple[Tensor, ...]:
        stored = weights.mT.contiguous() if self.transposed else weights
        if self.flat:
            (stored,) = weights
        if self.more:
            stored = stored + self.more
        if self.order is not None:
            groups = stored.view(-1, len(self.order), *stored.shape[1:])
            mixed = torch.empty_like(groups)
            mixed[:, list(self.order)] = groups
            stored = mixed.flatten(0, 1)
        if self.kind in PLAIN:
            return (stored_as(stored, PLAIN[self.kind]),)
        package: Any = importlib.import_module("gguf")
        kind = package.GGMLQuantizationType[self.kind]
        rows = [
            _packed(package, stored[few.start : few.stop], kind)
            for few in pieces(range(len(stored)), stored.shape[-1])
        ]
        return (torch.cat(rows),)


def of_gguf(packed: Packed, kind: str, shape: tuple[int, ...]) -> Packing | None:
    """Return how a tensor is packed in a type of GGUF, as it lies in a file; None: rows do not allow it.

    Args:
        packed: what reads it of a file.
        kind: the type that it is to have, of `WRITTEN`.
        shape: of what the file stores, in bytes where it is in blocks.
    """
    assert isinstance(packed, Blocks | Whole)
    (name,) = packed.stored
    width = _numbers(packed.kind, shape[-1])
    if kind in PLAIN:
        header = TensorHeader(name, (*shape[:-1], width), PLAIN[kind])
    else:
        block, size = _sizes(kind)
        if width % block or len(shape) < 2:
            return None
        header = TensorHeader(name, (*shape[:-1], width // block * size), torch.uint8)
    target = replace(packed, kind=kind)
    if isinstance(target, Whole):
        quantise = ToBlocks(kind, transposed=target.transposed, more=target.more, flat=target.flat)
        return Packing(target, (Part(header),), quantise, whole=True)
    group = 1 if target.order is None else len(target.order)
    return Packing(target, (Part(header),), ToBlocks(kind, target.order), group=group)


def _numbers(kind: str, row: int) -> int:
    """How many numbers are in a row of so many bytes; of plain numbers as many."""
    if kind in PLAIN:
        return row
    block, size = _sizes(kind)
    return row // size * block


def _sizes(kind: str) -> tuple[int, int]:
    package: Any = importlib.import_module("gguf")
    return package.GGML_QUANT_SIZES[package.GGMLQuantizationType[kind]]


def _packed(package: Any, rows: Tensor, kind: Any) -> Tensor:
    with np.errstate(all="ignore"):  # what is not finite is found when it is read back
        blocks = package.quantize(rows.numpy(), kind)
    return cast("Any", torch).from_numpy(blocks)
