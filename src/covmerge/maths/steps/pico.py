"""Pico: directions of the outputs that many updates share get less weight."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from covmerge.base.types import LinearGroup, LowRank
from covmerge.maths.linalg.auto import FLOAT64, Cost, svd_cost, symmetric_cost
from covmerge.maths.linalg.cholesky import factorize
from covmerge.maths.linalg.spectral import truncated_svd
from covmerge.maths.linalg.symmetric import add_gram_, mirror_
from covmerge.maths.methods.registry import EQUIVARIANT, Reference
from covmerge.maths.methods.resolution import resolution
from covmerge.maths.steps.registry import register_step


def _cost(d_out: int, d_in: int, count: int, itemsize: int) -> Cost:
    side = min(d_out, d_in)
    each = svd_cost(d_out, d_in, side, itemsize)
    sums = FLOAT64 * count * symmetric_cost(side, d_out)
    solve = d_out**3 / 3.0 + 2.0 * count * d_out * d_out * d_in
    held = d_out * d_out * (8 + 2 * itemsize)
    factors = side * (d_out + d_in) * itemsize + 2 * side * d_out * 8
    return each.times(count) + Cost(sums + solve, held + factors)


@register_step(
    "pico",
    when="before",
    equation="Δ_t ← Δ_t + U diag(α − 1) UᵀΔ_t,  α_i = 1 / (1 + (T − 1) c_i),  c_i = σ_i² / Σσ²,  "
    "[B_1 … B_T] = U diag(σ) Vᵀ,  Δ_t = B_tA_t",
    reference=Reference(
        title="Crowded in B-Space: Calibrating Shared Directions for LoRA Merging",
        venue="arXiv 2026",
        arxiv="2604.16826",
        equations="as in its code (`pico/pico.py`)",
    ),
    laws=EQUIVARIANT,
    cost=_cost,
    factored="both",
)
def pico(
    group: LinearGroup,
    *,
    factors: Annotated[
        Literal["balanced", "given"],
        Field(
            description="B_t: of the update's own singular values, or as adapters come, with their "
            "scale; where one came multiplied out, all are balanced"
        ),
    ] = "balanced",
) -> LinearGroup:
    """Shrink directions of the outputs by the share of all experts' updates that lies in them.

    A direction with a share c_i of [B_1 … B_T] is divided by 1 + (T − 1) c_i: by T if it has all of them,
    by 1 if it is empty. With M = Σ B_tB_tᵀ that is (I + (T − 1) M / Tr M)⁻¹ Δ_t, which is how it is
    computed. Updates become shorter; follow the method by `rescale`, as the published code does.

    The split of an update into B_t and A_t decides its share: an adapter with a B_t ten times as large and
    an A_t of a tenth is the same model, and counts a hundredfold. Balanced factors B_t = U_tσ_t^½ depend on
    the update alone, M = Σ (Δ_tΔ_tᵀ)^½, and exist for full models too.

    Args:
        group: updates `(d_out, d_in)`; the experts' weights have no effect.
        factors: the choice of B_t; `given` is the published one.

    Departs from the paper: factors are balanced, unless `given`; T counts the experts that changed
    the layer.

    Example:
        >>> import torch
        >>> a, b = torch.diag(torch.tensor([2.0, 0.0])), torch.diag(torch.tensor([2.0, 0.0]))
        >>> pico(LinearGroup((a, b), (1.0, 1.0))).updates[0].round(decimals=4).tolist()
        [[1.0, 0.0], [0.0, 0.0]]
    """
    changed = [t for t, update in enumerate(group.updates) if update.any()]
    if len(changed) < 2:
        return group
    known = resolution(group, None)
    like = group.updates[0]
    crowd = like.new_zeros(like.shape[0], like.shape[0], dtype=torch.float64)
    for t in changed:
        if factors == "given" and group.factors:
            left = group.factors[t].left.double()
        else:
            update = group.updates[t]
            found = truncated_svd(update, min(update.shape), known.rule(t))
            left = found.left.double() * found.leading.sqrt()
        add_gram_(crowd, left.mT)
    crowd = mirror_(crowd).mul_((len(changed) - 1) / float(crowd.diagonal().sum()))
    system = factorize(crowd.to(like.dtype), ridge=1.0)

    def shrunk(columns: Tensor) -> Tensor:
        return system.solve_right(columns.mT).mT

    return replace(
        group,
        updates=tuple(map(shrunk, group.updates)),
        factors=tuple(LowRank(shrunk(adapter.left), adapter.right) for adapter in group.factors),
    )
