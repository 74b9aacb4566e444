"""Spherical interpolation between two experts, of whole tensors or vector by vector."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from covmerge.base.types import LinearGroup
from covmerge.maths.linalg.lapack import lengths
from covmerge.maths.methods.arithmetic import (
    ArithmeticParameter,
    Around,
    Weight,
    around_zero,
    inputs_of,
    weights_of,
)
from covmerge.maths.methods.gathered import Made, TensorInBlocks, one_buffer
from covmerge.maths.methods.registry import (
    SCALE_BOUND,
    AnyRows,
    EntryCost,
    Groups,
    Parameters,
    PerEntry,
    TensorPass,
    Unit,
    register,
)

_SHORT = 1e-7  # a shorter length is not divided by
_STRAIGHT = 1e-16  # 1 − cos² up to which the path is a straight line
_NO_SHARE = 1e-6  # a smaller sum of weights gives the middle


def _unit(parameters: Parameters) -> Unit:
    return "row" if parameters["by"] == "rows" else "tensor"


def _tensor_pass(groups: Groups, shape: Sequence[int], parameters: Parameters) -> AnyRows:
    whole = TensorInBlocks(groups, prod(shape), parameters["arithmetic"])

    def end(base: Tensor, model: Tensor) -> Tensor:
        return model - base if parameters["around"] == "base" else model

    ends = [Made((t,), lambda part, base, models: end(base, models[0])) for t in (0, 1)]
    first, second = (_length(vector) for vector in whole.gathered(ends))
    both = Made(
        (0, 1),
        lambda part, base, models: (end(base, models[0]) / first) * (end(base, models[1]) / second),
    )
    (product,) = whole.gathered([both])
    return AnyRows(_cosine(product))


@register(
    "nuslerp",
    equation="W̄ = sin((1 − t)θ)/sin θ W_1 + sin(tθ)/sin θ W_2,  t = w_2 / (w_1 + w_2)",
    laws=SCALE_BOUND.copies_give(1.0, "the expert"),
    cost=EntryCost(PerEntry(copies=2), PerEntry(40, copies=4)),
    unit=_unit,
    tensor_pass=TensorPass(
        _tensor_pass,
        lambda parameters: one_buffer(parameters["arithmetic"]),
        together=True,
        applies=lambda parameters: parameters["by"] == "tensor",
    ),
    sees="weights",
    stands_alone=around_zero,
    experts=(2, 2),
)
def nuslerp(
    group: LinearGroup,
    *,
    weight: Weight = 1.0,
    by: Annotated[
        Literal["tensor", "rows", "columns"],
        Field(description="what is turned: a tensor whole, its rows (last axis), or its columns"),
    ] = "tensor",
    around: Around = "zero",
    arithmetic: ArithmeticParameter = None,
) -> Tensor:
    """Go from one expert to the other along the circle that holds both.

    W̄ = sin((1 − t)θ)/sin θ W_1 + sin(tθ)/sin θ W_2, t = w_2 / (w_1 + w_2), θ the angle between W_1 and
    W_2; a straight line if 1 − cos² θ ≤ 1e-16. Around the base, W_t stands for W_t − W₀, and W₀ is added.

    Args:
        group: two models of any shape.
        weight: w_t; if they add up to 0, t is ½.

    Departs from the paper: there is none; this is mergekit's result. mergekit's `nuslerp_row_wise` without
    `nuslerp_flatten` is `by: columns` here, because it runs along the first axis.

    Example:
        >>> import torch
        >>> models = (torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0]))
        >>> group = LinearGroup((), (1.0, 1.0), base=torch.zeros(2), models=models)
        >>> [round(x, 6) for x in nuslerp(group).tolist()]
        [0.707107, 0.707107]
    """
    base, models = inputs_of(group, arithmetic)
    first, second = weights_of(weight, group)
    t = 0.5 if abs(first + second) < _NO_SHARE else second / (first + second)
    ends = [model - base for model in models] if around == "base" else list(models)
    if by == "tensor" or not base.dim():
        cosine = group.known[0] if group.known else None
        one, other = (end.reshape(-1) for end in ends)
        turned = _between(t, one, other, cosine)
    elif by == "rows":
        turned = _between(t, *ends)
    else:
        turned = _between(t, *(end.transpose(0, -1) for end in ends)).transpose(0, -1)
    turned = turned.reshape(base.shape)
    merged = base + turned if around == "base" else turned
    return merged.to(group.models[0].dtype)


def _between(t: float, one: Tensor, other: Tensor, cosine: Tensor | None = None) -> Tensor:
    """Turn vectors along the last axis; `cosine` is that of the whole vectors where these are parts."""
    if cosine is None:
        cosine = _cosine((one / _length(one)) * (other / _length(other)))
    straight = (1 - cosine.square()) <= _STRAIGHT
    angle = torch.acos(torch.where(straight, torch.zeros_like(cosine), cosine))
    arc = (torch.sin((1 - t) * angle) * one + torch.sin(t * angle) * other) / torch.sin(angle)
    return torch.where(straight, (1 - t) * one + t * other, arc)


def _length(vectors: Tensor) -> Tensor:
    return lengths(vectors, axis=-1, keep=True).clamp(min=_SHORT)


def _cosine(products: Tensor) -> Tensor:
    return torch.sum(products, dim=-1, keepdim=True).clamp(-1, 1)
