"""covmerge's own method: the mean of a regression and of a flat spectrum; see `docs/auto.md`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from covmerge.base.diagnostics import Diagnostics, Summary
from covmerge.base.types import LinearGroup, Merged
from covmerge.maths.covariance.estimate import Covariance
from covmerge.maths.covariance.normal import normal_equations
from covmerge.maths.linalg.auto import Cost, solve_cost, sums_cost, svd_cost, system_choice
from covmerge.maths.linalg.lapack import norm
from covmerge.maths.linalg.metric import row_blocks
from covmerge.maths.linalg.spectral import RankRule, rank_tolerance, truncated_svd
from covmerge.maths.methods.closed_form import Active, active_experts, solve_ridge, stack_weighted
from covmerge.maths.methods.registry import EQUIVARIANT, register
from covmerge.maths.methods.resolution import of_terms
from covmerge.maths.methods.summaries import UNCHANGED, Median


@dataclass(frozen=True)
class Constants:
    """The constants of `auto`; docs/auto.md says what happens with other values."""

    # ridge of the regression, as a share of the mean eigenvalue of ΣC_t, where the mean weighs each
    # eigenvalue by its size
    ridge: float = 0.1
    # a direction of this share of the mean singular value, weighed likewise, is raised to 0.7 of
    # the others' length. Weaker directions are raised less, so that noise does not become as long
    faint: float = 0.01


CONSTANTS = Constants()


FLAT_SHARE = Median("flat_share", "h, flat share", "{numbers}, the rest is the regression")


@dataclass(frozen=True)
class AutoDiagnostics(Diagnostics):
    """`auto`'s diagnostics of one matrix."""

    summaries: ClassVar[tuple[Summary, ...]] = (FLAT_SHARE, UNCHANGED)

    unchanged: int = 0  # the number of experts that did not change the matrix
    # N, the number of experts without a common direction that are equivalent to these
    unlike_experts: float | None = None
    flat_share: float | None = None  # h, the share of the flat spectrum in the merge
    length_share: float | None = None  # s, the factor on the length of the merge
    # cosine between the updates of the regression and of the flat spectrum
    agreement: float | None = None

    def report_columns(self, experts: Sequence[str]) -> Mapping[str, str | float | None]:
        return {
            "N, unlike experts": self.unlike_experts,
            "h, flat share": self.flat_share,
            "s, length": self.length_share,
            "agreement of both parts": self.agreement,
        }


def _cost(d_out: int, d_in: int, count: int, itemsize: int) -> Cost:
    route = system_choice(d_out, d_in, count, itemsize).taken
    sums = sums_cost(route, d_out, d_in, count, itemsize)
    solve = solve_cost(route, d_out, d_in, count, itemsize)
    side, matrix = min(d_out, d_in), d_out * d_in
    products = Cost(2.0 * (side + count**2) * matrix, matrix * itemsize)
    spectrum = svd_cost(d_out, d_in, side, itemsize) + products
    return (sums + solve).then(spectrum) + Cost(0.0, 2 * matrix * itemsize)


@register(
    "auto",
    equation="W̄ = W₀ + s ((1 − h) R + h F),  R = (Σ Δ_tC_t + ρκ ΣΔ_t) (Σ C_t + ρI)⁻¹,  "
    "C_t = Δ_tᵀΔ_t / ‖Δ_t‖,  F = σ̄ U diag(σ/√(σ² + τ²)) Vᵀ,  ΣΔ_t = U diag(σ) Vᵀ,  h = ½ (1 − N⁻²),  "
    "s = e + (1 − e) ½ (1 + q)",
    laws=EQUIVARIANT.copies_give(1.0, "the expert"),
    cost=_cost,
    factored="both",
    diagnostics=AutoDiagnostics,
)
def auto(group: LinearGroup) -> Merged:
    """Merge one linear layer by the mean of a regression and of a flat spectrum.

    W̄ = W₀ + s ((1 − h) R + h F)

    R = (Σ w_tΔ_tC_t + ρκ Σ w_tΔ_t) (Σ w_tC_t + ρI)⁻¹,  C_t = Δ_tᵀΔ_t / ‖Δ_t‖  (ACTMat, Eq. 3),
    ρ = 0.1 Tr(B²) / Tr(B),  B = Σ w_tC_t,  κ = Σ w_t‖Δ_t‖² / Σ w_tw_u‖Δ_t‖‖Δ_u‖ cos²(Δ_t, Δ_u)

    F = σ̄ U diag(σ/√(σ² + τ²)) Vᵀ,  Σ w_tΔ_t = U diag(σ) Vᵀ  (Iso-C),
    τ = 0.01 Σσ²/Σσ,  σ̄ such that F's singular values add up to κΣσ

    h = ½ (1 − N⁻²),  N = (Σ w_t‖Δ_t‖)² / Σ w_tw_u‖Δ_t‖‖Δ_u‖ cos²(Δ_t, Δ_u)

    s = e + (1 − e) ½ (1 + q),  e = Σ σ/√(σ² + τ²) / min(d_out, d_in),
    q = min(1, (Σ w_t‖Δ_t‖² / Σ w_t‖Δ_t‖) / κ‖Σ w_tΔ_t‖)

    R disturbs the experts' outputs least if the updates tell of their inputs. F makes room for every
    direction that some expert needs. Each is good where the other is not, and nothing in the updates
    tells which, so they are averaged. Outside the inputs that the updates tell of, R is the sum of the
    updates. κ shortens that sum, and F, the more alike the updates are. N counts experts by how unlike
    they are: for one expert, or copies of it, N = 1, and the result is the expert. As an update goes to
    zero, both parts change continuously. e is the share of directions that F raises. If it is small, the
    merge could be as long as the sum or as long as one expert, which is q times the sum; s is the mean of
    both then.

    Args:
        group: updates `(d_out, d_in)`; a weight multiplies its expert's covariance, and its update in the
            sum. All w_t are scaled so that Σ w_t‖Δ_t‖ = Σ‖Δ_t‖.

    Returns:
        W̄ − W₀ `(d_out, d_in)`, of the updates' dtype.

    Raises:
        OverflowError: Σ w_tC_t is not finite in the updates' dtype.

    Departs from the paper: ACTMat uses Δ_tᵀΔ_t, in which a long update counts by its square, and a
        pseudo-inverse. Here ρ keeps the condition number of the system below 10 √d_in + 1, so float32 can
        solve it. Iso-C raises all directions alike; here faint ones are raised less. Neither paper has h
        and s, which are plain means of the possible values.

    Example:
        >>> d = torch.tensor([[1.0, 2.0], [3.0, 5.0]])
        >>> torch.allclose(auto(LinearGroup((d, d), weights=(1.0, 1.0))).delta, d, atol=1e-6)
        True
    """
    active = active_experts(group)
    if not active.updates:
        return Merged(torch.zeros_like(group.updates[0]), AutoDiagnostics(active.unchanged))
    alike = _Alike.of(active)
    merged = _regression(active, alike)
    share = 0.5 * (1.0 - alike.experts**-2)
    if not share:
        return Merged(merged, AutoDiagnostics(active.unchanged, alike.experts, share, 1.0))
    flat, length = _flat(active, alike, group)
    sizes = norm(merged), norm(flat)
    agreement = float(_cosines((merged, flat), sizes)[0, 1]) if all(sizes) else None
    diagnostics = AutoDiagnostics(active.unchanged, alike.experts, share, length, agreement)
    merged.mul_(length * (1.0 - share)).add_(flat, alpha=length * share)
    return Merged(merged, diagnostics)


