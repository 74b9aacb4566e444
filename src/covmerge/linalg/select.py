"""The k-th smallest magnitude of a vector that is seen block by block, exactly."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from math import log2
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_FLOAT32_DIGITS = 24  # of a float32: a guess that is right to b of them leaves 24 − b to one pass
_DIGIT = 17  # bits that one pass settles: the counters, one MiB, stay in the cache
_NEAR = 7  # a guess from a sample of one tensor is taken to be right to so many bits
# Every sixteenth of so many values tells nearly how large one of a rank is.
_SAMPLED, _LEAST_SAMPLED = 16, 2**20
_PART = 2**19  # values that are counted at once: temporaries stay small, whatever the block


class MagnitudeSelect:
    """Radix selection over the bits of |v|, most significant first, in a few passes.

    The bit pattern of a non-negative float, read as an integer, orders as the float does. Each pass
    counts the values in equal ranges of bit patterns, and the next one looks into the range where the
    rank falls; two passes settle a float32, four a float64. With a guess that is less than 2^−(bits+1)
    of it off one settles a float32, three a float64; it takes one more up to thrice that, and two
    beyond. Memory, 2¹⁷ counters of eight bytes, 2^(24−bits) while a guess is tried, does not depend on
    the number of values.

    Attributes:
        settled: whether `value` is known.
        below: how many magnitudes are smaller than it, once it is.
        up_to: how many are not larger.

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

    def __init__(
        self,
        rank: int | Callable[[int], int],
        dtype: torch.dtype,
        *,
        near: float | None = None,
        bits: int = _NEAR,
    ) -> None:
        """Look for the `rank`-th smallest magnitude, counted from 1; rank 0 is 0.0.

        A function gives the rank for the number of values, which the first pass counts. `near` is a
        guess of the magnitude, right to so many `bits`: the fewer, the more counters.
        """
        self._rank = rank
        self._float = dtype
        self._int = {torch.float32: torch.int32, torch.float64: torch.int64}[dtype]
        self._adding = threading.Lock()
        self.settled = rank == 0
        self.below = self.up_to = 0
        self._guesses = 1  # that may be tried beside one that was wrong
        self._look_everywhere()
        if near is not None and not self.settled:
            guess = int(torch.tensor(near, dtype=dtype).view(self._int))
            off = -int(log2(torch.finfo(dtype).eps)) - bits
            self._look(max(0, guess - 2**off), off + 1, _FLOAT32_DIGITS - bits)

    @property
    def value(self) -> float:
        """The magnitude that was looked for."""
        if not self.settled:
            raise ValueError("the selection needs another pass")
        return float(torch.tensor(self._low, dtype=self._int).view(self._float))

    def add(self, block: Tensor) -> None:
        """Count the values of one block in this pass; several threads may.

        Values of another dtype are rounded towards zero: those of at least `value` stay so.
        """
        values = block.reshape(-1)
        width = (len(self._counts) - 2) << self._shift
        for start in range(0, len(values), _PART):
            bits = _rounded_down(values[start : start + _PART].abs(), self._float).view(self._int)
            below, inside = _split(bits.sub_(self._low), width)
            ranges = inside.bitwise_right_shift_(self._shift).add_(1).cpu()
            ones = torch.ones(len(ranges), dtype=torch.int64)
            with self._adding:
                self._counts.index_add_(0, ranges, ones)
                self._counts[0] += below
                self._counts[-1] += len(bits) - below - len(inside)

    @property
    def counted_bytes(self) -> int:
        """Length of `counted`."""
        return self._counts.nbytes

    def counted(self) -> bytes:
        """Return what was counted in this pass."""
        return bytes(self._counts.view(torch.uint8).numpy().data)

    def absorb_counted(self, counts: memoryview) -> None:
        """Add what another one, at the same place of the same pass, has `counted`."""
        with self._adding:
            self._counts += torch.frombuffer(bytearray(counts), dtype=torch.int64)

    def forget(self) -> None:
        """Take back what was counted in this pass."""
        with self._adding:
            self._counts.zero_()

    def __getstate__(self) -> dict[str, Any]:
        """Everything but the lock, so that another process can count.

        The counters as bytes: torch would put a tensor into memory that both processes share.
        """
        state = {name: value for name, value in vars(self).items() if name != "_adding"}
        return state | {"_counts": self.counted()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        counts = torch.frombuffer(bytearray(state["_counts"]), dtype=torch.int64)
        vars(self).update(state, _counts=counts, _adding=threading.Lock())

    def end_pass(self) -> None:
        """Settle the next bits.

        Raises:
            ValueError: fewer values were added than the rank asks for.
        """
        below = self._counts.cumsum(0)
        if callable(self._rank):
            self._rank = self._rank(int(below[-1]))
        if self._rank > int(below[-1]):
            raise ValueError(f"rank {self._rank} of {int(below[-1])} values")
        if self._rank == 0:
            self._low, self.settled = 0, True
            return
        found = int(torch.searchsorted(below, self._rank))
        if found in (0, len(below) - 1):  # the guess was wrong
            self._look_beside(above=found > 0)
            return
        self.below, self.up_to = int(below[found - 1]), int(below[found])
        self._low += (found - 1) << self._shift
        self.settled = self._shift == 0
        self._look(self._low, self._shift)

    def _look_beside(self, *, above: bool) -> None:
        """Look next to where a guess was wrong, and after that everywhere: most are wrong by little."""
        if self._guesses == 0:
            self._look_everywhere()
            return
        self._guesses -= 1
        digit = (len(self._counts) - 2).bit_length() - 1
        width = digit + self._shift
        self._look(max(0, self._low + (2**width if above else -(2**width))), width, digit)

    def _look_everywhere(self) -> None:
        self._look(0, torch.finfo(self._float).bits - 1)  # the sign bit is dropped

    def _look(self, low: int, width: int, digit: int = _DIGIT) -> None:
        """Count 2^width bit patterns from `low` on next, in 2^digit ranges of equal size."""
        digit = min(width, digit)
        self._low, self._shift = low, width - digit
        self._counts = torch.zeros(2**digit + 2, dtype=torch.int64)


def threshold_rank(density: float, count: int) -> int:
    """Return the rank, counted from 1, of the magnitude that ⌊density · count⌋ are above."""
    return count - int(density * count)


def kth_magnitude(vector: Tensor, rank: int) -> float:
    """Return the `rank`-th smallest of |vector|, counted from 1; 0.0 for rank 0.

    Example:
        >>> kth_magnitude(torch.tensor([3.0, -1.0, 0.5, -4.0]), 3)
        3.0
    """
    (found,) = search(vector, [rank])
    return found.value


def search(vector: Tensor, ranks: Sequence[int]) -> list[MagnitudeSelect]:
    """Find the magnitudes of some ranks, counted from 1; every sixteenth of many gives a guess.

    Raises:
        ValueError: there are fewer values than a rank asks for.

    Example:
        >>> [found.value for found in search(torch.tensor([3.0, -1.0, 0.5, -4.0]), [1, 4])]
        [0.5, 4.0]
    """
    near: list[float | None] = [None] * len(ranks)
    if vector.numel() >= _LEAST_SAMPLED:
        sample = vector.reshape(-1)[::_SAMPLED]
        scaled = [min(rank, max(1, rank // _SAMPLED)) for rank in ranks]
        near = [found.value for found in _searched(sample, scaled, [None] * len(ranks))]
    return _searched(vector, ranks, near)


def _searched(
    vector: Tensor, ranks: Sequence[int], near: Sequence[float | None]
) -> list[MagnitudeSelect]:
    """Carry out searches, pass by pass."""
    found = [
        MagnitudeSelect(rank, vector.dtype, near=guess)
        for rank, guess in zip(ranks, near, strict=True)
    ]
    for one in found:
        while not one.settled:
            one.add(vector)
            one.end_pass()
    return found


def _split(numbers: Tensor, width: int) -> tuple[int, Tensor]:
    """How many are negative, and those from 0 to below `width`."""
    if numbers.device.type != "cpu":
        return int((numbers < 0).sum()), numbers[(numbers >= 0) & (numbers < width)]
    # NumPy is several times as fast as torch over booleans.
    unsigned = torch.uint32 if numbers.dtype == torch.int32 else torch.uint64
    array: NDArray[Any] = np.asarray(numbers)
    inside: NDArray[Any] = np.asarray(numbers.view(unsigned)) < width  # negatives become large
    if inside.all():
        return 0, numbers
    return int(np.count_nonzero(array < 0)), torch.as_tensor(array[np.flatnonzero(inside)])


def _rounded_down(magnitudes: Tensor, dtype: torch.dtype) -> Tensor:
    if magnitudes.dtype == dtype:
        return magnitudes
    rounded = magnitudes.to(dtype)
    above = rounded.to(magnitudes.dtype) > magnitudes
    return torch.where(above, torch.nextafter(rounded, torch.zeros_like(rounded)), rounded)
