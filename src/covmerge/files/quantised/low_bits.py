"""Numbers of 4, 6 and 8 bits, and powers of two as scales (OCP Microscaling Formats 1.0).

Numbers of 4 bits (E2M1) lie two a byte and numbers of 6 bits (E2M3) four in three bytes, the lowest bits
first. A scale may be stored as its exponent e alone (E8M0): it is 2^(e − 127).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from covmerge.files.quantised.integers import in_a_row

BIAS = 127
BYTE = 8
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_E2M3 = torch.cat([torch.arange(8) / 8, *((1 + torch.arange(8) / 8) * 2**e for e in range(3))])
# By the bits of a number: its sign comes first.
_VALUES: Mapping[int, Tensor] = MappingProxyType(
    {4: torch.cat([E2M1, -E2M1]), 6: torch.cat([_E2M3, -_E2M3])}
)


def numbers(stored: Tensor, bits: int) -> Tensor:
    """Return stored numbers `(rows, n · bits / 8)` as float32 `(rows, n)`.

    Args:
        stored: of 8 bits in a dtype of their own; of fewer as bytes, a row of which is whole words.
        bits: of a number.

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
