"""The leading singular directions of a matrix."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from covmerge.linalg.auto import use_svd
from covmerge.linalg.lapack import eigh, svd


@dataclass(frozen=True)
class LeadingDirections:
    """The top-k part of F = U diag(σ) Vᵀ with its spectrum made flat.

    Attributes:
        isometry: U_k V_kᵀ, of F's shape and dtype.
        sigma: all singular values, float64, descending.
        k: directions kept: what was asked for, at most the numerical rank.
        rank: numerical rank of F.
    """

    isometry: Tensor
    sigma: Tensor
    k: int
    rank: int


def leading_directions(matrix: Tensor, k: int, *, rtol: float) -> LeadingDirections:
    """Return U_k V_kᵀ of `matrix` `(d_out, d_in)`.

    Directions whose singular value is at or below `rtol` times the largest are beyond the
    numerical rank; they are arbitrary and never kept.

    Float64 goes through an SVD. Float32 goes through the float64 eigenproblem of the smaller Gram
    matrix, U_kV_kᵀ = F·V_kΣ_k⁻¹V_kᵀ, which resolves σ down to 1e-8 of the largest.
    """
    if use_svd(matrix.dtype):
        left, sigma, right = svd(matrix)
        rank = _rank(sigma, rtol)
        k = min(k, rank)
        return LeadingDirections(left[:, :k] @ right[:k], sigma, k, rank)

    wide = matrix.shape[0] <= matrix.shape[1]
    exact = matrix.to(torch.float64)
    values, vectors = eigh(exact @ exact.mT if wide else exact.mT @ exact)
    sigma = values.clamp_min(0.0).sqrt().flip(0)
    rank = _rank(sigma, rtol)
    k = min(k, rank)
    basis = vectors.flip(1)[:, :k]
    whiten = (basis / sigma[:k]) @ basis.mT
    isometry = whiten @ exact if wide else exact @ whiten
    return LeadingDirections(isometry.to(matrix.dtype), sigma, k, rank)


def _rank(sigma: Tensor, rtol: float) -> int:
    return int((sigma > rtol * sigma[0]).sum()) if sigma.numel() else 0
