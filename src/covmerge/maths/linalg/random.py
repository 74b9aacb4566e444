"""Random numbers that depend only on a seed and a place, not on the order of requests."""

from __future__ import annotations

import hashlib
import threading
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

# Each step of Philox's counter gives four 64-bit words, which are eight float32 numbers.
_PER_STEP = 8
_DIGITS = 24  # bits of a float32's significand


@dataclass(frozen=True)
class Stream:
    """The random numbers of one tensor of one expert.

    Philox is counter-based: the number at a place depends on the key and the place alone. The same tensor
    therefore gets the same numbers in any blocks, in any order, on any device.
    """

    name: str  # the name of what the numbers belong to; part of the key
    offset: int = 0  # place of the stream's first number, counted in elements of the whole tensor

    def uniform(self, seed: int, shape: tuple[int, ...]) -> Tensor:
        """Return float32 numbers in [0, 1), on the CPU.

        Example:
            >>> whole = Stream("fc.weight").uniform(0, (3, 4))
            >>> torch.equal(Stream("fc.weight", offset=4).uniform(0, (2, 4)), whole[1:])
            True
        """
        key = hashlib.blake2b(f"{seed}\0{self.name}".encode(), digest_size=16).digest()
        bits = np.random.Philox(key=np.frombuffer(key, dtype=np.uint64))
        steps, skipped = divmod(self.offset, _PER_STEP)
        bits.advance(steps)
        size = prod(shape)
        # Generator.random gives the same numbers, but takes one call for each.
        words = torch.as_tensor(bits.random_raw((skipped + size) // 2 + 1))
        halves = words.view(torch.int32)[skipped : skipped + size]
        digits = halves.bitwise_right_shift_(8).bitwise_and_(2**_DIGITS - 1)
        return digits.float().mul_(2.0**-_DIGITS).reshape(shape)


# The numbers of torch's CPU generator at any place of its stream, in any order.
#
# torch draws from one Mersenne Twister (MT19937), one word for each float32 number. A method that drew its
# numbers tensor by tensor can be reproduced in any order, in threads and in processes, because the count of
# numbers drawn before each tensor is known.

_STEP = 2**24  # numbers between two stored states: for 10^9 numbers the states take 150 kB
_AT_ONCE = 2**18  # words drawn at once, which fit into the cache


class MersenneTwister:
    """The stream of one seed. It stores states on the way, so that no part is skipped twice.

    Only the lower 32 bits of a seed count, as in `torch.manual_seed`.

    Example:
        >>> _ = torch.manual_seed(7)
        >>> first, second = torch.rand(3), torch.rand(2)
        >>> torch.equal(MersenneTwister(7).along(3, 2)((2,)), second)
        True
    """

    def __init__(self, seed: int) -> None:
        start = np.random.RandomState(seed % 2**32).get_state(legacy=False)
        self._places: list[int] = [0]
        self._states: list[Mapping[str, Any]] = [_core(start)]
        self._lock = threading.Lock()

    def along(self, place: int, count: int) -> Callable[[tuple[int, ...]], Tensor]:
        """Return a function that gives `count` numbers from a place on, one shape after another.

        They are float32 in [0, 1), on the CPU.
        """
        bits: np.random.MT19937 | None = None
        left = count

        def uniform(shape: tuple[int, ...]) -> Tensor:
            nonlocal bits, left
            if bits is None:
                bits = self._at(place)
            numbers = torch.empty(prod(shape), dtype=torch.float32)
            for start in range(0, len(numbers), _AT_ONCE):
                part = numbers[start : start + _AT_ONCE]
                words = torch.as_tensor(bits.random_raw(len(part)).astype(np.int64))
                part.copy_(words.bitwise_and_(2**_DIGITS - 1)).mul_(2.0**-_DIGITS)
            left -= len(numbers)
            if not left:  # the next expert's numbers begin here
                with self._lock:
                    self._keep(place + count, bits)
            return numbers.reshape(shape)

        return uniform

    def _at(self, place: int) -> np.random.MT19937:
        """Return the generator at a place, advanced from the nearest stored state before it."""
        with self._lock:
            known = bisect_right(self._places, place) - 1
            bits, at = np.random.MT19937(), self._places[known]
            setattr(bits, "state", self._states[known])  # noqa: B010 - its stub has no setter
            while at < place:
                step = min(_STEP, place - at)
                bits.random_raw(step, output=False)
                at += step
                self._keep(at, bits)
            return bits

    def _keep(self, place: int, bits: np.random.MT19937) -> None:
        after = bisect_right(self._places, place)
        if self._places[after - 1] != place:
            self._places.insert(after, place)
            self._states.insert(after, _core(bits.state))


def _core(state: Any) -> Mapping[str, Any]:
    """Return the words of a generator's state, without numpy's other entries."""
    return {"bit_generator": "MT19937", "state": state["state"]}


@lru_cache(maxsize=4)
def mersenne_twister(seed: int) -> MersenneTwister:
    """Return the stream of a seed; the process has one object for each seed."""
    return MersenneTwister(seed)
