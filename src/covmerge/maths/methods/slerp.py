"""Spherical interpolation between the base and one other model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import nan
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from covmerge.base.types import LinearGroup
from covmerge.maths.linalg.auto import Cost
from covmerge.maths.linalg.lapack import lengths
from covmerge.maths.methods.arithmetic import ArithmeticParameter, inputs_of, wide
from covmerge.maths.methods.registry import (
    UP_TO_BOUNDS,
    AnyRows,
    Groups,
    Parameters,
    TensorPass,
    register,
)

_PART = 2**20  # entries that are computed at once
_STRAIGHT = 0.9995  # least cosine for which the path is a straight line
_SHORT = 1e-8  # a shorter length is not divided by

Share = Annotated[float, Field(description="place on the way: 0 is the base, 1 the expert")]


def _cost(d_out: int, d_in: int, count: int, itemsize: int) -> Cost:
    size = d_out * d_in
    return Cost(12.0 * size, (count + 2) * size * itemsize + 8 * min(size, _PART) * itemsize)


def _tensor_pass(groups: Groups, shape: Sequence[int], parameters: Parameters) -> AnyRows:
    del shape

    def ways() -> Iterator[tuple[Tensor, Tensor]]:
        for group in groups():
            base, (model,) = inputs_of(group, parameters["arithmetic"])
            yield base, model

    return AnyRows(_shares(ways, parameters["t"]))


@register(
    "slerp",
    equation="W̄ = sin((1 − t)θ)/sin θ W₀ + sin(tθ)/sin θ W_1,  cos θ = ⟨W₀, W_1⟩ / ‖W₀‖‖W_1‖",
    # Scale equivariance holds on the straight line, which nearly parallel weights take.
    laws=UP_TO_BOUNDS.copies_give(nan, "half of its update where it is small"),
    cost=_cost,
    unit="tensor",
    tensor_pass=TensorPass(_tensor_pass, lambda parameters: 0.0, readings=lambda parameters: 2),
    sees="weights",
    experts=(1, 1),
)
def slerp(group: LinearGroup, *, t: Share = 0.5, arithmetic: ArithmeticParameter = None) -> Tensor:
    """Go from the base to the expert along the circle that holds both, separately in each tensor.

    W̄ = sin((1 − t)θ)/sin θ W₀ + sin(tθ)/sin θ W_1; a straight line if |cos θ| > 0.9995

    Angles and sums are in at least float32. Weights that were fine-tuned a little are nearly parallel to
    the base's, so most tensors take the straight line.

    Args:
        group: one model of any shape beside the base.
        arithmetic: dtype that the inputs are cast to, and that the result has.

    Departs from the paper: there is none for weights; this is Shoemake's curve (SIGGRAPH 1985), and
    mergekit's result.

    Example:
        >>> import torch
        >>> group = LinearGroup((), (1.0,), base=torch.tensor([1.0, 0.0]),
        ...                     models=(torch.tensor([0.0, 1.0]),))
        >>> [round(x, 6) for x in slerp(group).tolist()]
        [0.707107, 0.707107]
    """
    base, (model,) = inputs_of(group, arithmetic)
    if not base.numel():
        return group.models[0].clone()
    of_base, of_model = group.known[0] if group.known else _shares(lambda: iter([(base, model)]), t)
    dtype = wide(base.dtype)
    result = torch.empty_like(base).view(-1)
    for start in range(0, len(result), _PART):
        x, y = (way.reshape(-1)[start : start + _PART].to(dtype) for way in (base, model))
        result[start : start + _PART] = (of_base * x).add_(of_model * y)
    return result.view(base.shape).to(group.models[0].dtype)


def _shares(ways: Callable[[], Iterator[tuple[Tensor, Tensor]]], t: float) -> tuple[Tensor, Tensor]:
    """Return the factors of base and model, from the angle between two whole tensors, which come in pieces.

    Sums are taken over parts of a fixed size, and then over the parts; the factors are in their dtype.
    """
    norms = [[lengths(x, axis=1, keep=True) for x in pair] for pair in _parts(ways())]
    first, second = (_length([pair[which] for pair in norms]) for which in (0, 1))
    products = [(x / first).mul_(y / second).sum(dim=1, keepdim=True) for x, y in _parts(ways())]
    cosine = torch.stack(products).sum(dim=0).clamp_(-1, 1)
    place = torch.tensor([[t]], dtype=cosine.dtype, device=cosine.device)
    straight = cosine.abs() > _STRAIGHT
    angle = torch.acos(torch.where(straight, torch.zeros_like(cosine), cosine))
    sine = torch.sin(angle)
    return (
        torch.where(straight, 1 - place, torch.sin((1 - place) * angle) / sine).view(()),
        torch.where(straight, place, torch.sin(place * angle) / sine).view(()),
    )


def _length(norms: list[Tensor]) -> Tensor:
    whole = lengths(torch.stack(norms), axis=0)
    return torch.where(whole > _SHORT, whole, torch.ones_like(whole))


def _parts(ways: Iterator[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield two tensors in parts `(1, n)` of one size, wherever the given pieces end."""
    pieces: list[tuple[Tensor, Tensor]] = []
    held = 0
    for base, model in ways:
        pieces.append((base.reshape(1, -1), model.reshape(1, -1)))
        held += base.numel()
        if held < _PART:
            continue
        first, second = _joined(pieces)
        while first.shape[1] >= _PART:
            yield _wide(first[:, :_PART]), _wide(second[:, :_PART])
            first, second = first[:, _PART:], second[:, _PART:]
        held = first.shape[1]
        pieces = [(first, second)] if held else []
    if pieces:
        first, second = _joined(pieces)
        yield _wide(first), _wide(second)


def _joined(pieces: list[tuple[Tensor, Tensor]]) -> Sequence[Tensor]:
    """Return each of the two tensors in one piece; the list is emptied to free the pieces."""
    if len(pieces) == 1:
        return pieces.pop()
    joined = [torch.cat([piece[which] for piece in pieces], dim=1) for which in (0, 1)]
    pieces.clear()
    return joined


def _wide(part: Tensor) -> Tensor:
    return part.to(wide(part.dtype))
