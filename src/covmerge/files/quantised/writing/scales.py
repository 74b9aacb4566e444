"""Scales of integers: how small they may be; without a zero point there is one more below 0 than above.

Some clients use all of them, −8 to 7, and others leave the lowest out, −7 to 7. Of both scales the one
is taken whose numbers are nearer to the weights: so that weights that either made are found again.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def symmetric_scales(low: Tensor, top: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Return the scale that uses the lowest number too, and the one that does not.

    Args:
        low: the least of some weights, at most 0.
        top: the largest, at least 0.
        most: the largest integer.
    """
    return torch.maximum(top / most, -low / (most + 1)), torch.maximum(top, -low) / most


def smallest(dtype: torch.dtype) -> float:
    """Return the least scale that is stored in a dtype, and is not 0 there."""
    if dtype is not torch.float16:
        return torch.finfo(torch.float32).tiny
    return torch.finfo(dtype).tiny * torch.finfo(dtype).eps


def nearer(first: Tensor, second: Tensor, error: Callable[[Tensor], Tensor]) -> Tensor:
    """Return of two scales, place by place, the one with the smaller error."""
    return torch.where(error(second) < error(first), second, first)
