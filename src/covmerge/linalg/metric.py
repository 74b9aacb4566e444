"""Spectra of ΔC^½, Δ `(d_out, d_in)` as inputs of covariance C see it, at the price of the smaller side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from covmerge.linalg.lapack import cholesky, eigh, eigvalsh
from covmerge.linalg.spectral import (
    EXACT,
    float64_gram,
    nuclear_norm,
    numerical_rank,
    truncated_svd,
)
from covmerge.types import Rounding

_BLOCK = 2**18  # elements of all updates that are multiplied together


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
        whole = covariance.to(torch.float64)
        mean = whole.diagonal().mean()
        return cls(whole / mean if mean > 0.0 else None)

    @cached_property
    def root(self) -> Tensor:
        """L with LLᵀ = C, float64: its Cholesky factor, or where C is singular VΛ^½."""
        assert self.covariance is not None
        factor = cholesky(self.covariance)
        if factor is not None:
            return factor
        values, vectors = eigh(self.covariance)
        return vectors * values.clamp_min(0.0).sqrt()

    def dots(self, updates: Sequence[Tensor]) -> Tensor:
        """⟨Δ_tC^½, Δ_uC^½⟩ `(T, T)`, float64, row block by row block.

        Example:
            >>> Metric.of(torch.diag(torch.tensor([1.0, 3.0]))).dots([torch.ones(1, 2)]).tolist()
            [[2.0]]
        """
        count = len(updates)
        total = torch.zeros(count, count, dtype=torch.float64, device=updates[0].device)
        within = None if self.covariance is None else self.covariance.to(updates[0].dtype)
        for rows in _blocks(updates):
            block = torch.stack([update[rows] for update in updates])
            seen = block if within is None else block @ within
            total += seen.reshape(count, -1) @ block.reshape(count, -1).mT
        return ((total + total.mT) / 2.0).cpu()

    def directions(
        self, update: Tensor, *, rtol: float, rounding: Rounding = EXACT
    ) -> tuple[Tensor, Tensor]:
        """U `(d_out, k)` and σ `(k,)` of ΔC^½ = U diag(σ) Vᵀ within the numerical rank k, σ in float64.

        As `truncated_svd`, but V, which nobody asks for, is never made.

        Example:
            >>> left, sigma = Metric().directions(torch.diag(torch.tensor([3.0, 2.0, 0.0])), rtol=1e-6)
            >>> left.shape, sigma.tolist()
            (torch.Size([3, 2]), [3.0, 2.0])
        """
        if self._by_outputs(update):
            values, vectors = eigh(self._outputs(update))
            sigma = values.clamp_min(0.0).sqrt().flip(0)
            rank, _ = numerical_rank(sigma, update.shape, rtol=rtol, rounding=rounding)
            return vectors.flip(1)[:, :rank].to(update.dtype), sigma[:rank]
        top = truncated_svd(self._seen(update), min(update.shape), rtol=rtol, rounding=rounding)
        return top.left, top.kept

    def nuclear_norm(self, update: Tensor) -> float:
        """Σσ of ΔC^½."""
        if self._by_outputs(update):
            return float(eigvalsh(self._outputs(update)).clamp_min(0.0).sqrt().sum())
        return nuclear_norm(self._seen(update))

    def _by_outputs(self, update: Tensor) -> bool:
        """Whether ΔCΔᵀ in float64 is the cheapest way, and resolves what the dtype does."""
        d_out, d_in = update.shape
        return update.dtype != torch.float64 and d_out <= d_in

    def _outputs(self, update: Tensor) -> Tensor:
        """ΔCΔᵀ `(d_out, d_out)`, float64."""
        if self.covariance is None:
            return float64_gram(update)
        whole = update.to(torch.float64)
        return (whole @ self.covariance) @ whole.mT

    def _seen(self, update: Tensor) -> Tensor:
        """ΔC^½, up to a rotation of its columns."""
        return update if self.covariance is None else update @ self.root.to(update.dtype)


def _blocks(updates: Sequence[Tensor]) -> Iterator[slice]:
    d_out, d_in = updates[0].shape
    step = max(1, _BLOCK // (len(updates) * d_in))
    for start in range(0, d_out, step):
        yield slice(start, start + step)
