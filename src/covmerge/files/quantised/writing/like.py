"""The packing of a tensor that is stored like a given one: the writer of each kind of packed tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from covmerge.base.types import TensorHeader
from covmerge.files.checkpoints.base import Packed, Quantisation
from covmerge.files.quantised.bitsandbytes import EightBit, FourBit
from covmerge.files.quantised.gptq import Grouped
from covmerge.files.quantised.integers import BIAS, BYTE, E2M1
from covmerge.files.quantised.mxfp4 import GROUP, Experts
from covmerge.files.quantised.packed import pieces
from covmerge.files.quantised.scaled import Scaled
from covmerge.files.quantised.writing.bitsandbytes import of_eight_bit, of_four_bit
from covmerge.files.quantised.writing.integers import of_grouped, of_words
from covmerge.files.quantised.writing.packing import Blocks, Packing, Part
from covmerge.files.quantised.writing.scaled import of_scaled

# MXFP4 (OCP Microscaling Formats 1.0, 6.3): E2M1 numbers, with one exponent for 32 numbers of a row.

_LARGEST = 2  # exponent of 6, the largest E2M1 number
_SIGN = 8


def _bounds() -> Tensor:
    """Return the bounds between E2M1 numbers; a number halfway between two gets the even code."""
    middles = (E2M1[:-1] + E2M1[1:]) / 2
    below = torch.nextafter(middles, torch.zeros(()))
    return torch.where(torch.arange(len(middles)) % 2 == 1, below, middles)


@dataclass(frozen=True)
class ToExperts:
    """w ≈ v[q] · 2^e, with e = ⌊log₂ max |w|⌋ − 2 of the group; scaled numbers above 6 become 6."""

    def __call__(self, weights: Tensor) -> tuple[Tensor, ...]:
        experts, d_in, d_out = weights.shape
        groups = d_in // GROUP
        blocks = torch.empty((experts, d_out, groups, GROUP // 2), dtype=torch.uint8)
        scales = torch.empty((experts, d_out, groups), dtype=torch.uint8)
        bounds = _bounds()
        for expert, matrix in enumerate(weights):
            for few in pieces(range(d_out), d_in):
                part = slice(few.start, few.stop)
                grouped = matrix[:, part].mT.reshape(len(few), groups, GROUP)
                largest = grouped.abs().amax(2)
                # frexp gives m · 2^x with m in [0.5, 1), so the exponent of the first bit is x − 1.
                exponent = torch.frexp(largest).exponent - 1 - _LARGEST
                exponent = torch.where(largest == 0, 0, exponent).clamp(-BIAS, BIAS)
                numbers = torch.ldexp(grouped, -exponent[:, :, None])
                codes = torch.bucketize(numbers.abs().contiguous(), bounds).to(torch.uint8)
                codes += _SIGN * torch.signbit(numbers)
                blocks[expert, part] = codes[..., ::2] | codes[..., 1::2] << 4
                scales[expert, part] = (exponent + BIAS).to(torch.uint8)
        return blocks, scales


def of_experts(packed: Experts, headers: Mapping[str, TensorHeader]) -> Packing:
    """Return the packing of experts that are stored like experts of a checkpoint."""
    parts = tuple(Part(headers[name]) for name in packed.stored)
    return Packing(packed, parts, ToExperts(), blocks=Blocks(GROUP, 1, None))


def as_stored(model: Quantisation, header: TensorHeader) -> Packing:
    """Return the packing of a tensor as a local checkpoint has it; the header has the dtype of reading."""
    packed: Any = model.packed[header.name]
    if packed.header != header:
        packed = replace(packed, header=header)
    stored = model.stored
    maps = {name: stored.read(name) for name in packed.stored if name.endswith("quant_map")}
    return packing_like(packed, stored.headers, model.settings, maps)


def is_written(packed: Packed) -> bool:
    """Return whether tensors can be packed like this one; others are only read."""
    if isinstance(packed, Scaled):
        plain = packed.whole is None and packed.mixed is None
        return plain and (packed.zeros is None if packed.words else packed.bits == BYTE)
    return isinstance(packed, EightBit | FourBit | Grouped | Experts)


def packing_like(
    packed: Packed,
    headers: Mapping[str, TensorHeader],
    settings: Mapping[str, Any],
    maps: Mapping[str, Tensor],
) -> Packing:
    """Return the packing that gives a packed tensor like this one, for which `is_written` holds.

    `settings` are the entries of config.json for the format, and `maps` stored tensors with the values of
    codes.
    """
    match packed:
        case Scaled(words=True):
            return of_words(packed, headers)
        case Scaled():
            return of_scaled(packed, headers, powers=settings.get("scale_fmt") == "ue8m0")
        case EightBit():
            return of_eight_bit(packed, headers)
        case FourBit():
            return of_four_bit(packed, headers, maps)
        case Grouped():
            return of_grouped(packed, headers, symmetric=_is_symmetric(settings))
        case Experts():
            return of_experts(packed, headers)
        case _:
            raise NotImplementedError(type(packed).__name__)


def _is_symmetric(settings: Mapping[str, Any]) -> bool:
    """Return whether zero points are the middle of the range, by the config or its clients' default."""
    if settings.get("quant_method") == "awq":
        return not settings.get("zero_point", True)
    return bool(settings.get("sym", True))
