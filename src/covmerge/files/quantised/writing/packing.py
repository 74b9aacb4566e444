"""How one tensor is stored packed: its parts, which rows of them some rows of it are, and the rounding.

What is packed is rounded to the nearest number that its format has, and nothing else is done to it.
How near that is, is found by the format's own reader.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, lcm
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from covmerge.base.types import TensorHeader
from covmerge.files.quantised.packed import Packed, pieces


@dataclass(frozen=True)
class Part:
    """A stored tensor of a packed one.

    Attributes:
        header: what is stored.
        share: how many of its rows one row of the weight has; None: it is the same whatever the weights,
            and stored with the first of them.
    """

    header: TensorHeader
    share: Fraction | None = Fraction(1)

    def held(self, rows: range) -> range:
        """Return its rows for some rows of the weight."""
        assert self.share is not None
        stop = min(ceil(rows.stop * self.share), self.header.shape[0])
        return range(int(rows.start * self.share), stop)


class Quantiser(Protocol):
    """Rounds weights; an object that tells itself from others by its `repr`."""

    def __call__(self, weights: Tensor) -> tuple[Tensor, ...]:
        """Return the parts of some rows, in float32, that begin where `Packing.step` divides."""
        ...


@dataclass(frozen=True)
class Packing:
    """How one tensor is stored packed.

    Attributes:
        packed: what reads it.
        parts: what is stored of it.
        quantise: what makes these parts of weights.
        whole: whether that takes all rows at once, as one number is of all of them, or rows lie
            side by side in what is stored.
        group: rows that are stored in another order among each other.
    """

    packed: Packed
    parts: tuple[Part, ...]
    quantise: Quantiser
    whole: bool = False
    group: int = 1

    @property
    def step(self) -> int | None:
        """Rows that share a number or a byte, or are mixed; None: all of them."""
        shares = [part.share.denominator for part in self.parts if part.share is not None]
        return None if self.whole else lcm(self.group, *shares)

    def held(self, rows: range | None) -> list[tuple[Part, range | None] | None]:
        """Return each part with its rows of some rows of the weight; None: it lies with the first ones."""
        if rows is None or self.whole:
            return [(part, None) for part in self.parts]
        return [
            (part, part.held(rows))
            if part.share is not None
            else None
            if rows.start
            else (part, None)
            for part in self.parts
        ]

    def placed(self, parts: Sequence[Tensor], rows: range | None) -> tuple[Tensor, ...]:
        """Return those of the parts of some rows that lie where these rows do."""
        held = self.held(rows)
        return tuple(part for part, place in zip(parts, held, strict=True) if place is not None)

    def taken(self, stored: Sequence[Tensor], rows: range | None) -> tuple[Tensor, ...]:
        """Return what another checkpoint stores of some rows, in the sizes that are planned.

        Of bitsandbytes' JSON it may be shorter, and is filled up with spaces.
        """
        held = (place for place in self.held(rows) if place is not None)
        return tuple(
            pad(tensor, (0, part.header.numel - tensor.numel()), value=ord(" "))
            if place is None and tensor.numel() < part.header.numel
            else tensor
            for (part, place), tensor in zip(held, stored, strict=True)
        )

    def unpacked(self, parts: Sequence[Tensor], rows: range) -> Iterator[tuple[range, Tensor]]:
        """Yield what a reader makes of packed rows, a few at a time."""
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
