"""How far rounding is amplified by solving with a factorised system."""

from __future__ import annotations

import torch

from covmerge.maths.linalg.cholesky import Cholesky
from covmerge.maths.linalg.lapack import norm

STEPS = 6  # of inverse iteration


def condition_number(
    largest: float, factor: Cholesky, *, ridge: float, enough: float = 1.0
) -> float:
    """Return λ_max/λ_min of A + ridge·I from below, `largest` that of A and `factor` its factorisation.

    Where the ridge alone keeps it below `enough`, that bound is returned, and nothing solved for it.

    The smallest eigenvalue by a few steps of inverse iteration, solves with one vector. One that the ridge
    alone decides has so many directions that the first step finds it.

    Example:
        >>> from covmerge.maths.linalg.cholesky import factorize
        >>> factor = factorize(torch.diag(torch.tensor([3.0, 1.0, 0.0])), ridge=0.1)
        >>> round(condition_number(3.0, factor, ridge=0.1))
        31
    """
    largest += ridge
    if largest <= enough * ridge:
        return largest / ridge
    generator = torch.Generator().manual_seed(0)
    vector = torch.randn(1, len(factor.factor), generator=generator, dtype=torch.float64)
    vector = vector.to(factor.factor)
    growth = 0.0
    for _ in range(STEPS):
        vector = factor.solve_right(vector / norm(vector))
        growth = norm(vector)
    return largest * growth
