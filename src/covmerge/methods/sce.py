"""SCE: select by variance, calculate weights by energy, erase the minority's signs."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from covmerge.linalg.auto import Cost
from covmerge.linalg.exponent import exponent_of
from covmerge.methods.arithmetic import ArithmeticParameter, inputs_of
from covmerge.methods.registry import Laws, Reference, register
from covmerge.types import LinearGroup

# Updates whose squares may leave a dtype; half precision rounds as mergekit's does.
_WIDE, _FAR = (torch.float32, torch.float64), 20
_NO_ENERGY = 1e-6  # a sum of mean squares below it: weights are uniform; the least divisor as well


def _cost(d_out: int, d_in: int, count: int, itemsize: int) -> Cost:
    size = d_out * d_in
    return Cost(40.0 * count * size, size * (itemsize * (3 * count + 3) + 8))


@register(
    "sce",
    equation="W̄ = W₀ + Σ w_t M_t Δ_t / max(Σ w_t M_t, 10⁻⁶),  w_t ∝ mean Δ_t²,  M_t = [sgn Δ_t = elected]",
    reference=Reference(
        title="FuseChat: Knowledge Fusion of Chat Models",
        venue="arXiv 2024",
        arxiv="2408.07990",
        equations="SCE: Select, Calculate, Erase",
    ),
    laws=Laws(
        order_invariant=True,
        scale_equivariant=None,  # but for absolute bounds, which usual updates may not reach
        rotation_equivariant=False,
        replicas=lambda parameters, count: 1.0,
        replicas_text="the expert",
    ),
    cost=_cost,
    unit="tensor",
    sees="weights",
)
def sce(
    group: LinearGroup,
    *,
    select_topk: Annotated[
        float,
        Field(
            ge=0,
            description="share of the entries whose variance over experts is not 0, by variance",
        ),
    ] = 1.0,
    arithmetic: ArithmeticParameter = None,
) -> Tensor:
    """Keep the entries that vary most, weigh experts by their energy, and drop the minority's signs.

    S: the ⌊k · #{var > 0}⌋ entries of largest variance over experts; w_t = mean (S Δ_t)² over their
    sum; γ = sgn Σ S Δ_t (+ where it is 0), M_t = [sgn S Δ_t = γ];
    W̄ = W₀ + Σ w_t M_t S Δ_t / max(Σ w_t M_t, 1e-6)  (SCE)

    Where Σ mean (S Δ_t)² is below 1e-6, as that of most fine-tunes is, all w_t are 1/T. Experts' own
    weights have no part in it.

    Args:
        group: models of any one shape.
        select_topk: k; 1 or more is all entries.
        arithmetic: dtype that the inputs are cast to, and that each operation rounds to.

    Departs from the paper: the two floors of 1e-6, and that the sign is elected by the sum of the
    updates, as in mergekit, of which it is the result bit for bit.

    Example:
        >>> import torch
        >>> models = (torch.tensor([3.0, 1.0]), torch.tensor([1.0, -1.0]))
        >>> group = LinearGroup((), (1.0, 1.0), base=torch.zeros(2), models=models)
        >>> [round(x, 4) for x in sce(group).tolist()]
        [2.6667, 1.0]
    """
    base, models = inputs_of(group, arithmetic)
    updates = torch.stack([model - base for model in models])
    if select_topk < 1:
        updates = updates * _most_varied(updates, select_topk)
    if not updates.numel():
        return group.models[0].clone()
    elected = (updates.sum(dim=0) >= 0).to(base.dtype) * 2 - 1
    agreed = updates.sign() == elected
    energy = updates.square().reshape(len(models), -1).mean(dim=1)
    total = float(energy.sum())
    uniform = torch.ones_like(energy) / len(models)
    shares = uniform if abs(total) < _NO_ENERGY else energy / total
    given = shares.view(-1, *[1] * base.dim()) * agreed
    merged = (updates * given).sum(dim=0) / given.sum(dim=0).clamp(min=_NO_ENERGY)
    return (base + merged).to(group.models[0].dtype)


def _most_varied(updates: Tensor, share: float) -> Tensor:
    """1 where the variance over experts is among the largest, 0 elsewhere."""
    exponent = exponent_of([updates]) if updates.dtype in _WIDE else 0
    if abs(exponent) > _FAR:
        updates = updates * 2.0**-exponent  # which changes no digit, and squares stay in the dtype
    variance = updates.var(dim=0, unbiased=False)
    kept = torch.zeros_like(variance)
    count = int(torch.count_nonzero(variance) * share)
    if count:
        kept.view(-1)[torch.topk(variance.view(-1), count).indices] = 1
    return kept
