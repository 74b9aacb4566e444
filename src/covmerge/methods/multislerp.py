"""A weighted mean on a sphere, by way of the tangent at the straight mean."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from covmerge.errors import TensorError
from covmerge.linalg.auto import Cost
from covmerge.linalg.lapack import lengths
from covmerge.methods.arithmetic import (
    ArithmeticParameter,
    Around,
    Weight,
    around_zero,
    inputs_of,
    weights_of,
)
from covmerge.methods.registry import Laws, register
from covmerge.types import LinearGroup


def _cost(d_out: int, d_in: int, count: int, itemsize: int) -> Cost:
    return Cost(30.0 * count * d_out * d_in, (4 * count + 3) * d_out * d_in * itemsize)


@register(
    "multislerp",
    equation="W̄ = Σ w_t ‖W_t‖ (cos ‖v‖ m + sin ‖v‖ v/‖v‖),  m ∝ Σ w_t u_t,  v = Σ w_t (u_t − ⟨u_t, m⟩ m),"
    "  u_t = W_t/‖W_t‖",
    laws=Laws(
        order_invariant=True,
        scale_equivariant=False,
        rotation_equivariant=True,
        replicas=lambda parameters, count: 1.0,
        replicas_text="the expert",
    ),
    cost=_cost,
    unit="tensor",
    sees="weights",
    stands_alone=around_zero,
)
def multislerp(
    group: LinearGroup,
    *,
    weight: Weight = 1.0,
    normalize_weights: Annotated[bool, Field(description="divide the w_t by their sum")] = True,
    eps: Annotated[
        float, Field(gt=0, description="added to lengths; a mean shorter than it has no direction")
    ] = 1e-8,
    around: Around = "zero",
    arithmetic: ArithmeticParameter = None,
) -> Tensor:
    """Mean of the models' directions on the sphere, at the mean of their lengths.

    u_t = W_t / (‖W_t‖ + ε), m = Σ w_t u_t / ‖Σ w_t u_t‖, v = Σ w_t (u_t − ⟨u_t, m⟩ m),
    W̄ = Σ w_t ‖W_t‖ (cos n m + sin n v/n), n = ‖v‖ + ε. Around the base W_t stands for W_t − W₀.

    Args:
        group: models of any one shape; one alone is what it is.
        weight: w_t.
        normalize_weights: whether only their ratios count.
        eps: ε.
        around: the centre of the sphere.
        arithmetic: dtype that the inputs are cast to, and that each operation rounds to.

    Raises:
        TensorError: directions of three or more models cancel, so that there is no mean of them.

    Departs from the paper: there is none; it is bit for bit mergekit's, but that updates which are all
    zero give the base, where three or more are an error there.

    Example:
        >>> import torch
        >>> models = (torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0]))
        >>> group = LinearGroup((), (1.0, 1.0), base=torch.zeros(2), models=models)
        >>> [round(x, 6) for x in multislerp(group).tolist()]
        [0.707107, 0.707107]
    """
    base, models = inputs_of(group, arithmetic)
    if len(models) == 1:
        return models[0].to(group.models[0].dtype)
    ends = torch.stack([m - base if around == "base" else m for m in models])
    rows = ends.view(len(models), -1)
    shares = torch.tensor(weights_of(weight, group), dtype=base.dtype, device=base.device)
    if normalize_weights:
        shares = shares / shares.sum()
    column = shares.view(-1, 1)
    sizes = lengths(rows, axis=-1, keep=True)
    units = rows / (sizes + eps)
    middle = (units * column).sum(0)
    size = lengths(middle)
    if size < eps:
        if len(models) > 2 and bool(sizes.any()):
            raise TensorError(
                "method 'multislerp': the directions cancel by these weights, and have no mean; give "
                "other weights, or merge this tensor by `linear`"
            )
        flat = ends[0] * shares[0] + ends[1] * shares[1]
        return _placed(flat.view(base.shape), base, around, group)
    middle = middle / size
    tangents = units - (units * middle).sum(-1, keepdim=True) * middle
    tangent = (tangents * column).sum(0)
    turn = lengths(tangent) + eps
    direction = middle * torch.cos(turn) + tangent * (torch.sin(turn) / turn)
    long = direction * (sizes.squeeze(-1) * shares).sum()
    return _placed(long.view(base.shape), base, around, group)


def _placed(merged: Tensor, base: Tensor, around: str, group: LinearGroup) -> Tensor:
    return (merged + base if around == "base" else merged).to(group.models[0].dtype)
