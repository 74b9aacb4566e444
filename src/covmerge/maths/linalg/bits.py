"""Boolean tensors with eight entries to a byte."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def pack(mask: Tensor) -> Tensor:
    """Pack a boolean tensor into uint8, eight to a byte along the last axis.

    Rows stay apart, so that blocks of rows can be packed by themselves; a tensor with one axis keeps
    a byte per element.

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
