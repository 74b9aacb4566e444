"""How far rounding is amplified by solving with a factorised system."""

from __future__ import annotations

import torch
from torch import Tensor

from covmerge.maths.linalg.cholesky import Cholesky
from covmerge.maths.linalg.lapack import norm
from covmerge.maths.linalg.pinv import largest_eigenvalue

STEPS = 6  # of inverse iteration


def condition_number(
    system: Tensor, factor: Cholesky, *, ridge: float, enough: float = 1.0
) -> float:
    """Return λ_max/λ_min of A + ridge·I from below, A `(n, n)` and `factor` its factorisation.

    Where the ridge alone keeps it below `enough`, that bound is returned, and nothing solved for it.

    The largest eigenvalue by Lanczos' iteration, the smallest by a few steps of inverse iteration: a
    few products and solves with one vector. A smallest eigenvalue that the ridge alone decides has so
    many directions that the first step finds it.

    Example:
        >>> from covmerge.maths.linalg.cholesky import factorize
        >>> a = torch.diag(torch.tensor([3.0, 1.0, 0.0]))
        >>> round(condition_number(a, factorize(a, ridge=0.1), ridge=0.1))
        31
    """
    largest = largest_eigenvalue(system) + ridge
    if largest <= enough * ridge:
        return largest / ridge
    generator = torch.Generator().manual_seed(0)
    vector = torch.randn(1, len(system), generator=generator, dtype=torch.float64)
    vector = vector.to(factor.factor)
    growth = 0.0
    for _ in range(STEPS):
        vector = factor.solve_right(vector / norm(vector))
        growth = norm(vector)
    return largest * growth
