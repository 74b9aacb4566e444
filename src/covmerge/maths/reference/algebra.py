"""torch's float64 routines, with types: all that the reference implementations use from elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from covmerge.base.types import LinearGroup

_linalg: Any = torch.linalg


def deltas_of(group: LinearGroup) -> list[Tensor]:
    """Δ_1, …, Δ_T in float64."""
    return [update.double() for update in group.updates]


def total(terms: Iterable[Tensor]) -> Tensor:
    """Σ of the terms, added one by one."""
    return cast("Tensor", sum(terms))


def weighted(values: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Σ w_t · values_t."""
    return total(value * weight for value, weight in zip(values, weights, strict=True))


def length(A: Tensor) -> float:
    """‖A‖_F."""
    return float((A**2).sum().sqrt())


def lengths(x: Tensor, axis: int | None = None, *, keep: bool = False) -> Tensor:
    """‖x‖, or the norms along an axis, in the dtype of x."""
    return cast("Tensor", _linalg.vector_norm(x, dim=axis, keepdim=keep))


def identity(size: int) -> Tensor:
    """I."""
    return torch.eye(size, dtype=torch.float64)


def svd(A: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """U, σ, Vᵀ of A = U diag(σ) Vᵀ."""
    return cast("tuple[Tensor, Tensor, Tensor]", _linalg.svd(A, full_matrices=False))


def inverse(A: Tensor) -> Tensor:
    """A⁻¹."""
    return cast("Tensor", _linalg.inv(A))


def pinv(A: Tensor, rtol: float | None = None) -> Tensor:
    """A† of a symmetric A; eigenvalues at or below `rtol` times the largest count as zero."""
    return cast("Tensor", _linalg.pinv(A, rtol=rtol, hermitian=True))
