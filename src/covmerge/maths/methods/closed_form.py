r"""The closed form: every method of the family is a regression with its own covariances and prior.

    W̄ = W₀ + ( Σ_t R_t C_t ) ( Σ_t C_t + P )⁻¹          Δ_t = W_t − W₀  (d_out, d_in)

This minimises Σ_t Tr[(W̄ − W_t) C_t (W̄ − W_t)ᵀ] (ACE, Eqs. 2 and 3; RegMean). It is written for
differences, because the form with W_t in the numerator loses W₀ outside the span of the updates
when Σ C_t is singular.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import sqrt
from statistics import fmean
from typing import ClassVar

import torch
from torch import Tensor

from covmerge.base.diagnostics import Diagnostics, Summary
from covmerge.base.types import LinearGroup, Rounding
from covmerge.maths.covariance.estimate import Covariance
from covmerge.maths.covariance.normal import NormalEquations, normal_equations
from covmerge.maths.linalg.cholesky import Cholesky, add_rank_one_, factorize
from covmerge.maths.linalg.lapack import norm
from covmerge.maths.linalg.pinv import cut_off_right, kept_eigenpairs, solve_full_rank
from covmerge.maths.linalg.spectral import EXACT, RankRule
from covmerge.maths.methods.summaries import UNCHANGED


@dataclass(frozen=True)
class CutOff(Diagnostics):
    """Diagnostics of a solve with a pseudo-inverse."""

    summaries: ClassVar[tuple[Summary, ...]] = (UNCHANGED,)

    route: str | None = None  # primal or dual sums
    rtol: float | None = None  # the cut-off; None: there was none
    rank: int | None = None  # the number of eigenvalues above the cut-off
    solver: str | None = None  # the solver of the system, and its bits
    unchanged: int | None = None  # the number of experts that did not change the matrix


@dataclass(frozen=True)
class Active:
    """The experts that changed a layer with `d_in` inputs; the others are left out of the sums.

    A zero update tells nothing of the layer's inputs. Its Gram matrix is zero, and trace normalisation
    would divide by zero (the published ACE code returns weights of norm 1e9).
    """

    updates: tuple[Tensor, ...]
    weights: tuple[float, ...]
    norms: tuple[float, ...]
    rounding: tuple[Rounding, ...]
    unchanged: int
    d_in: int

    def only(self, places: Sequence[int]) -> Active:
        """Return some of the experts, their weights scaled to mean 1 again."""
        mean = fmean(self.weights[t] for t in places) if places else 1.0
        return replace(
            self,
            updates=tuple(self.updates[t] for t in places),
            weights=tuple(self.weights[t] / mean for t in places),
            norms=tuple(self.norms[t] for t in places),
            rounding=tuple(self.rounding[t] for t in places),
        )

    def unit_grams(self, *, exact: bool) -> list[Covariance]:
        """Return w_t Ĉ_t, Ĉ_t = Δ_tᵀΔ_t / ‖Δ_t‖²_F: Gram matrices of trace 1."""
        return [
            Covariance(update, scale=weight / size**2, exact=exact)
            for update, weight, size in zip(self.updates, self.weights, self.norms, strict=True)
        ]

    def cut_off(self, covariances: Sequence[Covariance], rtol: float | None) -> RankRule:
        """Return the rule for the eigenvalues of Σ C_t = DᵀD, D = [√s_t Δ_t]_t.

        They end at `rtol` times the largest if `rtol` is given; else at the default, or at the rounding of
        the stored weights in D.
        """
        if rtol is not None:
            return RankRule(rtol)
        return self._rule(covariances, default_cut_off(self.d_in))

    def above_rounding(
        self, covariances: Sequence[Covariance], gram: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return eigenvalues, and their vectors, of the Gram matrix of D or Dᵀ that exceed rounding."""
        rtol = len(gram) * torch.finfo(torch.float64).eps
        values, vectors = kept_eigenpairs(gram, self._rule(covariances, rtol))
        return (values, vectors) if len(values) else kept_eigenpairs(gram, RankRule(rtol))

    def _rule(self, covariances: Sequence[Covariance], rtol: float) -> RankRule:
        pairs = zip(covariances, self.rounding, strict=True)
        errors = (error.times(sqrt(covariance.scale)) for covariance, error in pairs)
        shape = (len(covariances) * len(self.updates[0]), self.d_in)
        return RankRule(rtol, Rounding.together(errors), shape=shape)


