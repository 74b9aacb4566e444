"""Powers of two: the factors that change no digit of a binary floating-point number."""

from __future__ import annotations

from collections.abc import Iterable
from math import frexp, isfinite

import torch
from torch import Tensor

_LIMITS = {torch.float32: 120, torch.float64: 1000}


def exponent_of(tensors: Iterable[Tensor]) -> int:
    """Return the least e with |v| < 2^e for all entries, 0 where they are all zero, NaN or Inf.

    At most what 2^e and 2^-e can be in the dtype: tensors of entries beyond that come near 1, not to it.

    Example:
        >>> exponent_of([torch.tensor([0.0, -6.0]), torch.tensor([1.0])])
        3
    """
    exponent: int | None = None
    for tensor in tensors:
        low, high = (float(end) for end in torch.aminmax(tensor)) if tensor.numel() else (0.0, 0.0)
        largest = max(-low, high)
        if largest > 0.0 and isfinite(largest):
            limit = _LIMITS[tensor.dtype]
            e = max(-limit, min(limit, frexp(largest)[1]))
            exponent = e if exponent is None else max(exponent, e)
    return exponent or 0
