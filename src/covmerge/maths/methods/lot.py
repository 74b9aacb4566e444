"""LOT Merging: the task vector with the least feature drift, layer by layer."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field

from covmerge.base.types import LinearGroup, Merged
from covmerge.maths.covariance.measured import measured_equations, measured_equations_cost
from covmerge.maths.linalg.auto import FLOAT64, Cost, eigh_cost
from covmerge.maths.linalg.spectral import RankRule
from covmerge.maths.methods.closed_form import default_cut_off, solve_pinv
from covmerge.maths.methods.registry import EQUIVARIANT, Reference, register


def _cost(d_out: int, d_in: int, count: int, itemsize: int) -> Cost:
    del itemsize  # float64 throughout
    sums = measured_equations_cost(d_out, d_in, count, 8)
    back = Cost(FLOAT64 * 4.0 * d_out * d_in * d_in, 2 * d_out * d_in * 8)
    return sums.times(FLOAT64) + eigh_cost(d_in) + back


@register(
    "lot",
    equation="W̄ = W₀ + (Σ Δ_t G_t)(Σ G_t)†,  G_t = E[z zᵀ]",
    reference=Reference(
        title="Towards Minimizing Feature Drift in Model Merging: Layer-wise Task Vector Fusion "
        "for Adaptive Knowledge Integration",
        venue="NeurIPS 2025",
        arxiv="2505.23859",
        equations="Eq. 9",
    ),
    laws=EQUIVARIANT.copies_give(1.0, "the expert, on the inputs that the data has seen"),
    cost=_cost,
    data="gram",
)
def lot(
    group: LinearGroup,
    *,
    rtol: Annotated[
        float | None,
        Field(
            ge=0,
            lt=1,
            description="cut-off of the pseudo-inverse, relative to the largest eigenvalue of ΣG_t; "
            "by default d_in · 1.2e-7, as in `actmat`",
        ),
    ] = None,
) -> Merged:
    """Merge one linear layer so that its outputs drift least from every expert's.

    W̄ = W₀ + (Σ w_t Δ_t G_t)(Σ w_t G_t)†,  G_t = E[z zᵀ]  (LOT Merging, Eq. 9)

    This is the minimiser of Σ w_t E‖(W̄ − W_t) z‖² with the least norm. Few samples suffice: along inputs
    that no data has, W₀ stays as it is. It is RegMean without shrinkage, and well posed for every rank. An
    expert whose update is zero keeps its Gram matrix in the sums.

    Args:
        group: updates `(d_out, d_in)` with measured Gram matrices `(d_in, d_in)`; a weight
            multiplies its expert's Gram matrix.

    Raises:
        RecipeError: an expert has no Gram matrix.
        TensorError: a Gram matrix has another shape.

    Departs from the paper: the scales of normalisation layers, which the paper weights by feature norms,
    are averaged. Its code is not published; the linear layers are merged as by ACTMat's RegMean, in
    float64.

    Example:
        >>> import torch
        >>> from covmerge.base.types import Measured
        >>> seen = Measured(torch.diag(torch.tensor([4.0, 0.0])), rows=1, total=4.0)
        >>> group = LinearGroup((torch.ones(1, 2),), (1.0,), expert_statistics=(seen,))
        >>> merged = lot(group)
        >>> merged.delta.tolist(), merged.stats["rank"]
        ([[1.0, 0.0]], 1)
    """
    grams = [measured.value for measured in group.expert_statistics]
    normal = measured_equations(group.updates, grams, group.weights, dtype=torch.float64)
    cutoff = default_cut_off(len(grams[0])) if rtol is None else rtol
    merged, rank, _ = solve_pinv(normal, RankRule(cutoff))
    return Merged(merged.to(group.updates[0].dtype), {"rank": rank, "rtol": cutoff})
