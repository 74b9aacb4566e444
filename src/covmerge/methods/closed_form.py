r"""The heart: every method of the family is one regression with its own covariances and prior.

    W̄ = W₀ + ( Σ_t R_t C_t ) ( Σ_t C_t + P )⁻¹          Δ_t = W_t − W₀  (d_out, d_in)

The minimiser of Σ_t Tr[(W̄ − W_t) C_t (W̄ − W_t)ᵀ] (ACE, Eqs. 2 and 3; RegMean), written for
differences: the literal form with W_t in the numerator loses W₀ outside the span of the updates
when Σ C_t is singular.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from torch import Tensor

from covmerge.covariance.normal import NormalEquations
from covmerge.linalg.cholesky import Cholesky, factorize
from covmerge.linalg.lapack import norm
from covmerge.linalg.pinv import pinv_right
from covmerge.linalg.rank_one import add_rank_one_
from covmerge.types import LinearGroup


@dataclass(frozen=True)
class Active:
    """The experts that changed this layer; the others leave the sums.

    A zero update says nothing of the layer's inputs: its Gram matrix is zero, and its trace
    normalisation would divide by zero (the published ACE code returns weights of norm 1e9).
    """

    updates: tuple[Tensor, ...]
    weights: tuple[float, ...]
    norms: tuple[float, ...]
    unchanged: int


def active_experts(group: LinearGroup) -> Active:
    """Drop zero updates and bring the remaining weights to mean 1.

    Scaling all weights together must change nothing, though ridges do not scale with them.
    """
    norms = [norm(update) for update in group.updates]
    kept = [t for t, size in enumerate(norms) if size > 0.0]
    mean = fmean(group.weights[t] for t in kept) if kept else 1.0
    return Active(
        updates=tuple(group.updates[t] for t in kept),
        weights=tuple(group.weights[t] / mean for t in kept),
        norms=tuple(norms[t] for t in kept),
        unchanged=len(norms) - len(kept),
    )


def solve_ridge(
    normal: NormalEquations, prior_row: Tensor | None = None, ones: Tensor | None = None
) -> tuple[Tensor, Cholesky]:
    """(Σ R_tC_t)(Σ C_t + 𝟏cᵀ)⁻¹ by one Cholesky; the prior is one more right-hand side.

    `ones` is 𝟏 in the coordinates of the layer's inputs, where it is not literally that.
    """
    factor = factorize(normal.gram, ridge=normal.ridge)
    solved = normal.lift(factor.solve_right(normal.numerator))
    if prior_row is not None:
        solved_row = normal.lift(factor.solve_right(prior_row.unsqueeze(0)))
        add_rank_one_(solved, solved_row[0], ones)
    return solved, factor


def solve_pinv(normal: NormalEquations, *, rtol: float) -> tuple[Tensor, int]:
    """(Σ R_tC_t)(Σ C_t)† and the rank of Σ C_t at the cut-off `rtol`."""
    solved, rank = pinv_right(normal.gram, normal.numerator, rtol=rtol)
    return normal.lift(solved), rank


def stack_weighted(values: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Σ_t w_t · values_t, without a stacked copy."""
    total = values[0] * weights[0]
    for value, weight in zip(values[1:], weights[1:], strict=True):
        total.add_(value, alpha=weight)
    return total
