"""Model Stock: a point between the base and the mean, chosen by the angles between the experts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from math import prod
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from covmerge.base.types import LinearGroup
from covmerge.maths.linalg.auto import Cost
from covmerge.maths.linalg.lapack import lengths
from covmerge.maths.methods.arithmetic import ArithmeticParameter, inputs_of
from covmerge.maths.methods.gathered import Made, TensorInBlocks, one_buffer
from covmerge.maths.methods.registry import (
    UP_TO_BOUNDS,
    AnyRows,
    Groups,
    Parameters,
    Reference,
    TensorPass,
    Unit,
    register,
)

_SHORT = 1e-6  # least divisor of a cosine; a smaller |1 + (N − 1)c| is a pole


def _unit(parameters: Parameters) -> Unit:
    return "row" if parameters["filter_wise"] else "tensor"


def _cost(d_out: int, d_in: int, count: int, itemsize: int) -> Cost:
    size = d_out * d_in
    return Cost(4.0 * count * count * size, (2 * count + 2) * size * itemsize)


def _tensor_pass(groups: Groups, shape: Sequence[int], parameters: Parameters) -> AnyRows:
    whole = TensorInBlocks(groups, prod(shape), parameters["arithmetic"])
    count = len(next(whole.blocks())[2])
    offsets = [Made((t,), lambda part, base, models: models[0] - base) for t in range(count)]
    products = [
        Made(pair, lambda part, base, models: (models[0] - base) * (models[1] - base))
        for pair in combinations(range(count), 2)
    ]
    sizes = [lengths(offset, axis=-1) for offset in whole.gathered(offsets)]
    return AnyRows(_share(sizes, [p.sum(dim=-1) for p in whole.gathered(products)]))


@register(
    "model_stock",
    equation="W̄ = r mean W_t + (1 − r) W₀,  r = Nc / (1 + (N − 1)c),  c = mean cos(Δ_i, Δ_j)",
    reference=Reference(
        title="Model Stock: All we need is just a few fine-tuned models",
        authors=("Dong-Hwan Jang", "Sangdoo Yun", "Dongyoon Han"),
        venue="ECCV 2024",
        arxiv="2403.19522",
        equations="the interpolation ratio of N models",
    ),
    laws=UP_TO_BOUNDS.copies_give(1.0, "the expert"),  # not exactly, because of a floor of 1e-6
    cost=_cost,
    unit=_unit,
    tensor_pass=TensorPass(
        _tensor_pass, lambda parameters: one_buffer(parameters["arithmetic"]), together=True
    ),
    sees="weights",
    weighted=False,
    experts=(2, None),
)
def model_stock(
    group: LinearGroup,
    *,
    filter_wise: Annotated[
        bool, Field(description="an angle for each row (last axis) instead of the tensor")
    ] = False,
    arithmetic: ArithmeticParameter = None,
) -> Tensor:
    """Go from the base towards the mean, less far the more the experts' updates differ.

    c = mean of ⟨Δ_i, Δ_j⟩ / max(‖Δ_i‖‖Δ_j‖, 1e-6) over pairs, r = Nc / (1 + (N − 1)c),
    W̄ = r Σ W_t / N + (1 − r) W₀  (Model Stock). If |1 + (N − 1)c| < 1e-6, W̄ = W₀.

    Updates whose norms multiply to less than 1e-6 count as further apart than they are. If c < 0, the
    result moves away from the mean, beyond the base. The experts' weights in the recipe have no effect.

    Args:
        group: two models or more of any one shape.
        filter_wise: whether each row has its own angle; a vector is one row.

    Departs from the paper: the floor of 1e-6, and the base at the pole, are mergekit's, whose result this
    is bit for bit.

    Example:
        >>> import torch
        >>> models = (torch.tensor([2.0, 0.0]), torch.tensor([1.0, 0.0]))
        >>> group = LinearGroup((), (1.0, 1.0), base=torch.zeros(2), models=models)
        >>> model_stock(group).tolist()
        [1.5, 0.0]
    """
    base, models = inputs_of(group, arithmetic)
    by_rows = filter_wise and base.dim() > 1
    start, *ends = (
        x if by_rows else x.reshape(1, -1) if filter_wise else x.reshape(-1)
        for x in (base, *models)
    )
    if group.known:
        share = group.known[0]
    else:
        offsets = [end - start for end in ends]
        sizes = [lengths(offset, axis=-1) for offset in offsets]
        share = _share(sizes, [(a * b).sum(dim=-1) for a, b in combinations(offsets, 2)])
    total = ends[0]
    for end in ends[1:]:
        total = total + end
    merged = share * (total / len(models)) + (1 - share) * start
    return merged.reshape(base.shape).to(group.models[0].dtype)


def _share(sizes: Sequence[Tensor], products: Sequence[Tensor]) -> Tensor:
    """Return r from the updates' norms and the products of pairs of updates."""
    cosines = [
        (product / (one * other).clamp(min=_SHORT)).clamp(-1, 1)
        for product, (one, other) in zip(products, combinations(sizes, 2), strict=True)
    ]
    c = torch.stack(cosines).mean(dim=0).unsqueeze(-1)
    count = len(sizes)
    below = 1 + (count - 1) * c
    pole = below.abs() < _SHORT
    share = (count * c) / torch.where(pole, torch.ones_like(below), below)
    return torch.where(pole, torch.zeros_like(share), share)
