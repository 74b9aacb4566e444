"""ASWUDI and SWUDI: WUDI's minimum along the most important inputs, the start along the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil, nan
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from covmerge.base.diagnostics import Diagnostics, Summary
from covmerge.base.types import LinearGroup, Merged
from covmerge.maths.covariance.normal import normal_equations
from covmerge.maths.linalg.auto import Cost, pinv_cost
from covmerge.maths.linalg.pinv import kept_eigenpairs
from covmerge.maths.linalg.spectral import with_equals
from covmerge.maths.methods.closed_form import active_experts, stack_weighted
from covmerge.maths.methods.registry import EQUIVARIANT, Parameters, Reference, register
from covmerge.maths.methods.summaries import UNCHANGED

# Rounding must not turn a count that is a whole number into the next one.
_WHOLE = 1e-9

Start = Annotated[
    Literal["sum", "mean"],
    Field(description="Θ₀, which stays where no direction is solved: ΣΔ_t or its mean"),
]
Scale = Annotated[float, Field(ge=0, description="factor on the merged update")]
CutOffAt = Annotated[
    float | None,
    Field(
        ge=0,
        lt=1,
        description="eigenvalues of ΣĈ_t at or below `rtol` times the largest count as zero; by "
        "default d_in · 1.2e-7, as in `actmat`",
    ),
]


@dataclass(frozen=True)
class FilterDiagnostics(Diagnostics):
    """ASWUDI's and SWUDI's diagnostics of one matrix."""

    summaries: ClassVar[tuple[Summary, ...]] = (UNCHANGED,)

    unchanged: int = 0  # the number of experts that did not change the matrix
    # primal or dual sums; this and the following fields are None if no expert changed the matrix
    route: str | None = None
    rank: int | None = None  # the number of eigenvalues of ΣĈ_t above the cut-off
    k: int | None = None  # the number of directions along which the minimum is taken


def _cost(d_out: int, d_in: int, count: int, itemsize: int) -> Cost:
    # Θ₀, its residual, and one update in float64, which is a copy if the update is float32.
    copies = 3 if itemsize == 8 else 4
    return pinv_cost(d_out, d_in, count) + Cost(0.0, copies * d_out * d_in * 8)


def _replicas(parameters: Parameters, count: int) -> float:
    alike = count == 1 or parameters["start"] == "mean"
    return float(parameters["scale"]) if alike else nan


_LAWS = EQUIVARIANT.copies_give(
    _replicas,
    "the expert, if `start` is the mean; from the sum, T times it beyond the K directions",
)
_REFERENCE = Reference(
    title="Closed-Form Spectral Regularization for Multi-Task Model Merging",
    venue="arXiv 2026",
    arxiv="2606.07289",
    equations="SWUDI and SWUDI-A, which its code calls ASWUDI",
)


@register(
    "aswudi",
    equation="W̄ = W₀ + Θ₀(I − Q_KQ_Kᵀ) + D Q_KΛ_K⁻¹Q_Kᵀ,  D = ΣΔ_tĈ_t,  ΣĈ_t = QΛQᵀ,  "
    "Ĉ_t = Δ_tᵀΔ_t / ‖Δ_t‖²,  K = ⌈(Σ√λ)² / Σλ⌉",
    reference=_REFERENCE,
    laws=_LAWS,
    cost=_cost,
    factored="both",
    diagnostics=FilterDiagnostics,
    published_tuning="the scale of two multimodal models, 0.2 and 0.1; nothing elsewhere",
)
def aswudi(
    group: LinearGroup, *, start: Start = "sum", scale: Scale = 1.0, rtol: CutOffAt = None
) -> Merged:
    """Merge one linear layer by WUDI's minimum along as many directions as the spectrum's weight fills.

    W̄ = W₀ + λ (Θ₀(I − Q_KQ_Kᵀ) + D Q_KΛ_K⁻¹Q_Kᵀ),  D = Σ w_t Δ_tĈ_t,  Σ w_t Ĉ_t = QΛQᵀ,
    Ĉ_t = Δ_tᵀΔ_t / ‖Δ_t‖²_F,  K = ⌈(Σ√λ_i)² / Σλ_i⌉  (ASWUDI, rule `participation_sqrt`)

    With Θ₀ = 0 and all directions this is `wudi`. K is the number of equal singular values that would
    have the same ratio of ℓ₁ and ℓ₂ norm.

    Args:
        group: updates `(d_out, d_in)`; a weight multiplies its expert's covariance and its part of Θ₀
            (weights are scaled to mean 1 first).

    Departs from the paper: eigenvalues below the cut-off are no directions, and do not count in K
    (published: each counts as 1e-8, so K grows with the layer's width, and adapters would not merge alike
    on their factors). All eigenvalues that equal the K-th are kept. An expert that did not change the
    layer is left out of the sums.

    Example:
        >>> d = torch.tensor([[1.0, 2.0], [3.0, 5.0]])
        >>> group = LinearGroup((d, d), weights=(1.0, 1.0))
        >>> torch.allclose(aswudi(group, start="mean").delta, d)
        True
    """

    def keep_most(values: Tensor) -> tuple[int, Tensor]:
        if not len(values):  # the updates are at most rounding of the stored weights
            return 0, values
        count = ceil(float(values.sqrt().sum()) ** 2 / float(values.sum()) - _WHOLE)
        k = with_equals(values.sqrt(), min(count, len(values)))
        return k, torch.ones_like(values[:k])

    return _filtered(group, keep_most, start=start, scale=scale, rtol=rtol)


@register(
    "swudi",
    equation="W̄ = W₀ + Θ₀ − Θ₀QhQᵀ + D Q(h/Λ)Qᵀ,  h = 1[k ≤ K](1 − e^(−tλ)),  D = ΣΔ_tĈ_t,  "
    "ΣĈ_t = QΛQᵀ,  Ĉ_t = Δ_tᵀΔ_t / ‖Δ_t‖²",
    reference=_REFERENCE,
    laws=_LAWS,
    cost=_cost,
    factored="both",
    diagnostics=FilterDiagnostics,
    published_tuning="t and the ratio, by a grid per model: (1300, 0.65) for ViT-B/32, (1800, 0.65) for "
    "B/16, (300, 0.85) for Llama-3.2-3B; the scale as of `aswudi`",
)
def swudi(
    group: LinearGroup,
    *,
    time: Annotated[
        float, Field(gt=0, description="t, how long the gradient is followed")
    ] = 1300.0,
    rank_ratio: Annotated[float, Field(gt=0, le=1, description="K as a share of d_in")] = 0.65,
    start: Start = "sum",
    scale: Scale = 1.0,
    rtol: CutOffAt = None,
) -> Merged:
    """Merge one linear layer by following WUDI's gradient for a time along the leading directions.

    W̄ = W₀ + λ (Θ₀ − Θ₀QhQᵀ + D Q(h/Λ)Qᵀ),  h_k = 1[k ≤ K](1 − e^(−tλ_k))  (SWUDI), with D, Q and Λ as in
    `aswudi`: the point that gradient flow from Θ₀ reaches at time t.

    Args:
        group: updates `(d_out, d_in)`; weights as in `aswudi`.
        time: t; the default is that of the published code, as is that of the ratio.
        rank_ratio: K = ⌈ratio · d_in⌉.

    Departs from the paper: eigenvalues below the cut-off are no directions. All eigenvalues that equal
    the K-th are kept. An expert that did not change the layer is left out of the sums.

    Example:
        >>> d = torch.tensor([[1.0, 2.0], [3.0, 5.0]])
        >>> group = LinearGroup((d, d), weights=(1.0, 1.0))
        >>> torch.allclose(swudi(group, start="mean").delta, d)
        True
    """

    def follow(values: Tensor) -> tuple[int, Tensor]:
        k = with_equals(values.sqrt(), min(ceil(rank_ratio * group.shape[1] - _WHOLE), len(values)))
        return k, -torch.expm1(-time * values[:k])

    return _filtered(group, follow, start=start, scale=scale, rtol=rtol)


def _filtered(
    group: LinearGroup,
    choose: Callable[[Tensor], tuple[int, Tensor]],
    *,
    start: str,
    scale: float,
    rtol: float | None,
) -> Merged:
    """Return Θ₀ + (D − Θ₀ΣĈ_t) Q (h/Λ) Qᵀ; `choose` gives K and h for the eigenvalues, descending."""
    first = group.updates[0]
    active = active_experts(group)
    diagnostics = FilterDiagnostics(active.unchanged)
    if not active.updates:
        return Merged(torch.zeros_like(first), diagnostics)
    covariances = active.unit_grams(exact=True)
    normal = normal_equations(covariances)
    values, vectors = kept_eigenpairs(normal.gram, active.cut_off(covariances, rtol))
    values, vectors = values.flip(0), vectors.flip(1)
    k, filtered = choose(values)

    theta = stack_weighted(active.updates, active.weights, dtype=torch.float64)
    if start == "mean":
        theta /= len(active.updates)
    # Coordinates of D − Θ₀ΣĈ_t, the residual of the normal equations at Θ₀.
    residual = normal.numerator.sub_(normal.image(theta))
    along = vectors[:, :k]
    coordinates = (residual @ along).mul_(filtered / values[:k])
    theta += normal.lift(coordinates @ along.mT)
    diagnostics = replace(diagnostics, route=normal.route, rank=len(values), k=k)
    return Merged(theta.mul_(scale).to(first.dtype), diagnostics)
