"""MXFP4 (OCP Microscaling Formats 1.0, 6.3): E2M1 numbers with an exponent for 32 of a row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from covmerge.base.types import TensorHeader
from covmerge.files.quantised.low_bits import BIAS, E2M1
from covmerge.files.quantised.mxfp4 import GROUP, Experts
from covmerge.files.quantised.packed import pieces
from covmerge.files.quantised.writing.packing import Packing, Part

_LARGEST = 2  # exponent of the largest number of E2M1, 6
_SIGN = 8


def _bounds() -> Tensor:
    """From where on the next number is nearer; halfway between two the one with an even code is taken."""
    middles = (E2M1[:-1] + E2M1[1:]) / 2
    below = torch.nextafter(middles, torch.zeros(()))
    return torch.where(torch.arange(len(middles)) % 2 == 1, below, middles)


@dataclass(frozen=True)
class ToExperts:
    """w ≈ v[q] · 2^e, with e = ⌊log₂ max |w|⌋ − 2 of its group; what then is above 6 becomes 6."""

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
                # Of m · 2^x, m in [0.5, 1): the exponent of its first bit is x − 1.
                exponent = torch.frexp(largest).exponent - 1 - _LARGEST
                exponent = torch.where(largest == 0, 0, exponent).clamp(-BIAS, BIAS)
                numbers = torch.ldexp(grouped, -exponent[:, :, None])
                codes = torch.bucketize(numbers.abs().contiguous(), bounds).to(torch.uint8)
                codes += _SIGN * torch.signbit(numbers)
                blocks[expert, part] = codes[..., ::2] | codes[..., 1::2] << 4
                scales[expert, part] = (exponent + BIAS).to(torch.uint8)
        return blocks, scales


def of_experts(packed: Experts, headers: Mapping[str, TensorHeader]) -> Packing:
    """Return how experts are packed as those are that a checkpoint has."""
    return Packing(packed, tuple(Part(headers[name]) for name in packed.stored), ToExperts())
