"""Exact selection of the k-th smallest magnitude of a vector that is read block by block."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from math import log2
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_FLOAT32_DIGITS = 24  # digits of a float32; a guess right to b bits leaves 24 − b to one pass
_DIGIT = 17  # bits that one pass settles; its counters (1 MiB) stay in the cache
_NEAR = 6  # bits to which a guess from a sample of one tensor is assumed to be right
# Every seventeenth value is a sample that shows nearly how large the value of a rank is. Of very many
# values fewer are taken, so that the sample stays small. 16 would take the same columns of each row.
_STEP, _LEAST_SAMPLED = 17, 2**20
_PART = 2**19  # values that are counted at once, so that temporaries stay small for any block
_INTEGERS = {
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}

Vector = Callable[[], Iterable[Tensor]]  # the vector's blocks; each call starts from the first


class MagnitudeSelect:
    """Radix selection on the bits of |v|, most significant first, in a few passes.

    The bit pattern of a non-negative float, read as an integer, has the order of the floats. Each pass
    counts the values in equal ranges of bit patterns, and the next pass looks into the range that holds the
    rank. One pass settles half precision, two a float32, four a float64. A guess with an error below
    2^−(bits+1) of its value saves one pass: one settles a float32, three a float64. Up to three times that
    error costs one more pass, and a larger one two more. Memory is 2¹⁷ counters of eight bytes, 2^(24−bits)
    while a guess is tried, and does not depend on the number of values.

    Attributes:
        settled: whether `value` is known.
        below: the number of smaller magnitudes; valid once `settled`.
        up_to: the number of magnitudes that are not larger; valid once `settled`.

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
        """Look for the `rank`-th smallest magnitude, counted from 1; rank 0 gives 0.0.

        A function as `rank` gets the number of values, which the first pass counts. `near` is a guess of
        the magnitude that is right to `bits` bits: the fewer bits, the more counters.
        """
        self._rank = rank
        self._float = dtype
        self._int = _INTEGERS[dtype]
        self._adding = threading.Lock()
        self.settled = rank == 0
        self.below = self.up_to = 0
        self._guesses = 1  # neighbouring ranges that may be tried after a wrong guess
        self._count_everywhere()
        if near is not None and not self.settled:
            guess = int(torch.tensor(near, dtype=dtype).view(self._int))
            off = -int(log2(torch.finfo(dtype).eps)) - bits
            self._count_next(max(0, guess - 2**off), off + 1, _FLOAT32_DIGITS - bits)

    @property
    def value(self) -> float:
        """The magnitude of the rank."""
        return self.beside(0)

    def beside(self, steps: int) -> float:
        """Return the magnitude that is `steps` numbers of the dtype above `value`."""
        if not self.settled:
            raise ValueError("the selection needs another pass")
        return float(torch.tensor(self._low + steps, dtype=self._int).view(self._float))

    def add(self, block: Tensor) -> None:
        """Count the values of one block in this pass; several threads may do so at once.

        Values of another dtype are rounded towards zero, so that those of at least `value` remain so.
        """
        values = block.reshape(-1)
        width = (len(self._counts) - 2) << self._shift
        for start in range(0, len(values), _PART):
            bits = _rounded_down(values[start : start + _PART].abs(), self._float).view(self._int)
            if bits.dtype == torch.int16:  # torch does not accept int16 as an index
                bits = bits.int()
            below, inside = _split(bits.sub_(self._low), width)
            ranges = inside.bitwise_right_shift_(self._shift)
            with self._adding:
                _count_(self._counts[1:-1], ranges)
                self._counts[0] += below
                self._counts[-1] += len(bits) - below - len(inside)

    @property
    def counted_bytes(self) -> int:
        """Number of bytes of `counted`."""
        return self._counts.nbytes

    def counted(self) -> bytes:
        """Return the counters of this pass as bytes."""
        return bytes(self._counts.view(torch.uint8).numpy().data)

    def absorb_counted(self, counts: memoryview) -> None:
        """Add the counters of another selection in the same pass, from its `counted`."""
        with self._adding:
            self._counts += torch.frombuffer(bytearray(counts), dtype=torch.int64)

    def forget(self) -> None:
        """Discard the counts of this pass."""
        with self._adding:
            self._counts.zero_()

    def __getstate__(self) -> dict[str, Any]:
        """Return all attributes but the lock, so that another process can count.

        The counters are pickled as bytes, because torch would put a tensor into memory shared by both
        processes.
        """
        state = {name: value for name, value in vars(self).items() if name != "_adding"}
        return state | {"_counts": self.counted()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        counts = torch.frombuffer(bytearray(state["_counts"]), dtype=torch.int64)
        vars(self).update(state, _counts=counts, _adding=threading.Lock())

    def end_pass(self) -> None:
        """Settle the next bits from the counts of this pass.

        Raises:
            ValueError: fewer values were added than the rank.
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
            if self._low == 0 and (len(below) - 2) << self._shift >= self._every:
                raise ValueError(f"rank {self._rank} is at none of all magnitudes of {self._float}")
            self._count_beside(above=found > 0)
            return
        self.below, self.up_to = int(below[found - 1]), int(below[found])
        self._low += (found - 1) << self._shift
        self.settled = self._shift == 0
        self._count_next(self._low, self._shift)

    def _count_beside(self, *, above: bool) -> None:
        """After a wrong guess, count the neighbouring range and then all: most guesses are nearly right."""
        if self._guesses == 0:
            self._count_everywhere()
            return
        self._guesses -= 1
        digit = (len(self._counts) - 2).bit_length() - 1
        width = digit + self._shift
        self._count_next(max(0, self._low + (2**width if above else -(2**width))), width, digit)

    def _count_everywhere(self) -> None:
        width = torch.finfo(self._float).bits - 1  # the sign bit is not counted
        self._every = 2**width
        self._count_next(0, width)

    def _count_next(self, low: int, width: int, digit: int = _DIGIT) -> None:
        """Prepare to count 2^width bit patterns from `low` on, in 2^digit ranges of equal size."""
        digit = min(width, digit)
        self._low, self._shift = low, width - digit
        self._counts = torch.zeros(2**digit + 2, dtype=torch.int64)


def threshold_rank(density: float, count: int) -> int:
    """Return the rank, counted from 1, of the magnitude that ⌊density · count⌋ values exceed."""
    return count - int(density * count)


def kth_magnitude(vector: Tensor, rank: int) -> float:
    """Return the `rank`-th smallest of |vector|, counted from 1; 0.0 for rank 0.

    Example:
        >>> kth_magnitude(torch.tensor([3.0, -1.0, 0.5, -4.0]), 3)
        3.0
    """
    (found,) = search(lambda: [vector], vector.numel(), [rank])
    return found.value


def search(vector: Vector, count: int, ranks: Sequence[int]) -> list[MagnitudeSelect]:
    """Find the magnitudes of some ranks, counted from 1; a sample gives a guess if there are many values.

    The vector is read twice if the guess is good, for the sample and for the counts; in half precision
    once.

    Raises:
        ValueError: there are fewer values than a rank.

    Example:
        >>> halves = lambda: torch.tensor([3.0, -1.0, 0.5, -4.0]).split(2)
        >>> [found.value for found in search(halves, 4, [1, 4])]
        [0.5, 4.0]
    """
    dtype = next(iter(vector())).dtype
    near: list[float | None] = [None] * len(ranks)
    if count >= _LEAST_SAMPLED and dtype.itemsize >= torch.float32.itemsize:
        step = max(_STEP, count // _LEAST_SAMPLED | 1)
        sample = torch.cat([block.reshape(-1)[::step].clone() for block in vector()])
        scaled = [min(rank, max(1, rank * len(sample) // count)) for rank in ranks]
        near = [found.value for found in _searched(lambda: [sample], dtype, scaled, near)]
    return _searched(vector, dtype, ranks, near)


def place_behind(vector: Vector, magnitude: float, number: int) -> int:
    """Return the place behind the `number`-th value of a magnitude, in order; 0 for number 0.

    Raises:
        ValueError: fewer values have this magnitude.

    Example:
        >>> place_behind(lambda: torch.tensor([3.0, 1.0, -3.0, 3.0]).split(2), 3.0, 2)
        3
    """
    if number == 0:
        return 0
    counted = passed = 0
    for block in vector():
        places = (block.reshape(-1).abs() == magnitude).nonzero()
        if counted + len(places) >= number:
            return passed + int(places[number - counted - 1]) + 1
        counted, passed = counted + len(places), passed + block.numel()
    raise ValueError(f"{counted} values of magnitude {magnitude:g}, not {number}")


def _searched(
    vector: Vector, dtype: torch.dtype, ranks: Sequence[int], near: Sequence[float | None]
) -> list[MagnitudeSelect]:
    """Carry out searches together, pass by pass."""
    found = [
        MagnitudeSelect(rank, dtype, near=guess) for rank, guess in zip(ranks, near, strict=True)
    ]
    while searching := [one for one in found if not one.settled]:
        for block in vector():
            for one in searching:
                one.add(block)
        for one in searching:
            one.end_pass()
    return found


def _split(numbers: Tensor, width: int) -> tuple[int, Tensor]:
    """Return the number of negative values, and the values from 0 to below `width`."""
    if numbers.device.type != "cpu":
        # `width` itself may be one more than the largest integer of this dtype.
        return int((numbers < 0).sum()), numbers[(numbers >= 0) & (numbers <= width - 1)]
    # NumPy is several times as fast as torch over booleans.
    unsigned = torch.uint32 if numbers.dtype == torch.int32 else torch.uint64
    array: NDArray[Any] = np.asarray(numbers)
    inside: NDArray[Any] = np.asarray(numbers.view(unsigned)) < width  # negatives become large
    if inside.all():
        return 0, numbers
    return int(np.count_nonzero(array < 0)), torch.as_tensor(array[np.flatnonzero(inside)])


def _count_(counts: Tensor, numbers: Tensor) -> None:
    """Add to each counter how often its number occurs; a GPU counts on its own."""
    if numbers.device.type == "cpu":
        counts.index_add_(0, numbers, torch.ones(len(numbers), dtype=counts.dtype))
    else:
        counts.add_(torch.bincount(numbers, minlength=len(counts)).cpu())


def _rounded_down(magnitudes: Tensor, dtype: torch.dtype) -> Tensor:
    if magnitudes.dtype == dtype:
        return magnitudes
    rounded = magnitudes.to(dtype)
    above = rounded.to(magnitudes.dtype) > magnitudes
    return torch.where(above, torch.nextafter(rounded, torch.zeros_like(rounded)), rounded)
