"""X = B A† for a symmetric positive semi-definite A, with a named cut-off."""

from __future__ import annotations

import torch
from torch import Tensor

from covmerge.linalg.lapack import eigh


def pinv_right(system: Tensor, rows: Tensor, *, rtol: float) -> tuple[Tensor, int]:
    """Return rows · A† with A `(n, n)` symmetric and rows `(m, n)`, and the rank that was kept.

    Eigenvalues at or below `rtol` times the largest count as zero. The eigenproblem is solved in
    float64 whatever the input, since the cut-off decides the answer.

    Example:
        >>> x, rank = pinv_right(torch.diag(torch.tensor([2.0, 0.0])), torch.ones(1, 2), rtol=1e-6)
        >>> x.tolist(), rank
        ([[0.5, 0.0]], 1)
    """
    values, vectors = eigh(system.to(torch.float64))
    kept = values > rtol * values[-1].clamp_min(0.0)
    values, vectors = values[kept], vectors[:, kept]
    coordinates = rows.to(torch.float64) @ vectors
    return ((coordinates / values) @ vectors.mT).to(rows.dtype), int(kept.sum())
