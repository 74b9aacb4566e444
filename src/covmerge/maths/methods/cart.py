"""CART: the average of the models plus their low-rank residuals."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from covmerge.base.types import LinearGroup, Merged
from covmerge.maths.linalg.auto import Cost, leading_cost
from covmerge.maths.linalg.spectral import RankRule, leading_svd, rank_tolerance
from covmerge.maths.methods.closed_form import stack_weighted
from covmerge.maths.methods.registry import EQUIVARIANT, Reference, register


def _cost(d_out: int, d_in: int, count: int, itemsize: int, *, rank_ratio: float = 0.12) -> Cost:
    matrix, side = d_out * d_in, min(d_out, d_in)
    k = max(1, int(rank_ratio * side))
    each = leading_cost(d_out, d_in, k, itemsize)
    # Average, residual and scaled U_k; equal singular values may make k as large as the side.
    held = (2 * matrix + (2 * d_out + d_in) * side) * itemsize
    return (each + Cost(2.0 * matrix * (k + 1), held)).times(count)


@register(
    "cart",
    equation="W̄ = W₀ + Δ̄ + λ Σ w_t SVD_k(Δ_t − Δ̄),  Δ̄ = Σ w_t Δ_t / T",
    reference=Reference(
        title="Revisiting Weight Averaging for Model Merging",
        venue="arXiv 2024",
        arxiv="2412.12153",
        equations="CART",
    ),
    laws=EQUIVARIANT.copies_give(1.0, "the expert"),
    cost=_cost,
    factored="both",
    published_tuning="λ and the rank ratio, per number of tasks: (2.0, 0.12) for 8 tasks, "
    "(1.5, 0.16) for 14, (1.9, 0.32) for 20",
)
def cart(
    group: LinearGroup,
    *,
    rank_ratio: Annotated[
        float, Field(gt=0, le=1, description="k over min(d_out, d_in); k is at least 1")
    ] = 0.12,
    scale: Annotated[float, Field(description="λ, factor of the low-rank residuals")] = 2.0,
) -> Merged:
    """Average the models and add the low-rank parts of their distances from the average.

    W̄ = W₀ + Δ̄ + λ Σ_t w_t SVD_k(Δ_t − Δ̄),  Δ̄ = Σ w_t Δ_t / T  (CART)

    Each residual is truncated before the sum. Untruncated residuals sum to zero, and λ would do nothing.

    Args:
        group: updates `(d_out, d_in)`; weights, scaled to mean 1, are those of the average and multiply
            the residuals, so that untruncated residuals still sum to zero.
        rank_ratio: k = max(1, ⌊rank_ratio · min(d_out, d_in)⌋).

    Departs from the paper: the published code merges only tensors named attn or mlp in this way; here a
    recipe says which. All singular values that equal the k-th are kept, because their order is arbitrary.

    Example:
        >>> import torch
        >>> d = torch.diag(torch.tensor([2.0, 0.0]))
        >>> group = LinearGroup((d, torch.zeros(2, 2)), weights=(1.0, 1.0))
        >>> cart(group).delta.round().tolist()
        [[1.0, 0.0], [0.0, 0.0]]
    """
    updates, count = group.updates, len(group.updates)
    mean_weight = sum(group.weights) / count
    weights = [weight / mean_weight for weight in group.weights]
    average = stack_weighted(updates, [weight / count for weight in weights])
    k = max(1, int(rank_ratio * min(group.shape)))
    rtol = rank_tolerance(group.shape, group.updates[0].dtype, None, group.rounding)
    merged = average.clone()
    for update, weight in zip(updates, weights, strict=True):
        top = leading_svd(update - average, k, RankRule(rtol))
        merged.addmm_(top.left * top.leading.to(merged.dtype), top.right, alpha=scale * weight)
    return Merged(merged, {"k": k})
