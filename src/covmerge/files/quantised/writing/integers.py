"""Small integers in int32 words, by groups of inputs, in the orders of compressed-tensors, GPTQ and AWQ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from covmerge.base.types import TensorHeader
from covmerge.files.quantised.gptq import Grouped
from covmerge.files.quantised.integers import WORD, run_of
from covmerge.files.quantised.packed import pieces
from covmerge.files.quantised.scaled import Scaled
from covmerge.files.quantised.writing.packing import Blocks, Packing, Part
from covmerge.files.quantised.writing.scaled import nearer, smallest, symmetric_scales
from covmerge.maths.linalg.stored import stored_as


@dataclass(frozen=True)
class Rounding:
    """w ≈ (q − z) · s with q ≥ 0, and s and z per group of inputs and per output.

    Attributes:
        bits: bits of q.
        group: number of inputs with one s and one z.
        scales: dtype of s.
        symmetric: whether z is the middle of q's range; otherwise it is chosen by the weights.
        least: the least z.
    """

    bits: int
    group: int
    scales: torch.dtype
    symmetric: bool
    least: int = 0

    @property
    def most(self) -> int:
        """The largest q."""
        return 2**self.bits - 1

    def __call__(self, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q `(rows, columns)`, and s and z `(rows, groups)`."""
        rows, columns = weights.shape
        missing = -columns % self.group
        groups = pad(weights, (0, missing)).view(rows, -1, self.group)
        scale, zero = self._of(groups)
        q = self._rounded(groups, scale.float()[:, :, None], zero[:, :, None])
        return q.flatten(1)[:, :columns].int(), scale, zero.int()

    def _of(self, groups: Tensor) -> tuple[Tensor, Tensor]:
        low, top = groups.amin(2).clamp_max(0.0), groups.amax(2).clamp_min(0.0)
        if not self.symmetric:
            # If no weight is below 0, the least zero point takes numbers that the largest weight needs.
            wanted = torch.maximum((top - low) / self.most, top / (self.most - self.least))
            scale = self._stored(wanted)
            return scale, (-low / scale.float()).round().clamp(self.least, self.most)
        middle = (self.most + 1) // 2
        zero = torch.full_like(low, middle)

        def error(scale: Tensor) -> Tensor:
            scales, half = scale.float()[:, :, None], zero[:, :, None]
            read = (self._rounded(groups, scales, half) - half) * scales
            return (read - groups).square_().sum(2)

        first, second = symmetric_scales(low, top, self.most - middle)
        return nearer(self._stored(first), self._stored(second), error), zero

    def _stored(self, scales: Tensor) -> Tensor:
        known = scales.clamp_min(smallest(self.scales))
        return stored_as(torch.where(scales == 0, 1.0, known), self.scales)

    def _rounded(self, weights: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        return (weights / scale + zero).round_().clamp_(0, self.most)


@dataclass(frozen=True)
class ToWords:
    """Packing in words along the rows, with the sizes of the matrix as a tensor."""

    rounding: Rounding
    shape: tuple[int, ...]
    sizes: torch.dtype

    def __call__(self, weights: Tensor) -> tuple[Tensor, ...]:
        held, _ = run_of(self.rounding.bits)
        rows, columns = weights.shape
        words = torch.empty((rows, -(-columns // held)), dtype=torch.int32)
        scales = torch.empty((rows, -(-columns // self.rounding.group)), dtype=self.rounding.scales)
        for few in pieces(range(rows), columns):
            part = slice(few.start, few.stop)
            q, scales[part], _ = self.rounding(weights[part])
            words[part] = _in_a_row(pad(q, (0, -columns % held)), self.rounding.bits)
        return words, scales, torch.tensor(self.shape, dtype=self.sizes)


def of_words(packed: Scaled, headers: Mapping[str, TensorHeader]) -> Packing:
    """Return the packing of a layer that is stored like a layer of a checkpoint."""
    words, scale, shape = (headers[name] for name in packed.stored)
    rounding = Rounding(packed.bits, packed.block[1], scale.dtype, symmetric=True)
    quantise = ToWords(rounding, packed.header.shape, shape.dtype)
    parts = (Part(words), Part(scale), Part(shape, None))
    blocks = Blocks(1, rounding.group, rounding.scales)
    return Packing(packed, parts, quantise, blocks=blocks)


@dataclass(frozen=True)
class ToGrouped:
    """Packing in words of the transposed matrix.

    Attributes:
        packed: the packed tensor; groups are in order here.
        rounding: how weights are rounded.
    """

    packed: Grouped
    rounding: Rounding

    def __call__(self, weights: Tensor) -> tuple[Tensor, ...]:
        rows, columns = weights.shape
        (held, high), group = run_of(self.rounding.bits), self.rounding.group
        count = -(-columns // group)
        along_inputs = self.packed.shifts is None
        shape = (columns // held * high, rows) if along_inputs else (columns, rows // held * high)
        words = torch.empty(shape, dtype=torch.int32)
        scales = torch.empty((count, rows), dtype=self.rounding.scales)
        runs = -(-rows // held)
        zeros = torch.empty((count, runs * high), dtype=torch.int32)
        for few in pieces(range(runs), held * columns):
            lines = slice(few.start * held, min(few.stop * held, rows))
            place = slice(few.start * high, few.stop * high)
            q, scale, z = self.rounding(weights[lines])
            scales[:, lines] = scale.mT
            z = pad(z - self.packed.less, (0, 0, 0, -len(z) % held)) & self.rounding.most
            zeros[:, place] = self._words(z.mT)
            if along_inputs:
                words[:, lines] = self._words(q).mT
            else:
                words[:, place] = self._words(q.mT)
        if self.packed.mixed is None:
            return words, zeros, scales
        return words, zeros, scales, torch.arange(columns, dtype=torch.int32) // group

    def _words(self, numbers: Tensor) -> Tensor:
        if self.packed.shifts is None:
            return _in_a_row(numbers, self.rounding.bits)
        return _words(numbers, self.packed.shifts)


def of_grouped(packed: Grouped, headers: Mapping[str, TensorHeader], *, symmetric: bool) -> Packing:
    """Return the packing of a layer like one of a checkpoint; `symmetric`: z is the middle of the range."""
    scales = headers[packed.stored[2]].dtype
    rounding = Rounding(packed.bits, packed.group, scales, symmetric, least=packed.less)
    parts = tuple(Part(headers[name], None) for name in packed.stored)
    quantise, blocks = ToGrouped(packed, rounding), Blocks(1, packed.group, scales)
    return Packing(packed, parts, quantise, whole=True, blocks=blocks)


def _words(numbers: Tensor, shifts: tuple[int, ...]) -> Tensor:
    """Return numbers `(rows, n)`, none negative, as words `(rows, n / held)`."""
    held = numbers.reshape(len(numbers), -1, len(shifts))
    return (held << torch.tensor(shifts, dtype=torch.int32)).sum(-1, dtype=torch.int32)


def _in_a_row(numbers: Tensor, bits: int) -> Tensor:
    """Return numbers `(rows, n)`, none negative, as words `(rows, n · bits / 32)` for `in_a_row`."""
    if run_of(bits)[1] == 1:
        return _words(numbers, tuple(range(0, WORD, bits)))
    single = (numbers.unsqueeze(-1) >> torch.arange(bits, dtype=torch.int32)) & 1
    return _words(single.flatten(1), tuple(range(WORD)))