@dataclass(frozen=True)
class _Alike:
    """The likeness of the updates, and numbers that depend on it."""

    # w_t, such that Σ w_t‖Δ_t‖ = Σ‖Δ_t‖. The weight of a zero update changes no other weight
    weights: tuple[float, ...]
    experts: float  # N
    shortening: float  # κ
    one: float  # the length of one expert, Σ w_t‖Δ_t‖² / Σ w_t‖Δ_t‖

    @classmethod
    def of(cls, active: Active) -> _Alike:
        sizes = active.norms
        given = [w * size for w, size in zip(active.weights, sizes, strict=True)]
        weights = tuple(w * sum(sizes) / sum(given) for w in active.weights)
        weighted = [w * size for w, size in zip(weights, sizes, strict=True)]
        counts = torch.tensor(weighted, dtype=torch.float64)
        alike = float(counts @ _cosines(active.updates, sizes).square() @ counts)
        energy = sum(w * size**2 for w, size in zip(weights, sizes, strict=True))
        experts = max(1.0, sum(weighted) ** 2 / alike)
        return cls(weights, experts, energy / alike, energy / sum(weighted))


def _regression(active: Active, alike: _Alike) -> Tensor:
    """Return R `(d_out, d_in)`, of the updates' dtype."""
    each = list(zip(active.updates, active.norms, alike.weights, strict=True))
    covariances = [Covariance(update, scale=w / size) for update, size, w in each]
    normal = normal_equations(covariances)
    ridge = CONSTANTS.ridge * norm(normal.gram) ** 2 / sum(active.norms)
    shares = [ridge * alike.shortening * w for w in alike.weights]
    return solve_ridge(normal.with_prior(covariances, shares, ridge))[0]


def _flat(active: Active, alike: _Alike, group: LinearGroup) -> tuple[Tensor, float]:
    """Return F `(d_out, d_in)`, in the updates' dtype, and s; 0 and 1 where all of the sum is rounding."""
    total = stack_weighted(active.updates, alike.weights)
    pairs = zip(active.rounding, alike.weights, strict=True)
    weighted = [error.times(weight) for error, weight in pairs]
    rounding = of_terms(active.updates, active.rounding, weighted)
    rtol = rank_tolerance(group.shape, total.dtype, None, group.rounding)
    top = truncated_svd(total, min(total.shape), RankRule(rtol, rounding))
    sigma = top.leading
    if not len(sigma):
        return torch.zeros_like(total), 1.0
    faint = CONSTANTS.faint * sigma.square().sum() / sigma.sum()
    raised = sigma / torch.hypot(sigma, faint)
    directions = min(1.0, float(raised.sum()) / min(group.shape))
    one = min(1.0, alike.one / (alike.shortening * norm(sigma)))
    raised *= alike.shortening * sigma.sum() / raised.sum()
    flat = (top.left * raised.to(total.dtype)) @ top.right
    return flat, directions + (1.0 - directions) * 0.5 * (1.0 + one)


def _cosines(matrices: Sequence[Tensor], sizes: Sequence[float]) -> Tensor:
    """Return cos(X_t, X_u) `(T, T)`, float64, by blocks of rows; exactly 1 for equal matrices."""
    total = torch.zeros(len(sizes), len(sizes), dtype=torch.float64, device=matrices[0].device)
    for rows in row_blocks(matrices):
        # Scaled to length 1 first, so that no product of small numbers underflows.
        each = zip(matrices, sizes, strict=True)
        block = torch.stack([matrix[rows].flatten() / size for matrix, size in each])
        total += block @ block.mT
    lengths = total.diagonal().sqrt()
    return (total / torch.outer(lengths, lengths)).cpu()
