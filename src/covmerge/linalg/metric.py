"""Spectra of ΔC^½, Δ `(d_out, d_in)` as inputs of covariance C see it, at the price of the smaller side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from covmerge.linalg.auto import DOTS_BLOCK, DOTS_ROWS
from covmerge.linalg.cholesky import lower_factor
from covmerge.linalg.lapack import eigh, eigvalsh, multi_dot
from covmerge.linalg.spectral import (
    EXACT,
    float64_gram,
    nuclear_norm,
    numerical_rank,
    truncated_svd,
)
from covmerge.linalg.symmetric import half, times_lower
from covmerge.types import Rounding


@dataclass(frozen=True)
class Spectrum:
    """The singular values of ΔC^½, and what functions of K = ΔCΔᵀ make of Δ.

    Attributes:
        sigma: within the numerical rank k, float64, descending.
        update: Δ `(d_out, d_in)`.
        left: U `(d_out, k)`, eigenvectors of K; None where
        right: V `(d_in, k)`, those of ΔᵀΔ, say the same, C being I.
    """

    sigma: Tensor
    update: Tensor
    left: Tensor | None
    right: Tensor | None = None

    def lifted(self, lift: Tensor, beyond: float = 0.0) -> Tensor:
        """Return U diag(lift) UᵀΔ + beyond · (I − UUᵀ)Δ, lift `(k,)`, in Δ's dtype.

        Example:
            >>> update = torch.diag(torch.tensor([3.0, 2.0]))
            >>> Metric().spectrum(update, rtol=1e-6).lifted(torch.tensor([1.0, 2.0])).tolist()
            [[3.0, 0.0], [0.0, 4.0]]
        """
        weights = (lift - beyond).to(self.update.dtype)
        if self.left is not None:
            found = multi_dot([self.left * weights, self.left.mT, self.update])
        else:
            assert self.right is not None
            found = multi_dot([self.update, self.right * weights, self.right.mT])
        return found.add_(self.update, alpha=beyond) if beyond else found


@dataclass(frozen=True)
class Metric:
    """C `(d_in, d_in)`, symmetric positive semi-definite to rounding, or I.

    Attributes:
        covariance: C in float64, of mean eigenvalue 1; None: I.
    """

    covariance: Tensor | None = None

    @classmethod
    def of(cls, covariance: Tensor | None) -> Metric:
        """The metric of a covariance of any scale; of None, or of one of 0, it is I."""
        if covariance is None:
            return cls()
        mean = covariance.diagonal().to(torch.float64).mean()
        if not mean > 0.0:
            return cls()
        return cls(covariance.to(torch.float64, copy=True).div_(mean))

    @cached_property
    def factor(self) -> Tensor | None:
        """L, lower triangular, with LLᵀ = C, float64; None where C is singular."""
        return None if self.covariance is None else lower_factor(self.covariance)

    @cached_property
    def root(self) -> Tensor:
        """L with LLᵀ = C, float64, where C is singular: VΛ^½."""
        assert self.covariance is not None
        values, vectors = eigh(self.covariance)
        return vectors * values.clamp_min(0.0).sqrt()

    def dots(self, updates: Sequence[Tensor]) -> Tensor:
        """⟨Δ_tC^½, Δ_uC^½⟩ `(T, T)`, float64, row block by row block.

        With C = H + Hᵀ, H its lower half, these are ⟨Δ_tH, Δ_u⟩ + ⟨Δ_uH, Δ_t⟩, for half the work.

        Example:
            >>> Metric.of(torch.diag(torch.tensor([1.0, 3.0]))).dots([torch.ones(1, 2)]).tolist()
            [[2.0]]
        """
        count = len(updates)
        total = torch.zeros(count, count, dtype=torch.float64, device=updates[0].device)
        lower = None if self.covariance is None else half(self.covariance.to(updates[0].dtype))
        for rows in _blocks(updates):
            block = torch.cat([update[rows] for update in updates])
            seen = block if lower is None else times_lower(block, lower)
            total += seen.reshape(count, -1) @ block.reshape(count, -1).mT
        return ((total + total.mT) / (2.0 if lower is None else 1.0)).cpu()

    def spectrum(self, update: Tensor, *, rtol: float, rounding: Rounding = EXACT) -> Spectrum:
        """The singular values of ΔC^½ within the numerical rank, and its left directions.

        As `truncated_svd`, but of the singular vectors only those of the smaller side are made, if they do.

        Example:
            >>> update = torch.diag(torch.tensor([3.0, 2.0, 0.0]))
            >>> Metric().spectrum(update, rtol=1e-6).sigma.tolist()
            [3.0, 2.0]
        """
        d_out, d_in = update.shape
        exact = update.dtype == torch.float64
        if not exact and (d_out <= d_in or self.covariance is None):
            outputs = d_out <= d_in
            gram = self._outputs(update) if outputs else float64_gram(update.mT)
            values, vectors = eigh(gram)
            sigma = values.clamp_min(0.0).sqrt().flip(0)
            rank, _ = numerical_rank(sigma, update.shape, rtol=rtol, rounding=rounding)
            kept = vectors.flip(1)[:, :rank].to(update.dtype)
            return Spectrum(sigma[:rank], update, *((kept, None) if outputs else (None, kept)))
        top = truncated_svd(self._seen(update), min(update.shape), rtol=rtol, rounding=rounding)
        return Spectrum(top.kept, update, top.left)

    def nuclear_norm(self, update: Tensor) -> float:
        """Σσ of ΔC^½."""
        if update.dtype != torch.float64 and len(update) <= update.shape[1]:
            return float(eigvalsh(self._outputs(update)).clamp_min(0.0).sqrt().sum())
        return nuclear_norm(self._seen(update))

    def _outputs(self, update: Tensor) -> Tensor:
        """ΔCΔᵀ `(d_out, d_out)`, float64."""
        if self.covariance is None or self.factor is not None:
            return float64_gram(self._seen(update))
        whole = update.to(torch.float64)
        found = times_lower(whole, half(self.covariance)) @ whole.mT
        return found + found.mT

    def _seen(self, update: Tensor) -> Tensor:
        """ΔC^½, up to a rotation of its columns, in Δ's dtype."""
        if self.covariance is None:
            return update
        if self.factor is None:
            return update @ self.root.to(update.dtype)
        return times_lower(update, self.factor.to(update.dtype))


def _blocks(updates: Sequence[Tensor]) -> Iterator[slice]:
    d_out, d_in = updates[0].shape
    step = max(1, max(DOTS_BLOCK // d_in, DOTS_ROWS) // len(updates))
    for start in range(0, d_out, step):
        yield slice(start, start + step)