def default_cut_off(d_in: int) -> float:
    """Return d_in · 1.2e-7, eps of float32: the cut-off of ACTMat's published code, which uses float32."""
    return d_in * torch.finfo(torch.float32).eps


def active_experts(group: LinearGroup) -> Active:
    """Drop zero updates and scale the remaining weights to mean 1.

    Scaling all weights together must change nothing, but ridges do not scale with the weights.
    """
    norms = [norm(update) for update in group.updates]
    used = [t for t, size in enumerate(norms) if size > 0.0]
    mean = fmean(group.weights[t] for t in used) if used else 1.0
    return Active(
        updates=tuple(group.updates[t] for t in used),
        weights=tuple(group.weights[t] / mean for t in used),
        norms=tuple(norms[t] for t in used),
        rounding=tuple(group.rounding[t] for t in used) if group.rounding else (EXACT,) * len(used),
        unchanged=len(norms) - len(used),
        d_in=group.shape[1],
    )


def solve_ridge(
    normal: NormalEquations, prior_row: Tensor | None = None, ones: Tensor | None = None
) -> tuple[Tensor, Cholesky]:
    """Return (Σ R_tC_t)(Σ C_t + 𝟏cᵀ)⁻¹ by one Cholesky, and the factor; the prior is one more row.

    `ones` is 𝟏 in the coordinates of the layer's inputs; None: a vector of ones. The sums are overwritten.
    """
    factor = factorize(normal.gram, ridge=normal.ridge)
    solved = normal.lift(factor.solve_right_(normal.numerator))
    if prior_row is not None:
        solved_row = normal.lift(factor.solve_right(prior_row.unsqueeze(0)))
        add_rank_one_(solved, solved_row[0], ones)
    return solved, factor


def solve_pinv(normal: NormalEquations, rule: RankRule) -> tuple[Tensor, int, str]:
    """Return (Σ R_tC_t)(Σ C_t)†, the rank of Σ C_t and the solver; see `covmerge.maths.linalg.pinv`."""
    solved, rank, solver = cut_off_right(normal.gram, normal.numerator, rule)
    return normal.lift(solved), rank, solver


def solve_cut_off(
    active: Active, covariances: Sequence[Covariance], rtol: float | None
) -> tuple[Tensor, CutOff]:
    """Return (Σ R_tC_t)(Σ C_t)† at the cut-off `rtol`, or that of `active`, and the diagnostics.

    Where the cut-off removes nothing, as on most layers, a Cholesky factorisation is exact; it is done in
    float32 unless Σ C_t is badly conditioned. Otherwise the cut-off decides the result, and sums and
    eigenproblem, or projector, are computed in float64.
    """
    rule = active.cut_off(covariances, rtol)
    normal = normal_equations(covariances)
    solved = solve_full_rank(normal.gram, normal.numerator, rule)
    if solved is None and normal.gram.dtype != torch.float64:
        del normal
        normal = normal_equations([replace(covariance, exact=True) for covariance in covariances])
        solved = solve_full_rank(normal.gram, normal.numerator, rule)
    diagnostics = CutOff(normal.route, rule.rtol, unchanged=active.unchanged)
    if solved is None:
        lifted, rank, solver = solve_pinv(normal, rule)
        return lifted, replace(diagnostics, rank=rank, solver=solver)
    bits = torch.finfo(solved.dtype).bits
    return normal.lift(solved), replace(
        diagnostics, rank=len(normal.gram), solver=f"cholesky{bits}"
    )


def stack_average(group: LinearGroup) -> Tensor:
    """Return Σ w_tΔ_t / Σ w_t `(d_out, d_in)`, for layers where data do not distinguish inputs."""
    total = sum(group.weights)
    return stack_weighted(group.updates, [weight / total for weight in group.weights])


def stack_weighted(
    values: Sequence[Tensor], weights: Sequence[float], *, dtype: torch.dtype | None = None
) -> Tensor:
    """Return Σ_t w_t · values_t in their dtype or in `dtype`, without a stacked copy."""
    total = values[0].to(dtype or values[0].dtype) * weights[0]
    for value, weight in zip(values[1:], weights[1:], strict=True):
        total.add_(value, alpha=weight)
    return total
