"""Arcee Fusion: the expert's most important changes alone."""

from __future__ import annotations

import torch
from torch import Tensor

from covmerge.linalg.auto import Cost
from covmerge.methods.arithmetic import ArithmeticParameter, inputs_of
from covmerge.methods.registry import Laws, register
from covmerge.types import LinearGroup

_EPS = 1e-8
_OUTLYING = 1.5  # interquartile ranges above the median
_SORTED = 1_000_000  # entries up to which quartiles are those of all


def _cost(d_out: int, d_in: int, count: int, itemsize: int) -> Cost:
    size = d_out * d_in
    return Cost(60.0 * size, size * ((count + 6) * itemsize + 8))


@register(
    "arcee_fusion",
    equation="W̄ = W₀ + Δ ⊙ [I ≥ median I + 1.5 (Q₃ − Q₁)],  I = |Δ| · KL(softmax W_1 ‖ softmax W₀) by rows",
    laws=Laws(
        order_invariant=True,
        scale_equivariant=None,  # but for absolute bounds, which usual updates may not reach
        rotation_equivariant=False,
        replicas=lambda parameters, count: None,
        replicas_text="its most important entries",
    ),
    cost=_cost,
    unit="tensor",
    sees="weights",
    experts=(1, 1),
)
def arcee_fusion(group: LinearGroup, *, arithmetic: ArithmeticParameter = "float32") -> Tensor:
    """Take over the entries whose importance is far above that of the tensor's median.

    I = |W_1 − W₀| · Σ p log(p/q) along the last axis, p = softmax W_1 + 1e-8, q = softmax W₀ + 1e-8;
    W̄ = W₀ + (W_1 − W₀) ⊙ [I ≥ median + 1.5 (Q₃ − Q₁)], quartiles by rank, rounded down

    Args:
        group: one model of any shape beside the base; a scalar is a row of one entry.
        arithmetic: dtype that the inputs are cast to, and that each operation rounds to. Rows that
            changed little have a divergence that is rounding, so that it is named whatever computes.

    Departs from the paper: there is none; it is bit for bit mergekit's up to a million entries. Of more
    it takes quartiles of a million random ones, which change from run to run; here of all.

    Example:
        >>> import torch
        >>> model = torch.tensor([[0.1, 0.0, 0.0, 0.0], [0.0, 0.1, 5.0, 0.1]])
        >>> group = LinearGroup((), (1.0,), base=torch.zeros(2, 4), models=(model,))
        >>> arcee_fusion(group).tolist()
        [[0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 5.0, 0.0]]
    """
    base, (model,) = inputs_of(group, arithmetic)
    if not base.numel():
        return group.models[0].clone()
    change = model - base
    rows, start = (x if x.dim() else x.view(1) for x in (model, base))
    p, q = (torch.softmax(x, dim=-1) + _EPS for x in (rows, start))
    important = change.abs() * (p * torch.log(p / q)).sum(dim=-1, keepdim=True).view(
        (*base.shape[:-1], 1) if base.dim() else ()
    )
    ordered = important.reshape(-1).sort().values
    shares = torch.tensor([0.25, 0.5, 0.75], device=base.device)
    low, middle, high = ordered[(shares * (len(ordered) - 1)).long()]
    taken = important >= middle + _OUTLYING * (high - low)
    # In float32 at least, where mergekit's mask of ones is.
    wide = torch.promote_types(base.dtype, torch.float32)
    return (base + change * taken.to(wide)).to(group.models[0].dtype)
