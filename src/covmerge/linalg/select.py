"""The k-th smallest magnitude of a vector that is seen block by block, exactly."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch import Tensor

_DIGIT = 16  # bits that one pass settles: 65,536 counters stay in the cache
_PART = 2**18  # values that are counted at once: temporaries stay small, whatever the block


class MagnitudeSelect:
    """Radix selection over the bits of |v|, most significant first, in a few passes.

    The bit pattern of a non-negative float, read as an integer, orders as the float does. Each pass
    counts the next 16 bits of the values that agree with what is already known; two passes settle a
    float32, four a float64. Memory does not depend on the number of values.

    Example:
        >>> blocks = [torch.tensor([3.0, -1.0]), torch.tensor([0.5, -4.0])]
        >>> select = MagnitudeSelect(rank=2, dtype=torch.float32)
        >>> while not select.settled:
        ...     for block in blocks:
        ...         select.add(block)
        ...     select.end_pass()
        >>> select.value
        1.0
    """

    def __init__(self, rank: int | Callable[[int], int], dtype: torch.dtype) -> None:
        """Look for the `rank`-th smallest magnitude, counted from 1; rank 0 is 0.0.

        A function gives the rank for the number of values, which the first pass counts.
        """
        self._rank_of: Callable[[int], int] | None = rank if callable(rank) else None
        self._rank: int = 1 if callable(rank) else rank
        self._float = dtype
        self._int = {torch.float32: torch.int32, torch.float64: torch.int64}[dtype]
        self._width = torch.finfo(dtype).bits - 1  # the sign bit is dropped
        self._shift = self._width if self._rank > 0 else 0
        self._prefix = 0
        self._counts = torch.zeros(2**_DIGIT, dtype=torch.int64)
        self._adding = threading.Lock()

    @property
    def settled(self) -> bool:
        """Whether all bits are known."""
        return self._shift == 0

    @property
    def value(self) -> float:
        """The magnitude that was looked for."""
        if not self.settled:
            raise ValueError("the selection needs another pass")
        return float(torch.tensor(self._prefix, dtype=self._int).view(self._float))

    def add(self, block: Tensor) -> None:
        """Count the values of one block in this pass; several threads may.

        Values of another dtype are rounded towards zero: those of at least `value` stay so.
        """
        shift = max(0, self._shift - _DIGIT)
        values = block.reshape(-1)
        counts = torch.zeros_like(self._counts)
        for start in range(0, len(values), _PART):
            bits = _rounded_down(values[start : start + _PART].abs(), self._float).view(self._int)
            if self._shift < self._width:
                bits = bits[(bits >> self._shift) == self._prefix]
            digits = (bits >> shift) & (2 ** (self._shift - shift) - 1)
            counts += torch.bincount(digits, minlength=2**_DIGIT).cpu()
        with self._adding:
            self._counts += counts

    def end_pass(self) -> None:
        """Settle the next bits.

        Raises:
            ValueError: fewer values were added than the rank asks for.
        """
        below = self._counts.cumsum(0)
        if self._rank_of is not None:
            self._rank, self._rank_of = self._rank_of(int(below[-1])), None
            if not self._rank:
                self._shift = 0
                return
        digit = int(torch.searchsorted(below, self._rank))
        if digit == len(below):
            raise ValueError(f"rank {self._rank} of {int(below[-1])} values")
        if digit:
            self._rank -= int(below[digit - 1])
        shift = max(0, self._shift - _DIGIT)
        self._prefix = (self._prefix << (self._shift - shift)) | digit
        self._shift = shift
        self._counts.zero_()


def threshold_rank(density: float, count: int) -> int:
    """Return the rank, counted from 1, of the magnitude that ⌊density · count⌋ are above."""
    return count - int(density * count)


def kth_magnitude(vector: Tensor, rank: int) -> float:
    """Return the `rank`-th smallest of |vector|, counted from 1; 0.0 for rank 0.

    Example:
        >>> kth_magnitude(torch.tensor([3.0, -1.0, 0.5, -4.0]), 3)
        3.0
    """
    select = MagnitudeSelect(rank, vector.dtype)
    while not select.settled:
        select.add(vector)
        select.end_pass()
    return select.value


def _rounded_down(magnitudes: Tensor, dtype: torch.dtype) -> Tensor:
    if magnitudes.dtype == dtype:
        return magnitudes
    rounded = magnitudes.to(dtype)
    above = rounded.to(magnitudes.dtype) > magnitudes
    return torch.where(above, torch.nextafter(rounded, torch.zeros_like(rounded)), rounded)
