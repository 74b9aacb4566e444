"""Small numbers in words and bytes, and the groups of inputs that have one scale."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn.functional import pad

from covmerge.base.errors import CheckpointError
from covmerge.files.quantised.packed import Read

# Numbers of 4, 6 and 8 bits, with powers of two as scales (OCP Microscaling Formats 1.0).
#
# 4-bit numbers (E2M1) are stored two per byte, and 6-bit numbers (E2M3) four in three bytes, the lowest
# bits first. A scale may be stored as its exponent e alone (E8M0): it is 2^(e − 127).

BIAS = 127
BYTE = 8
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_E2M3 = torch.cat([torch.arange(8) / 8, *((1 + torch.arange(8) / 8) * 2**e for e in range(3))])
# Values by the bits of a number; the highest bit is the sign.
_VALUES: Mapping[int, Tensor] = MappingProxyType(
    {4: torch.cat([E2M1, -E2M1]), 6: torch.cat([_E2M3, -_E2M3])}
)


def numbers(stored: Tensor, bits: int) -> Tensor:
    """Return stored numbers `(rows, n · bits / 8)` as float32 `(rows, n)`.

    Args:
        stored: 8-bit numbers in their own dtype; smaller ones as bytes, whose rows are whole words.
        bits: bits of a number.

    Example:
        >>> numbers(torch.tensor([[0x21, 0x0A, 0, 0]], dtype=torch.uint8), 4)[0, :3]
        tensor([ 0.5000,  1.0000, -1.0000])
    """
    if bits == BYTE:
        return stored.float()
    words = stored.contiguous().view(torch.uint8).view(torch.int32)
    return _VALUES[bits][in_a_row(words, bits).long()]


def scales_of(stored: Tensor) -> Tensor:
    """Return stored scales in float32; bytes are exponents."""
    if stored.dtype is torch.uint8:
        return torch.ldexp(torch.ones(stored.shape), stored.int() - BIAS)
    return stored.float()


WORD = 32


@dataclass(frozen=True)
class Mixed:
    """The stored group of each input, which activation ordering mixes.

    Attributes:
        name: name of the stored tensor.
        source: the checkpoint's source.
        unset: a number that says that groups are in order; None: there is none.
    """

    name: str
    source: str
    unset: int | None = None

    def groups(self, read: Read, count: int) -> Tensor | None:
        """Return the group of each input, of `count` groups; None: they are in order."""
        groups = read(self.name, None).long()
        if self.unset is not None and bool((groups == self.unset).any()):
            return None
        used = torch.zeros(count, dtype=torch.bool)
        used[groups.clamp(0, count - 1)] = True
        if not used.all() or int(groups.min()) < 0 or int(groups.max()) >= count:
            raise CheckpointError(
                f"{self.source}: '{self.name}' has inputs in groups {int(groups.min())} to "
                f"{int(groups.max())}, where each of {count} groups, from 0, has inputs: fetch it again"
            )
        return groups


def run_of(bits: int) -> tuple[int, int]:
    """Return the fewest numbers of `bits` bits that fill whole words, and the number of these words.

    Example:
        >>> run_of(4), run_of(3)
        ((8, 1), (32, 3))
    """
    shared = gcd(WORD, bits)
    return WORD // shared, bits // shared


def in_a_row(words: Tensor, bits: int) -> Tensor:
    """Return the numbers in words `(rows, n)` as `(rows, n · 32 / bits)`, the lowest bits first.

    Some 3-bit numbers cross two words. The bits of a run of words are treated as one row; the last run
    may be cut off.

    Example:
        >>> in_a_row(torch.tensor([[0x21]], dtype=torch.int32), 4)
        tensor([[1, 2, 0, 0, 0, 0, 0, 0]], dtype=torch.int32)
        >>> in_a_row(torch.tensor([[1 << 30, 1, 0]]), 3)[0, 10].item()
        5
    """
    count, high = run_of(bits)
    places = torch.arange(0, count * bits, bits, dtype=torch.int32)
    if high == 1:
        return ((words.unsqueeze(-1) >> places) & (2**bits - 1)).flatten(1)
    words = pad(words, (0, -words.shape[1] % high))
    held = words.reshape(len(words), words.shape[1] // high, high).long() & (2**WORD - 1)
    word, shift = places // WORD, places % WORD
    low = held[..., word] >> shift
    rest = held[..., (word + 1).clamp_max(high - 1)] << (WORD - shift)
    return ((low | rest) & (2**bits - 1)).flatten(1).int()
