"""Singular components of a base's weight, which some types take away before they add their own."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

_linalg: Any = torch.linalg  # torch carries no types for it
_BLOCK = 1024  # columns at a time, so that nothing else of the weight's size is held


def without_components(weight: Tensor, count: int, *, smallest: bool) -> Tensor:
    """Take a matrix's largest or smallest singular components away, in place.

    The vectors are those of the Gram matrix of the shorter side in float64.
    """
    narrow: Tensor = weight.T if weight.shape[0] > weight.shape[1] else weight
    starts = range(0, narrow.shape[1], _BLOCK)
    blocks = [narrow[:, start : start + _BLOCK] for start in starts]
    gram = torch.zeros(len(narrow), len(narrow), dtype=torch.float64)
    for block in blocks:
        exact = block.double()
        gram.addmm_(exact, exact.T)
    vectors = cast("Tensor", _linalg.eigh(gram)[1])
    chosen = vectors[:, :count] if smallest else vectors[:, len(narrow) - count :]
    for block in blocks:
        exact = block.double()
        block.copy_(exact.sub_(chosen @ (chosen.T @ exact)))
    return weight
