"""Singular values of an update, its ranks, and the input directions on which it acts."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, exp

import torch
from torch import Tensor

from covmerge.base.types import LowRank
from covmerge.maths.linalg.lapack import norm, qr, svd
from covmerge.maths.linalg.spectral import RankRule, truncated_svd

TOP = 0.05  # share of the directions that counts as leading
_ITERATIONS = 16


@dataclass(frozen=True)
class Spectrum:
    """The singular values and leading input directions of an update Δ `(d_out, d_in)`."""

    sigma: Tensor  # all singular values, float64, descending
    # V_kᵀ `(k, d_in)`, the leading input directions, k = ⌈5 % of min(d_out, d_in)⌉ or as many as
    # the update has
    inputs: Tensor

    @property
    def stable_rank(self) -> float:
        """‖Δ‖²_F / σ₁²."""
        squares = self.sigma.square()
        return float(squares.sum() / squares[0]) if len(squares) and squares[0] > 0 else 0.0

    @property
    def effective_rank(self) -> float:
        """exp(−Σ p_i log p_i), p = σ/Σσ (Roy and Vetterli, EUSIPCO 2007)."""
        total = float(self.sigma.sum())
        if total == 0.0:
            return 0.0
        return exp(-float(torch.xlogy(self.sigma / total, self.sigma / total).sum()))

    @property
    def top_energy(self) -> float:
        """Share of Σσ² in the leading 5 % of singular values."""
        squares = self.sigma.square()
        return float(squares[: leading(len(squares))].sum() / squares.sum().clamp_min(1e-300))

    def rank(self, floor: float) -> int:
        """Return the number of singular values above a floor: the numerical rank."""
        return int((self.sigma > floor).sum())

    def overlap(self, other: Spectrum) -> float:
        """Return ‖V_kᵀV'_k‖²_F / k: 1 if two updates act on the same inputs, k/d_in by chance."""
        k = min(len(self.inputs), len(other.inputs))
        if k == 0:
            return 0.0
        return norm(self.inputs[:k] @ other.inputs[:k].mT) ** 2 / k


def leading(count: int) -> int:
    """Return how many of `count` directions are the leading ones."""
    return ceil(TOP * count)


def spectrum_of(update: Tensor | LowRank) -> Spectrum:
    """Return the spectrum of an update; an adapter's is computed from its factors.

    Example:
        >>> found = spectrum_of(torch.diag(torch.tensor([2.0, 2.0, 0.0])))
        >>> round(found.stable_rank, 3), round(found.effective_rank, 3), found.rank(1e-6)
        (2.0, 2.0, 2)
    """
    k = leading(min(update.shape))
    if isinstance(update, LowRank):
        left, right = update.left.double(), update.right.double()
        (_, root), (basis, core) = qr(left), qr(right.mT)
        _, sigma, inputs = svd(root @ core.mT)
        return Spectrum(sigma, (inputs @ basis.mT)[:k].to(update.dtype))
    top = truncated_svd(update, k, RankRule(0.0), equals=False)
    return Spectrum(top.sigma, top.right)


def stable_rank(matrix: Tensor) -> float:
    """Return ‖M‖²_F / σ₁² without a decomposition.

    σ₁ comes from a few power iterations. If they have not converged, σ₂ is so close to σ₁ that their
    Rayleigh quotient is close to it too.

    Example:
        >>> stable_rank(torch.eye(5)), stable_rank(torch.ones(3, 4)), stable_rank(torch.zeros(2, 2))
        (5.0, 1.0, 0.0)
    """
    square = norm(matrix) ** 2
    if square == 0.0:
        return 0.0
    # Any fixed start vector without a special structure will do.
    start = torch.arange(1, matrix.shape[1] + 1, dtype=torch.float32) * 0.754877666 % 1 + 0.5
    vector = start.to(matrix)
    top = 0.0
    for _ in range(_ITERATIONS):
        image = matrix @ (vector / norm(vector))
        top = max(top, norm(image) ** 2)
        vector = matrix.mT @ image
        if norm(vector) == 0.0:
            break
    return round(square / top, 4) if top else 0.0
