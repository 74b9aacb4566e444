"""A weighted mean on a sphere, computed in the tangent space at the normalised linear mean."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from covmerge.base.errors import TensorError
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
    register,
)


@dataclass(frozen=True)
class _Way:
    """Facts about the whole tensor that the computation of its rows needs."""

    sizes: Tensor  # norms of the models, `(T, 1)`
    size: Tensor  # norm of the mean of their directions; below ε the mean has no direction
    along: Tensor | None = None  # ⟨u_t, m⟩, `(T, 1)`
    turn: Tensor | None = None  # ‖v‖ + ε


def _tensor_pass(groups: Groups, shape: Sequence[int], parameters: Parameters) -> AnyRows:
    whole = TensorInBlocks(groups, prod(shape), parameters["arithmetic"])
    eps: float = parameters["eps"]
    group = next(groups())
    base, _ = inputs_of(group, parameters["arithmetic"])
    count, column = len(group.models), _shares(parameters, group, base).view(-1, 1)
    everyone = tuple(range(count))

    def end(base: Tensor, model: Tensor) -> Tensor:
        return (model - base if parameters["around"] == "base" else model).reshape(-1)

    alone = [Made((t,), lambda part, base, models: end(base, models[0])) for t in everyone]
    found = [lengths(vector.view(1, -1), axis=-1, keep=True) for vector in whole.gathered(alone)]
    sizes = torch.cat(found)

    def units(base: Tensor, models: Sequence[Tensor]) -> Tensor:
        return torch.stack([end(base, model) for model in models]) / (sizes + eps)

    mean = Made(everyone, lambda part, base, models: (units(base, models) * column).sum(0))
    (middle,) = whole.gathered([mean])
    size = lengths(middle)
    if size < eps:
        return AnyRows(_Way(sizes, size))
    middle /= size
    products = [
        Made(
            (t,),
            lambda part, base, models, t=t: end(base, models[0]) / (sizes[t] + eps) * middle[part],
        )
        for t in everyone
    ]
    along = torch.cat([p.view(1, -1).sum(-1, keepdim=True) for p in whole.gathered(products)])
    rest = Made(
        everyone,
        lambda part, base, models: ((units(base, models) - along * middle[part]) * column).sum(0),
    )
    (tangent,) = whole.gathered([rest])
    return AnyRows(_Way(sizes, size, along, lengths(tangent) + eps))


def _shares(parameters: Parameters, group: LinearGroup, base: Tensor) -> Tensor:
    weights = weights_of(parameters["weight"], group)
    shares = torch.tensor(weights, dtype=base.dtype, device=base.device)
    return shares / shares.sum() if parameters["normalize_weights"] else shares


@register(
    "multislerp",
    equation="W̄ = Σ w_t ‖W_t‖ (cos ‖v‖ m + sin ‖v‖ v/‖v‖),  m ∝ Σ w_t u_t,  v = Σ w_t (u_t − ⟨u_t, m⟩ m),"
    "  u_t = W_t/‖W_t‖",
    laws=SCALE_BOUND.copies_give(1.0, "the expert"),
    cost=EntryCost(PerEntry(30, copies=4), PerEntry(copies=3)),
    unit="tensor",
    tensor_pass=TensorPass(
        # The mean, and one more gathered tensor.
        _tensor_pass,
        lambda parameters: 2 * one_buffer(parameters["arithmetic"]),
        together=True,
    ),
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
    """Average the models' directions on the sphere, and scale the result to the mean of their norms.

    u_t = W_t / (‖W_t‖ + ε), m = Σ w_t u_t / ‖Σ w_t u_t‖, v = Σ w_t (u_t − ⟨u_t, m⟩ m),
    W̄ = Σ w_t ‖W_t‖ (cos n m + sin n v/n), n = ‖v‖ + ε. Around the base, W_t stands for W_t − W₀.

    v is only rounding, because m is the direction of Σ w_t u_t. The result is the direction m itself, which
    differs from that of `slerp` if two models have unequal weights.

    Args:
        group: models of any one shape; a single model is returned as it is.
        eps: ε.

    Raises:
        TensorError: the directions of three or more models cancel, so that they have no mean.

    Departs from the paper: there is none; this is mergekit's result, except that updates that are all zero
    give the base, where mergekit raises an error for three or more.

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
    given = {"weight": weight, "normalize_weights": normalize_weights}
    shares = _shares(given, group, base)
    column = shares.view(-1, 1)
    way: _Way | None = group.known[0] if group.known else None
    sizes = lengths(rows, axis=-1, keep=True) if way is None else way.sizes
    units = rows / (sizes + eps)
    middle = (units * column).sum(0)
    size = lengths(middle) if way is None else way.size
    if size < eps:
        if len(models) > 2 and bool(sizes.any()):
            raise TensorError(
                "method 'multislerp': the directions cancel by these weights, and have no mean; give "
                "other weights, or merge this tensor by `linear`"
            )
        flat = ends[0] * shares[0] + ends[1] * shares[1]
        return _placed(flat.view(base.shape), base, around, group)
    middle = middle / size
    along = None if way is None else way.along
    tangents = units - ((units * middle).sum(-1, keepdim=True) if along is None else along) * middle
    tangent = (tangents * column).sum(0)
    known = None if way is None else way.turn
    turn = lengths(tangent) + eps if known is None else known
    direction = middle * torch.cos(turn) + tangent * (torch.sin(turn) / turn)
    long = direction * (sizes.squeeze(-1) * shares).sum()
    return _placed(long.view(base.shape), base, around, group)


def _placed(merged: Tensor, base: Tensor, around: str, group: LinearGroup) -> Tensor:
    return (merged + base if around == "base" else merged).to(group.models[0].dtype)
