"""Singular value calibration: directions that several experts share no longer count several times."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from covmerge.base.types import LinearGroup, Merged
from covmerge.maths.linalg.auto import Cost, svd_cost
from covmerge.maths.linalg.lapack import norm
from covmerge.maths.linalg.spectral import RankRule, TruncatedSvd, sizes_of_equals, truncated_svd
from covmerge.maths.methods.registry import EQUIVARIANT, Reference
from covmerge.maths.methods.resolution import resolution
from covmerge.maths.steps.registry import register_step

# Rounding of stored weights has the same energy along every direction, within a few per cent.
_MOSTLY = 1.5


def _cost(d_out: int, d_in: int, count: int, itemsize: int) -> Cost:
    side = min(d_out, d_in)
    products = Cost(2.0 * (count + 1) * side * d_out * d_in, 3 * side * d_in * 8)
    return svd_cost(d_out, d_in, side, itemsize) + products


@register_step(
    "svc",
    when="after",
    equation="σ_r ← σ_r · T / Σ_t max(α, s_r^t),  s_r^t = ⟨u_rᵀΔ, u_rᵀΔ_t⟩ / ‖u_rᵀΔ_t‖²,  "
    "Δ = W̄ − W₀ = Σ_r σ_r u_r v_rᵀ",
    reference=Reference(
        title="When Shared Knowledge Hurts: Spectral Over-Accumulation in Model Merging",
        venue="arXiv 2026",
        arxiv="2602.05536",
        equations="Algorithm 1, as FusionBench has it (`singular_value_calibration`)",
    ),
    laws=EQUIVARIANT,
    cost=_cost,
    factored="both",
)
def svc(
    group: LinearGroup,
    merged: Merged,
    *,
    alpha: Annotated[
        float,
        Field(
            gt=0.0,
            description="α, what an expert counts at least; no direction grows more than 1/α-fold",
        ),
    ] = 0.1,
) -> Merged:
    """Calibrate the merged update's singular values by the share of each expert that they carry.

    If the merged update in direction u_r is just expert t's update there, s_r^t is 1. It is larger if
    other experts add to it, and smaller if it was averaged away. The direction is divided by the mean of
    the s_r^t over the experts; the experts' weights have no effect. An expert with a small part in u_r,
    where others have large ones, has a large s_r^t of either sign; if it is positive, the direction
    nearly vanishes. An expert with a far smaller norm than the others has such an s_r^t in every
    direction.

    FusionBench's configurations set α to 0.1 after means, sums, TIES, DARE and Iso-C, to 0.2 after Iso-CTS,
    and to 1 after TSV-Merge and WUDI, without saying how these values were chosen.

    Args:
        group: the experts' updates before all steps, `(d_out, d_in)`.
        merged: the method's result.

    Departs from the paper: T counts the experts that changed the layer. An expert with nothing but
    rounding in direction u_r, of the computation or of its stored weights, counts α there (published:
    0/0, or rounding divided by its square). Directions of equal singular values, which may be rotated
    into each other, are calibrated as one. Directions beyond the numerical rank stay as they are.

    Example:
        >>> import torch
        >>> a, b = torch.diag(torch.tensor([1.0, 0.0])), torch.diag(torch.tensor([1.0, 1.0]))
        >>> merged = Merged(a + b)  # the first direction twice
        >>> svc(LinearGroup((a, b), (1.0, 1.0)), merged, alpha=1.0).delta.tolist()
        [[1.0, 0.0], [0.0, 1.0]]
    """
    delta = merged.delta
    known = resolution(group, None)
    changed = known.changed(group)
    top = truncated_svd(delta, min(delta.shape), RankRule(known.rtol))
    if not changed or not top.rank:
        return merged
    sizes = sizes_of_equals(top.leading)
    total = top.leading.new_zeros(len(sizes))
    for update, _, rule in changed:
        rounding = _MOSTLY * rule.rounding.energy / group.shape[0]
        nothing = max((known.rtol * norm(update)) ** 2, rounding)
        total += _carried(top, update, sizes, nothing).clamp_min(alpha)
    gains = torch.repeat_interleave(len(changed) / total, torch.tensor(sizes, device=total.device))
    if top.rank == min(delta.shape):
        # The directions span everything. Computing the result as a change of Δ would lose all digits of
        # the rest of a merged update that one huge expert dominates.
        sigma = (top.leading * gains).to(delta.dtype)
        return replace(merged, delta=(top.left * sigma) @ top.right)
    change = (top.leading * (gains - 1.0)).to(delta.dtype)
    return replace(merged, delta=delta + (top.left * change) @ top.right)


def _carried(top: TruncatedSvd, update: Tensor, sizes: list[int], nothing: float) -> Tensor:
    """Return s_r of one expert, float64, per group of equal singular values; 0 where it has `nothing`."""
    along = (top.left.mT @ update).to(torch.float64)
    shared = top.leading * (top.right * along).sum(1)
    shared, energy = (
        torch.stack([part.sum() for part in torch.split(values, sizes)])
        for values in (shared, along.square().sum(1))
    )
    has = energy > nothing * energy.new_tensor(sizes)
    return torch.where(has, shared / torch.where(has, energy, 1.0), 0.0)
