"""ACTMat: RegMean's solution with the Gram matrices of the updates in place of data."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field

from covmerge.covariance.estimate import gram
from covmerge.covariance.normal import normal_equations
from covmerge.linalg.auto import FLOAT64, Cost, eigh_cost, normal_equations_cost, use_dual
from covmerge.methods.closed_form import active_experts, solve_pinv
from covmerge.methods.registry import Laws, Reference, register
from covmerge.types import LinearGroup, Merged


def _cost(d_out: int, d_in: int, count: int, itemsize: int) -> Cost:
    del itemsize  # float64 throughout
    side = count * d_out if use_dual(d_out, d_in, count) else d_in
    sums = normal_equations_cost(d_out, d_in, count, 8)
    copies = count * d_out * d_in * 8
    return Cost(FLOAT64 * sums.flops, sums.workspace + copies) + eigh_cost(side)


@register(
    "actmat",
    equation="W̄ = W₀ + (Σ Δ_t C_t)(Σ C_t)†,  C_t = Δ_tᵀΔ_t",
    reference=Reference(
        title="Model Merging via Data-Free Covariance Estimation",
        venue="ICML 2026 workshop",
        arxiv="2604.01329",
        equations="Eq. 3, Theorem 3.1",
    ),
    laws=Laws(
        order_invariant=True,
        scale_equivariant=True,
        rotation_equivariant=True,
        replicas=lambda parameters, count: 1.0,
        replicas_text="the expert (up to directions below the cut-off)",
    ),
    cost=_cost,
    factored="both",
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
            "by default d_in · 1.2e-7, the published code's in float32",
        ),
    ] = None,
) -> Merged:
    """Merge one linear layer by least interference under covariances read off the updates.

    W̄ = W₀ + (Σ w_t Δ_t C_t)(Σ w_t C_t)†,  C_t = Δ_tᵀΔ_t  (ACTMat, Eq. 3)

    Args:
        group: updates `(d_out, d_in)`; a weight multiplies its expert's covariance.
        rtol: eigenvalues of ΣC_t at or below `rtol` times the largest count as zero. This constant
            decides the answer: directions of tiny joint energy are divided by their eigenvalue.

    Departs from the paper: Eq. 3 has W_t in the numerator, which loses W₀ outside the span of the
    updates; as in the published code, differences are merged and added to W₀. The sums and the
    eigenproblem are computed in float64.

    Example:
        >>> import torch
        >>> d = torch.tensor([[1.0, 2.0], [3.0, 5.0]])
        >>> merged = actmat(LinearGroup((d, torch.zeros(2, 2)), weights=(1.0, 1.0)))
        >>> torch.allclose(merged.delta, d), merged.stats["rank"]
        (True, 2)
    """
    dtype = group.updates[0].dtype
    d_in = group.shape[1]
    active = active_experts(group)
    if not active.updates:
        return Merged(torch.zeros_like(group.updates[0]), {"unchanged": active.unchanged})

    covariances = [
        gram(update.to(torch.float64)).times(weight)
        for update, weight in zip(active.updates, active.weights, strict=True)
    ]
    normal = normal_equations(covariances)
    cutoff = d_in * torch.finfo(torch.float32).eps if rtol is None else rtol
    merged, rank = solve_pinv(normal, rtol=cutoff)
    stats = {"route": normal.route, "rank": rank, "rtol": cutoff, "unchanged": active.unchanged}
    return Merged(merged.to(dtype), stats)
