"""ACTMat: RegMean's solution with the Gram matrices of the updates instead of those of data."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field

from covmerge.base.types import LinearGroup, Merged
from covmerge.maths.covariance.estimate import Covariance
from covmerge.maths.linalg.auto import Cost, pinv_cost
from covmerge.maths.methods.closed_form import CutOff, active_experts, solve_cut_off
from covmerge.maths.methods.registry import EQUIVARIANT, Reference, register


def _cost(d_out: int, d_in: int, count: int, itemsize: int) -> Cost:
    # The cost of layers where the cut-off removes eigenvalues; the other layers cost less.
    del itemsize  # always float64
    return pinv_cost(d_out, d_in, count)


@register(
    "actmat",
    equation="W̄ = W₀ + (Σ Δ_t C_t)(Σ C_t)†,  C_t = Δ_tᵀΔ_t",
    reference=Reference(
        title="Model Merging via Data-Free Covariance Estimation",
        authors=(
            "Marawan Gamal Abdel Hameed",
            "Derek Tam",
            "Pascal Jr Tikeng Notsawo",
            "Colin Raffel",
            "Guillaume Rabusseau",
        ),
        venue="ICML 2026 workshop",
        arxiv="2604.01329",
        equations="Eq. 3, Theorem 3.1",
    ),
    laws=EQUIVARIANT.copies_give(1.0, "the expert (up to directions below the cut-off)"),
    cost=_cost,
    factored="both",
    diagnostics=CutOff,
)
def actmat(
    group: LinearGroup,
    *,
    rtol: Annotated[
        float | None,
        Field(
            ge=0,
            lt=1,
            description="cut-off of the pseudo-inverse, relative to the largest eigenvalue of ΣC_t; "
            "by default d_in · 1.2e-7, the published code's in float32, and what rounding of the stored "
            "weights gives",
        ),
    ] = None,
) -> Merged:
    """Merge one linear layer by least interference, with covariances estimated from the updates.

    W̄ = W₀ + (Σ w_t Δ_t C_t)(Σ w_t C_t)†,  C_t = Δ_tᵀΔ_t  (ACTMat, Eq. 3)

    Args:
        group: updates `(d_out, d_in)`; a weight multiplies its expert's covariance.
        rtol: eigenvalues of ΣC_t at or below `rtol` times the largest count as zero. This constant decides
            the result, because directions of tiny joint energy are divided by their eigenvalue.

    Departs from the paper: Eq. 3 has W_t in the numerator, which loses W₀ outside the span of the
    updates; as in the published code, differences are merged and added to W₀. Where the cut-off removes
    eigenvalues, sums and eigenproblem are computed in float64. Elsewhere the pseudo-inverse is the inverse,
    computed by Cholesky, in float32 if that agrees with float64 to 1e-5.

    Example:
        >>> import torch
        >>> d = torch.tensor([[1.0, 2.0], [3.0, 5.0]])
        >>> merged = actmat(LinearGroup((d, torch.zeros(2, 2)), weights=(1.0, 1.0)))
        >>> torch.allclose(merged.delta, d), merged.stats["rank"]
        (True, 2)
    """
    dtype = group.updates[0].dtype
    active = active_experts(group)
    if not active.updates:
        return Merged(torch.zeros_like(group.updates[0]), CutOff(unchanged=active.unchanged))

    pairs = zip(active.updates, active.weights, strict=True)
    covariances = [Covariance(update, scale=weight) for update, weight in pairs]
    merged, diagnostics = solve_cut_off(active, covariances, rtol)
    return Merged(merged.to(dtype), diagnostics)
