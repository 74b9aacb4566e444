"""The leading singular directions of a matrix."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from covmerge.linalg.auto import use_svd
from covmerge.linalg.lapack import eigh, svd

_BLOCK = 1024  # columns that are alive in float64 at once


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
    matrix, U_kV_kᵀ = U_kΣ_k⁻¹U_kᵀ·F, which resolves σ down to 1e-8 of the largest.
    """
    if use_svd(matrix.dtype):
        left, sigma, right = svd(matrix)
        rank = _rank(sigma, rtol)
        k = min(k, rank)
        return LeadingDirections(left[:, :k] @ right[:k], sigma, k, rank)

    # Oriented so that the small side is the rows; the isometry's transpose is that of Fᵀ.
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.mT
    values, vectors = eigh(_float64_gram(wide))
    sigma = values.clamp_min(0.0).sqrt().flip(0)
    rank = _rank(sigma, rtol)
    k = min(k, rank)
    basis = vectors.flip(1)[:, :k]
    whiten = (basis / sigma[:k]) @ basis.mT
    isometry = torch.empty_like(matrix)
    target = isometry if wide is matrix else isometry.mT
    for columns, block in _float64_blocks(wide):
        target[:, columns] = (whiten @ block).to(matrix.dtype)
    return LeadingDirections(isometry, sigma, k, rank)


def _float64_gram(wide: Tensor) -> Tensor:
    """FFᵀ in float64, without a float64 copy of F."""
    gram = wide.new_zeros(len(wide), len(wide), dtype=torch.float64)
    for _, block in _float64_blocks(wide):
        gram.addmm_(block, block.mT)
    return gram


def _float64_blocks(wide: Tensor) -> Iterator[tuple[slice, Tensor]]:
    for start in range(0, wide.shape[1], _BLOCK):
        columns = slice(start, start + _BLOCK)
        yield columns, wide[:, columns].to(torch.float64)


def _rank(sigma: Tensor, rtol: float) -> int:
    return int((sigma > rtol * sigma[0]).sum()) if sigma.numel() else 0
