"""How a tensor is stored packed: its parts, the rows of each part for some rows, and the rounding.

Weights are rounded to the nearest number of the format, and nothing else is done to them. The format's own
reader measures the rounding error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, lcm

import torch
from torch import Tensor
from torch.nn.functional import pad

from covmerge.base.types import TensorHeader
from covmerge.files.quantised.packed import Packed, pieces


@dataclass(frozen=True)
class Part:
    """A stored tensor that is a part of a packed one.

    Attributes:
        header: the stored tensor's header.
        share: the number of its rows for one row of the weight; None: it does not depend on the rows, and
            is stored with the first of them.
    """

    header: TensorHeader
    share: Fraction | None = Fraction(1)

    def held(self, rows: range) -> range:
        """Return the rows of the part for some rows of the weight."""
        assert self.share is not None
        stop = min(ceil(rows.stop * self.share), self.header.shape[0])
        return range(int(rows.start * self.share), stop)


@dataclass(frozen=True)
class Blocks:
    """Blocks of weights with one scale.

    Attributes:
        rows: rows of a block, of the weight with all axes but the last as one; of one row: with all but the
            first as one.
        columns: columns of a block.
        scales: dtype of the scales; None: they are powers of two.
    """

    rows: int
    columns: int
    scales: torch.dtype | None


@dataclass(frozen=True)
class Packing:
    """How one tensor is stored packed.

    Attributes:
        packed: the packed tensor, which reads the result.
        parts: its stored parts.
        quantise: the function that makes the parts of some float32 rows, of which the first is a multiple
            of `step`; an object whose `repr` tells it from others.
        whole: whether it needs all rows at once, because one number depends on all rows, or because rows
            lie side by side in a stored tensor.
        group: number of rows that are stored in another order among each other.
        blocks: the blocks with one scale; None: none, or they go over the end of a row.
    """

    packed: Packed
    parts: tuple[Part, ...]
    quantise: Callable[[Tensor], tuple[Tensor, ...]]
    whole: bool = False
    group: int = 1
    blocks: Blocks | None = None

    @property
    def step(self) -> int | None:
        """Number of rows that share a number or a byte, or are stored in another order; None: all rows."""
        shares = [part.share.denominator for part in self.parts if part.share is not None]
        return None if self.whole else lcm(self.group, *shares)

    def held(self, rows: range | None) -> list[tuple[Part, range | None]]:
        """Return the parts that are stored with some rows of the weight, each with its rows."""
        if rows is None or self.whole:
            return [(part, None) for part in self.parts]
        parts = (part for part in self.parts if part.share is not None or not rows.start)
        return [(part, None if part.share is None else part.held(rows)) for part in parts]

    def placed(self, parts: Sequence[Tensor], rows: range | None) -> tuple[Tensor, ...]:
        """Return those of the parts of some rows that are stored with these rows."""
        held = [part for part, _ in self.held(rows)]
        pairs = zip(self.parts, parts, strict=True)
        return tuple(tensor for part, tensor in pairs if part in held)

    def taken(self, stored: Sequence[Tensor], rows: range | None) -> tuple[Tensor, ...]:
        """Return what another checkpoint stores for some rows, in the planned sizes.

        bitsandbytes' JSON may be shorter than planned, and is padded with spaces.
        """
        return tuple(
            pad(tensor, (0, part.header.numel - tensor.numel()), value=ord(" "))
            if place is None and tensor.numel() < part.header.numel
            else tensor
            for (part, place), tensor in zip(self.held(rows), stored, strict=True)
        )

    def unpacked(self, parts: Sequence[Tensor], rows: range) -> Iterator[tuple[range, Tensor]]:
        """Yield the values that a reader gets from packed rows, a few rows at a time."""
        held = {
            part.header.name: (
                tensor,
                0 if self.whole or part.share is None else part.held(rows).start,
            )
            for part, tensor in zip(self.parts, parts, strict=True)
        }

        def read(name: str, wanted: range | None) -> Tensor:
            tensor, start = held[name]
            return tensor if wanted is None else tensor[wanted.start - start : wanted.stop - start]

        header = self.packed.header
        for few in pieces(rows, header.numel // max(1, header.shape[0])):
            out = torch.empty((len(few), *header.shape[1:]), dtype=header.dtype)
            self.packed.fill(out, few, read)
            yield few, out
