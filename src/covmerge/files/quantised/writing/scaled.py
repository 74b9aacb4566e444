"""8-bit numbers times the scale of their tensor, row or block: FP8, and compressed-tensors' INT8."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor
from torch.nn.functional import pad

from covmerge.base.types import TensorHeader
from covmerge.files.quantised.integers import BIAS, scales_of
from covmerge.files.quantised.packed import pieces
from covmerge.files.quantised.scaled import EXPONENTS, Scaled
from covmerge.files.quantised.writing.packing import Blocks, Packing, Part
from covmerge.maths.linalg.stored import stored_as

# Scales of integers: their least value, and the use of the lowest integer, which has no positive
# counterpart.
#
# Some clients use all integers, −8 to 7, and others leave out the lowest, −7 to 7. Of both scales the one
# is taken whose numbers are nearer to the weights, so that weights made by either client are reproduced.


def symmetric_scales(low: Tensor, top: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Return the scale that uses the lowest integer too, and the one that does not.

    Args:
        low: the least weight of each block, or 0 if that is less.
        top: the largest weight of each block, or 0 if that is larger.
        most: the largest integer.
    """
    return torch.maximum(top / most, -low / (most + 1)), torch.maximum(top, -low) / most


def smallest(dtype: torch.dtype) -> float:
    """Return the least scale that is not 0 in a dtype; no subnormal except in float16."""
    if dtype is not torch.float16:
        return torch.finfo(torch.float32).tiny
    return torch.finfo(dtype).tiny * torch.finfo(dtype).eps


