"""Arcee Fusion: only the expert's most important changes are added to the base."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np
import torch
from torch import Tensor

from covmerge.base.types import LinearGroup
from covmerge.maths.methods.arithmetic import ArithmeticParameter, inputs_of
from covmerge.maths.methods.gathered import Made, TensorInBlocks, one_buffer
from covmerge.maths.methods.registry import (
    AXIS_BOUND_UP_TO_BOUNDS,
    AnyRows,
    EntryCost,
    Groups,
    Parameters,
    PerEntry,
    TensorPass,
    register,
)

_EPS = 1e-8
_OUTLYING = 1.5  # threshold in interquartile ranges above the median


def _tensor_pass(groups: Groups, shape: Sequence[int], parameters: Parameters) -> AnyRows:
    whole = TensorInBlocks(groups, prod(shape), parameters["arithmetic"])
    importances = Made((0,), lambda part, base, models: _importance(base, models[0]))
    (found,) = whole.gathered([importances])
    return AnyRows(_least(found))


@register(
    "arcee_fusion",
    equation="W̄ = W₀ + Δ ⊙ [I ≥ median I + 1.5 (Q₃ − Q₁)],  I = |Δ| · KL(softmax W_1 ‖ softmax W₀) by rows",
    laws=AXIS_BOUND_UP_TO_BOUNDS.copies_give(None, "its most important entries"),
    cost=EntryCost(PerEntry(copies=1), PerEntry(60, copies=6, bytes=8)),
    unit="tensor",
    tensor_pass=TensorPass(
        # The importances, and their copy that is partitioned.
        _tensor_pass,
        lambda parameters: 2 * one_buffer(parameters["arithmetic"]),
    ),
    sees="weights",
    experts=(1, 1),
)
def arcee_fusion(group: LinearGroup, *, arithmetic: ArithmeticParameter = "float32") -> Tensor:
    """Take over the expert's entries whose importance is far above the tensor's median.

    I = |W_1 − W₀| · Σ p log(p/q) along the last axis, p = softmax W_1 + 1e-8, q = softmax W₀ + 1e-8;
    W̄ = W₀ + (W_1 − W₀) ⊙ [I ≥ median + 1.5 (Q₃ − Q₁)], quartiles by rank, rounded down

    Args:
        group: one model of any shape beside the base; a scalar is a row of one entry.
        arithmetic: dtype that the inputs are cast to, and that each operation rounds to. The divergence
            of rows that changed little is rounding, so the result depends on this dtype.

    Departs from the paper: there is none; this is mergekit's result for up to a million entries. For more
    entries mergekit takes quartiles of a million random ones, which change from run to run; here they are
    the quartiles of all entries.

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
    important = _importance(base, model)
    (least,) = group.known or (_least(important),)
    change = model - base
    taken = important >= least
    # At least float32, the dtype of mergekit's mask.
    wide = torch.promote_types(base.dtype, torch.float32)
    return (base + change * taken.to(wide)).to(group.models[0].dtype)


def _importance(base: Tensor, model: Tensor) -> Tensor:
    """Return I of every entry; it depends on the entry's row alone."""
    rows, start = (x if x.dim() else x.view(1) for x in (model, base))
    p, q = (torch.softmax(x, dim=-1) + _EPS for x in (rows, start))
    apart = (p * torch.log(p / q)).sum(dim=-1, keepdim=True)
    return (model - base).abs() * apart.view((*base.shape[:-1], 1) if base.dim() else ())


def _least(important: Tensor) -> Tensor:
    """Return the threshold of an entry's importance, from the importances of all, in their dtype."""
    shares = torch.tensor([0.25, 0.5, 0.75])
    places = [int(share) for share in shares * (important.numel() - 1)]
    exact = torch.promote_types(important.dtype, torch.float32)  # NumPy has no bfloat16
    values = np.partition(important.reshape(-1).to(exact).cpu().numpy(), places)[places]
    low, middle, high = torch.as_tensor(values, dtype=important.dtype, device=important.device)
    return middle + _OUTLYING * (high - low)
