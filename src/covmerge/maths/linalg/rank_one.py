"""Sherman–Morrison: what a rank-one term does to a solved system."""

from __future__ import annotations

import torch
from torch import Tensor


def add_rank_one_(solved: Tensor, solved_row: Tensor, ones: Tensor | None = None) -> Tensor:
    r"""Turn X = N S⁻¹ in place into N (S + 𝟏cᵀ)⁻¹, given wᵀ = cᵀS⁻¹.

    N (S + 𝟏cᵀ)⁻¹ = X − (X𝟏) wᵀ / (1 + wᵀ𝟏)

    Args:
        solved: X `(m, n)`.
        solved_row: w `(n,)`.
        ones: 𝟏 `(n,)` in the coordinates of the columns; None where it is literally that.
    """
    if ones is None:
        ones = torch.ones_like(solved_row)
    return solved.addr_((solved @ ones) / (1.0 + solved_row @ ones), solved_row, alpha=-1.0)
