"""Whether there is a NaN or Inf in a tensor."""

from __future__ import annotations

from math import isfinite

import torch
from torch import Tensor


def all_finite(values: Tensor) -> bool:
    """Return whether no value is NaN or Inf, of a tensor of any dtype and shape.

    Least and most tell, in one pass and without temporaries; torch.isfinite takes several.

    Example:
        >>> all_finite(torch.tensor([1.0, float("-inf")]))
        False
    """
    if not values.is_floating_point() or not values.numel():
        return True
    if values.dtype.itemsize == 1:  # torch has no order for these
        values = values.float()
    return all(isfinite(float(end)) for end in torch.aminmax(values))