def nearer(first: Tensor, second: Tensor, error: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the one of two scales with the smaller error, place by place."""
    return torch.where(error(second) < error(first), second, first)


@dataclass(frozen=True)
class ToScaled:
    """w ≈ (q − z) · s, with the least s that keeps all weights of the block within the range of q.

    Attributes:
        dtype: dtype of q.
        scales: dtype of s.
        block: rows and columns of a block with one s.
        zeros: dtype of z; None: there are no zero points.
        powers: whether s is a power of two.
        axes: number of axes with which s is stored.
    """

    dtype: torch.dtype
    scales: torch.dtype
    block: tuple[int, int]
    zeros: torch.dtype | None = None
    powers: bool = False
    axes: int = 2

    def __call__(self, weights: Tensor) -> tuple[Tensor, ...]:
        rows, columns = weights.shape
        high, wide = min(self.block[0], rows), min(self.block[1], columns)
        count = -(-rows // high)
        packed = torch.empty(weights.shape, dtype=self.dtype)
        found: list[tuple[Tensor, Tensor]] = []
        for strip in pieces(range(count), high * columns):
            block = weights[strip.start * high : strip.stop * high]
            if high == rows and wide == columns:
                scale, zero = self._of_all(block)
                for few in pieces(range(rows), columns):
                    part = slice(few.start, few.stop)
                    packed[part] = self._rounded(block[part], scale, zero)
            else:
                missing = (0, -columns % wide, 0, -len(block) % high)
                # Zeros beside the weights change no scale.
                blocks = pad(block, missing).view(len(strip), high, -1, wide)
                scale, zero = self._of(blocks)
                q = self._rounded(blocks, *map(_spread, (scale, zero))).flatten(2).flatten(0, 1)
                packed[strip.start * high : strip.stop * high] = q[: len(block), :columns]
            found.append((scale, zero))
        scales, zeros = (torch.cat(ones) for ones in zip(*found, strict=True))
        shape = {0: (), 1: (-1,), 2: scales.shape}[self.axes]
        stored = _as_stored(scales, self.scales).view(shape)
        return (
            (packed, stored)
            if self.zeros is None
            else (packed, stored, zeros.view(shape).to(self.zeros))
        )

    def _of(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Return scales as a reader gets them, and zero points, for `(rows, high, columns, wide)`."""
        low, top = blocks.amin((1, 3)).clamp_max(0.0), blocks.amax((1, 3)).clamp_min(0.0)

        def error(scale: Tensor) -> Tensor:
            spread = _spread(scale)
            read = self._rounded(blocks, spread, torch.zeros(())).float().mul_(spread)
            return read.sub_(blocks).square_().sum((1, 3))

        return self._chosen(low, top, error)

    def _of_all(self, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Return scale and zero point of a whole matrix, computed in pieces."""
        low, top = weights.amin().clamp_max(0.0), weights.amax().clamp_min(0.0)

        def error(scale: Tensor) -> Tensor:
            total = torch.zeros(1, 1, dtype=torch.float64)
            for few in pieces(range(len(weights)), weights.shape[1]):
                part = weights[few.start : few.stop]
                read = self._rounded(part, scale, torch.zeros(())).float().mul_(scale)
                total += read.sub_(part).square_().sum(dtype=torch.float64)
            return total

        return self._chosen(low.view(1, 1), top.view(1, 1), error)

    def _chosen(
        self, low: Tensor, top: Tensor, error: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return scales and zero points for least and largest weights; of two, those with less error."""
        least, most = self._range
        if self.zeros is not None:
            scale = self._read((top - low) / (most - least))
            return scale, (least - low / scale).round().clamp(least, most)
        if self.dtype.is_floating_point:
            scale = self._read(torch.maximum(top, -low) / most)
        else:
            first, second = symmetric_scales(low, top, int(most))
            scale = nearer(self._read(first), self._read(second), error)
        return scale, torch.zeros_like(scale)

    def _read(self, scales: Tensor) -> Tensor:
        """Return scales as a reader gets them; 1 for weights that are all 0."""
        if self.powers:
            fraction, exponent = torch.frexp(scales)
            scales = torch.ldexp(torch.ones_like(scales), exponent - (fraction == 0.5).int())
        known = torch.where(scales == 0, 1.0, scales.clamp_min(smallest(self.scales)))
        return scales_of(_as_stored(known, self.scales))

    def _rounded(self, weights: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        q = weights / scale
        if self.zeros is not None:
            q += zero
        if not self.dtype.is_floating_point:
            q = q.round_()
        return q.clamp_(*self._range).to(self.dtype)

    @property
    def _range(self) -> tuple[float, float]:
        info = torch.finfo(self.dtype) if self.dtype.is_floating_point else torch.iinfo(self.dtype)
        return float(info.min), float(info.max)


def of_scaled(
    packed: Scaled, headers: Mapping[str, TensorHeader], *, powers: bool = False
) -> Packing:
    """Return the packing of a layer that is stored like a layer of a checkpoint."""
    weight, scale, *zeros = (headers[name] for name in packed.stored)
    rows, _ = packed.header.shape
    high, wide = packed.block
    by_row = Fraction(1, high)
    of_powers = powers or scale.dtype in EXPONENTS
    quantise = ToScaled(
        weight.dtype,
        scale.dtype,
        packed.block,
        zeros[0].dtype if zeros else None,
        of_powers,
        len(scale.shape),
    )
    parts = (Part(weight), Part(scale, by_row), *(Part(zero, by_row) for zero in zeros))
    blocks = Blocks(high, wide, None if of_powers else scale.dtype)
    return Packing(packed, parts, quantise, whole=high >= rows, blocks=blocks)


def _spread(scales: Tensor) -> Tensor:
    """Return scales in a shape that broadcasts with `(rows, high, columns, wide)`."""
    return scales[:, None, :, None]


def _as_stored(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return scales in a dtype; torch's cast to exponents rounds up in its own way."""
    if dtype not in EXPONENTS:
        return stored_as(scales, dtype)
    exponents = torch.frexp(scales).exponent.sub(1).clamp(-BIAS, BIAS)
    return (exponents + BIAS).to(torch.uint8).view(dtype)
