"""bitsandbytes: int8 rows with one scale each, and blocks of 4-bit numbers (NF4, FP4)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import prod

import torch
from torch import Tensor
from torch.nn.functional import pad

from covmerge.base.types import TensorHeader
from covmerge.files.quantised.bitsandbytes import EightBit, FourBit
from covmerge.files.quantised.packed import PIECE, pieces
from covmerge.files.quantised.writing.packing import Blocks, Packing, Part

_SMALLEST = 1e-38
_OFFSET = "nested_offset"
_NUMBER = 25  # characters of the longest float in JSON


@dataclass(frozen=True)
class ToEightBit:
    """w ≈ q · s / 127, with s the largest magnitude of the row.

    Attributes:
        order: the shape of the stored flag that says that rows are in order; None: there is no flag.
    """

    order: tuple[int, ...] | None

    def __call__(self, weights: Tensor) -> tuple[Tensor, ...]:
        scales = _largest(weights)
        packed = torch.empty(weights.shape, dtype=torch.int8)
        for few in pieces(range(len(weights)), weights.shape[1]):
            part = slice(few.start, few.stop)
            factor = 127.0 / scales[part].clamp_min(_SMALLEST)
            packed[part] = (weights[part] * factor[:, None]).round_()
        if self.order is None:
            return packed, scales
        return packed, scales, torch.zeros(self.order, dtype=torch.uint8)


def of_eight_bit(packed: EightBit, headers: Mapping[str, TensorHeader]) -> Packing:
    """Return the packing of a layer that is stored like a layer of a checkpoint."""
    weight, scales, *order = (headers[name] for name in packed.stored)
    parts = (Part(weight), Part(scales), *(Part(one, None) for one in order))
    quantise = ToEightBit(order[0].shape if order else None)
    blocks = Blocks(1, packed.header.shape[1], scales.dtype)
    return Packing(packed, parts, quantise, blocks=blocks)


@dataclass(frozen=True)
class ToFourBit:
    """w ≈ v[q] · s, with s the largest magnitude of the block; blocks run over all rows.

    Attributes:
        values: v, the values of the 16 codes.
        block: number of weights with one s.
        storage: the dtype in which bytes are stored.
        column: whether the bytes are stored as a column.
        state: shape, dtype and sizes as JSON, without the offset of nested scales.
        length: length of the stored state in bytes.
        nested: the values of the 256 codes of nested scales, and the number of scales with one outer scale;
            None: scales are stored as they are.
    """

    values: tuple[float, ...]
    block: int
    storage: torch.dtype
    column: bool
    state: str
    length: int
    nested: tuple[tuple[float, ...], int] | None = None

    def __call__(self, weights: Tensor) -> tuple[Tensor, ...]:
        found = list(self._blocks(weights.reshape(-1)))
        packed = torch.cat([codes for codes, _ in found]).view(self.storage)
        scales = torch.cat([scale for _, scale in found])
        weight = packed.unsqueeze(1) if self.column else packed
        values = torch.tensor(self.values)
        if self.nested is None:
            return weight, scales, values, self._stated(self.state)
        known, size = torch.tensor(self.nested[0]), self.nested[1]
        offset = scales.mean()
        absmax, outer = self._nested(scales - offset, known, size)
        state = json.dumps({**json.loads(self.state), _OFFSET: float(offset)})
        return weight, absmax, values, outer, known, self._stated(state)

    def _blocks(self, flat: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield bytes and scales, a few whole blocks at a time."""
        unit = 2 * self.storage.itemsize
        step = max(1, PIECE // self.block) * self.block
        for start in range(0, len(flat), step):
            few = flat[start : start + step]
            blocks = pad(few, (0, -len(few) % self.block)).view(-1, self.block)
            scales = _largest(blocks)
            codes = _codes(blocks, scales, torch.tensor(self.values))[: len(few)]
            codes = pad(codes, (0, -len(codes) % unit))
            yield codes[::2] << 4 | codes[1::2], scales

    @staticmethod
    def _nested(scales: Tensor, known: Tensor, size: int) -> tuple[Tensor, Tensor]:
        blocks = pad(scales, (0, -len(scales) % size)).view(-1, size)
        outer = _largest(blocks)
        return _codes(blocks, outer, known)[: len(scales)], outer

    def _stated(self, state: str) -> Tensor:
        return torch.tensor(list(state.ljust(self.length).encode()), dtype=torch.uint8)


def of_four_bit(
    packed: FourBit, headers: Mapping[str, TensorHeader], values: Mapping[str, Tensor]
) -> Packing:
    """Return the packing of a matrix that is stored like a matrix of a checkpoint."""
    weight, absmax, known, *beside, state_name = packed.stored
    kind = state_name.rpartition("__")[2]
    state: dict[str, object] = {
        "quant_type": kind,
        "blocksize": packed.block,
        "dtype": str(packed.header.dtype).removeprefix("torch."),
        "shape": list(packed.header.shape),
    }
    nested = packed.nested
    if nested is not None:
        state |= {"nested_blocksize": nested.block, "nested_dtype": "float32", _OFFSET: 0.0}
    text = json.dumps(state)
    length = max(len(text) + (0 if nested is None else _NUMBER), headers[state_name].numel)
    stored = headers[weight]
    quantise = ToFourBit(
        _numbers(values[known]),
        packed.block,
        stored.dtype,
        len(stored.shape) == 2,
        text,
        length,
        None if nested is None else (_numbers(values[nested.values]), nested.block),
    )
    width = prod(packed.header.shape[1:])
    parts = (
        Part(stored, Fraction(width, 2 * packed.unit)),
        Part(headers[absmax], Fraction(width, packed.block)),
        *(Part(headers[name], None) for name in (known, *beside)),
        Part(TensorHeader(state_name, (length,), torch.uint8), None),
    )
    # Of nested scales, the outer one is stored in float32.
    scales = headers[absmax].dtype if nested is None else torch.float32
    blocks = Blocks(1, packed.block, scales) if width % packed.block == 0 else None
    return Packing(packed, parts, quantise, whole=nested is not None, blocks=blocks)


def _numbers(values: Tensor) -> tuple[float, ...]:
    return tuple(float(value) for value in values)


def _largest(weights: Tensor) -> Tensor:
    """Return the largest magnitude of each row; +0 for zeros, to which `maximum` gives either sign."""
    return torch.maximum(weights.amax(1), -weights.amin(1)).abs_()


def _codes(blocks: Tensor, scales: Tensor, values: Tensor) -> Tensor:
    """Return for each number of blocks the code whose value times the block's scale is nearest."""
    order = values.argsort()
    known = values[order]
    numbers = blocks * (1.0 / scales.clamp_min(_SMALLEST))[:, None]
    codes = torch.bucketize(numbers.view(-1), (known[:-1] + known[1:]) / 2)
    return order[codes].to(torch.uint8)
