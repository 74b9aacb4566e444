"""torch.linalg with types, which it does not carry, in the few forms used here."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

_linalg: Any = torch.linalg


def norm(tensor: Tensor) -> float:
    """Frobenius norm of a tensor of any shape."""
    return float(_linalg.vector_norm(tensor))


def eigh(symmetric: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues, ascending, and eigenvectors in columns."""
    return cast("tuple[Tensor, Tensor]", _linalg.eigh(symmetric))


def svd(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Thin singular value decomposition U, σ, Vᵀ."""
    return cast("tuple[Tensor, Tensor, Tensor]", _linalg.svd(matrix, full_matrices=False))


def qr(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Thin QR factorisation."""
    return cast("tuple[Tensor, Tensor]", _linalg.qr(matrix))


def cholesky(matrix: Tensor) -> Tensor | None:
    """Lower factor of a symmetric matrix; None if it is not positive definite."""
    factor, failed = cast("tuple[Tensor, Tensor]", _linalg.cholesky_ex(matrix))
    return None if int(failed) else factor


def solve_triangular(lower: Tensor, columns: Tensor) -> Tensor:
    """Return L⁻¹ · columns for a lower triangular L."""
    return cast("Tensor", _linalg.solve_triangular(lower, columns, upper=False))
