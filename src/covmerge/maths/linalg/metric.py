"""Spectra of ΔC^½, Δ `(d_out, d_in)` and C the inputs' covariance, at the cost of the smaller side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import sqrt

import torch
from torch import Tensor

from covmerge.maths.linalg.auto import DOTS_BLOCK, DOTS_ROWS
from covmerge.maths.linalg.cholesky import lower_factor
from covmerge.maths.linalg.lapack import eigh, eigvalsh, multi_dot
from covmerge.maths.linalg.spectral import RankRule, float64_gram, singular_values, truncated_svd
from covmerge.maths.linalg.symmetric import half, times_lower


@dataclass(frozen=True)
class Spectrum:
    """The singular values of ΔC^½, and the eigenvectors of K = ΔCΔᵀ, by which functions of K act on Δ."""

    sigma: Tensor  # the singular values up to the numerical rank k, float64, descending
    update: Tensor  # Δ `(d_out, d_in)`
    left: Tensor  # U `(d_out, k)`, eigenvectors of K

    def lifted(self, lift: Tensor, beyond: float = 0.0) -> Tensor:
        """Return U diag(lift) UᵀΔ + beyond · (I − UUᵀ)Δ, lift `(k,)`, in Δ's dtype.

        Example:
            >>> update = torch.diag(torch.tensor([3.0, 2.0]))
            >>> seen = Metric.of(torch.eye(2)).spectrum(update, RankRule(1e-6))
            >>> seen.lifted(torch.tensor([1.0, 2.0])).tolist()
            [[3.0, 0.0], [0.0, 4.0]]
        """
        weights = (lift - beyond).to(self.update.dtype)
        found = multi_dot([self.left * weights, self.left.mT, self.update])
        return found.add_(self.update, alpha=beyond) if beyond else found


@dataclass(frozen=True)
class Metric:
    """A covariance C `(d_in, d_in)`, symmetric and positive semi-definite to rounding."""

    covariance: Tensor  # C in float64, scaled to a mean eigenvalue of 1
    size: float  # the square root of the divisor that scaled C; it is the unit of all lengths

    @classmethod
    def of(cls, covariance: Tensor) -> Metric:
        """Return the metric of a covariance of any scale except 0."""
        whole = covariance.to(torch.float64, copy=True)
        mean = float(whole.diagonal().mean())  # of the eigenvalues
        return cls(whole.div_(mean), sqrt(mean))

    @cached_property
    def factor(self) -> Tensor | None:
        """The lower triangular L with LLᵀ = C, float64; None if C is singular."""
        return lower_factor(self.covariance)

    @cached_property
    def root(self) -> Tensor:
        """VΛ^½, which is an L with LLᵀ = C for a singular C, float64."""
        values, vectors = eigh(self.covariance)
        return vectors * values.clamp_min(0.0).sqrt()

    def dots(self, updates: Sequence[Tensor]) -> Tensor:
        """Return ⟨Δ_tC^½, Δ_uC^½⟩ `(T, T)`, float64, computed block by block of rows.

        With C = H + Hᵀ, H the lower half of C, these are ⟨Δ_tH, Δ_u⟩ + ⟨Δ_uH, Δ_t⟩, for half the work.

        Example:
            >>> Metric.of(torch.diag(torch.tensor([1.0, 3.0]))).dots([torch.ones(1, 2)]).tolist()
            [[2.0]]
        """
        count = len(updates)
        total = torch.zeros(count, count, dtype=torch.float64, device=updates[0].device)
        lower = half(self.covariance.to(updates[0].dtype))
        for rows in row_blocks(updates):
            block = torch.cat([update[rows] for update in updates])
            image = times_lower(block, lower)
            total += image.reshape(count, -1) @ block.reshape(count, -1).mT
        return (total + total.mT).cpu()

    def spectrum(self, update: Tensor, rule: RankRule) -> Spectrum:
        """Return the singular values of ΔC^½ up to the numerical rank, and the left directions.

        If the outputs are the smaller side, no right vectors are computed.

        Example:
            >>> update = torch.diag(torch.tensor([3.0, 2.0, 0.0]))
            >>> Metric.of(torch.eye(3)).spectrum(update, RankRule(1e-6)).sigma.tolist()
            [3.0, 2.0]
        """
        d_out, d_in = update.shape
        if update.dtype != torch.float64 and d_out <= d_in:
            values, vectors = eigh(self._outputs(update))
            sigma = values.clamp_min(0.0).sqrt().flip(0)
            rank, _ = rule.rank(sigma, update.shape)
            return Spectrum(sigma[:rank], update, vectors.flip(1)[:, :rank].to(update.dtype))
        top = truncated_svd(self._weighted(update), min(update.shape), rule)
        return Spectrum(top.leading, update, top.left)

    def nuclear_norm(self, update: Tensor) -> float:
        """Return Σσ of ΔC^½."""
        if update.dtype != torch.float64 and len(update) <= update.shape[1]:
            return float(eigvalsh(self._outputs(update)).clamp_min(0.0).sqrt().sum())
        return float(singular_values(self._weighted(update)).sum())

    def _outputs(self, update: Tensor) -> Tensor:
        """Return ΔCΔᵀ `(d_out, d_out)`, float64."""
        if self.factor is not None:
            return float64_gram(self._weighted(update))
        whole = update.to(torch.float64)
        found = times_lower(whole, half(self.covariance)) @ whole.mT
        return found + found.mT

    def _weighted(self, update: Tensor) -> Tensor:
        """Return ΔC^½, up to a rotation of its columns, in Δ's dtype."""
        if self.factor is None:
            return update @ self.root.to(update.dtype)
        return times_lower(update, self.factor.to(update.dtype))


def row_blocks(updates: Sequence[Tensor]) -> Iterator[slice]:
    """Yield blocks of rows; those rows of all updates of a layer are multiplied together."""
    d_out, d_in = updates[0].shape
    step = max(1, max(DOTS_BLOCK // d_in, DOTS_ROWS) // len(updates))
    for start in range(0, d_out, step):
        yield slice(start, start + step)
