"""Thresholding without boolean tensors, which is faster in torch, and packed masks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional


def drop_below(values: Tensor, limit: float) -> Tensor:
    """Return the values whose magnitude is at least `limit`, and 0 in place of the others.

    Example:
        >>> drop_below(torch.tensor([3.0, -1.0, 0.5]), 1.0).tolist()
        [3.0, -1.0, 0.0]
    """
    if limit <= 0:
        return values
    return functional.hardshrink(values, _just_below(limit, values.dtype))


def drop_above(values: Tensor, limit: float) -> Tensor:
    """Return the values whose magnitude is at most `limit`, and 0 in place of the others.

    Example:
        >>> drop_above(torch.tensor([3.0, -1.0, 0.5]), 1.0).tolist()
        [0.0, -1.0, 0.5]
    """
    return values - functional.hardshrink(values, limit)


def at_least(values: Tensor, limit: float) -> Tensor:
    """Return 1 where a non-negative value is at least `limit`, and 0 elsewhere.

    Example:
        >>> at_least(torch.tensor([3.0, 1.0, 0.5, 0.0]), 1.0).tolist()
        [1.0, 1.0, 0.0, 0.0]
    """
    if limit <= 0:
        return torch.ones_like(values)
    return functional.threshold(values, _just_below(limit, values.dtype), 0.0).sign_()


@lru_cache(maxsize=64)  # called again for each part of a tensor
def _just_below(limit: float, dtype: torch.dtype) -> float:
    edge = torch.tensor(limit, dtype=dtype)
    return float(torch.nextafter(edge, torch.zeros_like(edge)))


def pack(mask: Tensor) -> Tensor:
    """Pack a boolean tensor into uint8, eight to a byte along the last axis.

    Each row is packed by itself, so that blocks of rows can be packed separately. A tensor with one axis
    keeps one byte per element.

    Example:
        >>> pack(torch.tensor([[True, False, True]])).tolist()
        [[160]]
    """
    if mask.dim() < 2:
        return mask.to(torch.uint8)
    return torch.as_tensor(np.packbits(mask.cpu().numpy(), axis=-1))


def unpack(packed: Tensor, shape: Sequence[int]) -> Tensor:
    """Return the boolean tensor of this shape that was packed.

    Example:
        >>> unpack(torch.tensor([[160]], dtype=torch.uint8), (1, 3)).tolist()
        [[True, False, True]]
    """
    if len(shape) < 2:
        return packed.to(torch.bool)
    bits = np.unpackbits(packed.cpu().numpy(), axis=-1, count=shape[-1])
    return torch.as_tensor(bits).to(torch.bool)
