"""X = B (A + eI)⁻¹ for a symmetric positive (semi-)definite A, by one Cholesky factorisation."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from covmerge.errors import TensorError
from covmerge.linalg.lapack import cholesky_in_place

# Jitter steps, relative to the mean diagonal; the first is "none".
_LADDER = (0.0, 1e-12, 1e-10, 1e-8, 1e-6, 1e-4)


@dataclass(frozen=True)
class CholeskyInfo:
    """What the factorisation needed.

    Attributes:
        jitter: what was added to the diagonal beyond the ridge asked for; 0 in the normal case.
        rcond: squared ratio of the smallest to the largest pivot, an upper bound on the reciprocal
            condition number.
        dtype: float64 when the float32 factorisation broke down.
    """

    jitter: float
    rcond: float
    dtype: torch.dtype


def solve_right(system: Tensor, rows: Tensor, *, ridge: float) -> tuple[Tensor, CholeskyInfo]:
    """Solve X (A + ridge·I) = rows, with A `(n, n)` symmetric and rows `(m, n)`.

    A float32 breakdown is repeated in float64; if the matrix is indefinite there as well, a jitter
    climbs a ladder relative to the mean diagonal and is reported, never hidden.

    Returns:
        X `(m, n)` in the dtype of `rows`, and what the factorisation needed.

    Raises:
        TensorError: the matrix stays indefinite at the top of the ladder (1e-4).
    """
    for dtype in dict.fromkeys((system.dtype, torch.float64)):
        mean_diagonal = float(system.diagonal().mean())
        factor = torch.empty_like(system, dtype=dtype)
        for step in _LADDER if dtype == torch.float64 else _LADDER[:1]:
            jitter = step * mean_diagonal
            factor.copy_(system).diagonal().add_(ridge + jitter)
            # Factored in place: beside the caller's system one more matrix is alive, not two.
            if cholesky_in_place(factor):
                pivots = factor.diagonal()
                rcond = float((pivots.min() / pivots.max()) ** 2)
                # The rows of a row-major matrix are the columns LAPACK wants: no transposed copy.
                solution = torch.cholesky_solve(rows.to(dtype).mT, factor).mT
                return solution.to(rows.dtype), CholeskyInfo(jitter, rcond, dtype)
    raise TensorError(
        f"the {tuple(system.shape)} system of this layer stays indefinite with a ridge of {ridge:g} "
        f"and a jitter of {_LADDER[-1]:g} of its mean diagonal; raise `eps`"
    )
