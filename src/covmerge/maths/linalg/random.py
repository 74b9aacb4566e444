"""Random numbers that depend on a seed and a place, never on who asks first."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from torch import Tensor

# One step of Philox's counter gives four 64-bit words: eight float32 numbers.
_PER_STEP = 8
_DIGITS = 24  # of a float32, in bits


@dataclass(frozen=True)
class Stream:
    """The random numbers that belong to one tensor of one expert.

    Philox is counter-based: the number at a place follows from the key and the place alone, so the
    same tensor gets the same numbers by any blocks, in any order, on any device.

    Attributes:
        name: what the numbers belong to; part of the key.
        offset: place of the first number asked for, counted in elements of the whole tensor.
    """

    name: str
    offset: int = 0

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
        # Generator.random gives the same numbers, one call for each.
        words = torch.as_tensor(bits.random_raw((skipped + size) // 2 + 1))
        halves = words.view(torch.int32)[skipped : skipped + size]
        digits = halves.bitwise_right_shift_(8).bitwise_and_(2**_DIGITS - 1)
        return digits.float().mul_(2.0**-_DIGITS).reshape(shape)
