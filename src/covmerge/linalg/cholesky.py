"""Solve with a symmetric positive (semi-)definite matrix by one Cholesky factorisation."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from covmerge.errors import TensorError
from covmerge.linalg.lapack import cholesky_in_place

# Jitter steps, relative to the mean diagonal; the first is "none".
_LADDER = (0.0, 1e-12, 1e-10, 1e-8, 1e-6, 1e-4)


@dataclass(frozen=True)
class Cholesky:
    """A + (ridge + jitter)·I = L Lᵀ.

    Attributes:
        factor: L `(n, n)`; float64 when the float32 factorisation broke down.
        jitter: what was added to the diagonal beyond the ridge asked for; 0 in the normal case.
        rcond: squared ratio of the smallest to the largest pivot, an upper bound on the reciprocal
            condition number.
    """

    factor: Tensor
    jitter: float
    rcond: float

    def solve_right(self, rows: Tensor) -> Tensor:
        """Return X with X (L Lᵀ) = rows, for rows `(m, n)`, in their dtype."""
        # The rows of a row-major matrix are the columns LAPACK wants: no transposed copy.
        columns = rows.to(self.factor.dtype).mT
        return torch.cholesky_solve(columns, self.factor).mT.to(rows.dtype)


def factorize(system: Tensor, *, ridge: float) -> Cholesky:
    """Factorise A + ridge·I for A `(n, n)` symmetric, which stays as it is.

    A float32 breakdown is repeated in float64; if the matrix is indefinite there as well, a jitter
    climbs a ladder relative to the mean diagonal and is reported, never hidden.

    Raises:
        TensorError: the matrix stays indefinite at the top of the ladder (1e-4).
    """
    mean_diagonal = float(system.diagonal().mean())
    for dtype in dict.fromkeys((system.dtype, torch.float64)):
        factor = torch.empty_like(system, dtype=dtype)
        for step in _LADDER if dtype == torch.float64 else _LADDER[:1]:
            jitter = step * mean_diagonal
            factor.copy_(system).diagonal().add_(ridge + jitter)
            if cholesky_in_place(factor):
                pivots = factor.diagonal()
                return Cholesky(factor, jitter, float((pivots.min() / pivots.max()) ** 2))
    raise TensorError(
        f"the {list(system.shape)} system of this layer stays indefinite with a ridge of "
        f"{ridge:g} and a jitter of {_LADDER[-1]:g} of its mean diagonal; raise `eps`"
    )
