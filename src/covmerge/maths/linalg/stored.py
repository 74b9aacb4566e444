"""Checks for finite numbers, and rounding to the dtype in which numbers are stored."""

from __future__ import annotations

from functools import cache
from math import inf, isfinite

import torch
from torch import Tensor


def all_finite(values: Tensor) -> bool:
    """Return whether no value of a tensor of any dtype and shape is NaN or Inf.

    NaN and Inf stay in a sum, which takes an eighth of the time of `aminmax`. A sum of finite values may
    overflow; then the least and the largest value decide. torch.isfinite makes temporaries.

    Example:
        >>> all_finite(torch.tensor([1.0, float("-inf")]))
        False
    """
    if not values.is_floating_point() or not values.numel():
        return True
    if values.dtype.itemsize == 1:  # torch cannot compare float8 values
        values = values.float()
    return isfinite(float(values.sum())) or all(
        isfinite(float(end)) for end in torch.aminmax(values)
    )


# Integers of the same width: neighbouring numbers of a dtype have neighbouring integers.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def stored_as(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Round to a narrower dtype, or return the values as they are.

    A cast to float8_e4m3fn gives the largest number of the dtype where other dtypes give Inf, so the
    result does not show an overflow. A number overflows if it is further than half a step beyond the
    largest number.

    Raises:
        OverflowError: a number is too large for the dtype, or NaN or Inf where the dtype is narrower.

    Example:
        >>> stored_as(torch.tensor([460.0]), torch.float8_e4m3fn)
        tensor([448.], dtype=torch.float8_e4m3fn)
        >>> stored_as(torch.tensor([512.0]), torch.float8_e4m3fn)
        Traceback (most recent call last):
        OverflowError: the largest number is 512, and float8_e4m3fn ends at 448
    """
    rounded = values.to(dtype)
    if rounded.dtype == values.dtype or not dtype.is_floating_point or not values.numel():
        return rounded
    most = torch.finfo(dtype).max
    given = torch.finfo(values.dtype).max if values.is_floating_point() else inf
    if most >= given or (dtype.itemsize > 1 and all_finite(rounded)):
        return rounded
    wide = values if values.dtype.itemsize > 1 else values.float()
    largest = max(abs(float(end)) for end in torch.aminmax(wide))
    if not isfinite(largest):
        raise OverflowError("there are NaN or Inf among them")
    if largest > _end(dtype) or not all_finite(rounded):
        name = str(dtype).removeprefix("torch.")
        raise OverflowError(f"the largest number is {largest:.6g}, and {name} ends at {most:.6g}")
    return rounded


@cache
def _end(dtype: torch.dtype) -> float:
    """Return the largest number of the dtype plus half the step from the number before it."""
    most = torch.full((1,), torch.finfo(dtype).max, dtype=dtype)
    before = most.view(_BITS[dtype.itemsize]).sub(1).view(dtype)
    return float(most.double() + (most.double() - before.double()) / 2)
