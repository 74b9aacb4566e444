"""Sherman–Morrison: what a rank-one term does to a solved system."""

from __future__ import annotations

from torch import Tensor


def add_rank_one_(solved: Tensor, solved_row: Tensor) -> Tensor:
    r"""Turn X = N S⁻¹ in place into N (S + 𝟏cᵀ)⁻¹, given wᵀ = cᵀS⁻¹.

    N (S + 𝟏cᵀ)⁻¹ = X − (X𝟏) wᵀ / (1 + wᵀ𝟏)

    Args:
        solved: X `(m, n)`.
        solved_row: w `(n,)`.
    """
    return solved.addr_(solved.sum(1) / (1.0 + solved_row.sum()), solved_row, alpha=-1.0)
