"""The Karcher mean of the models' directions on the sphere."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from covmerge.base.types import LinearGroup
from covmerge.maths.linalg.lapack import lengths
from covmerge.maths.methods.arithmetic import ArithmeticParameter, inputs_of, wide
from covmerge.maths.methods.gathered import Made, TensorInBlocks, one_buffer
from covmerge.maths.methods.registry import (
    SCALE_BOUND,
    EntryCost,
    Groups,
    Parameters,
    PerEntry,
    Reference,
    TensorPass,
    register,
)


def _stands_alone(parameters: Parameters) -> bool:
    return parameters["base_place"] is None


@dataclass(frozen=True)
class _Mean:
    """The mean of the flattened whole tensor, and the number of entries in a row."""

    merged: Tensor
    width: int

    def rows(self, rows: range) -> Tensor:
        return self.merged[rows.start * self.width : rows.stop * self.width]


def _tensor_pass(groups: Groups, shape: Sequence[int], parameters: Parameters) -> _Mean:
    """Return the mean itself, because each of its steps needs the whole tensor."""
    whole = TensorInBlocks(groups, prod(shape), parameters["arithmetic"])
    base, experts = next((base, models) for _, base, models in whole.blocks())
    models = [Made((t,), lambda part, base, models: models[0]) for t in range(len(experts))]
    place: int | None = parameters["base_place"]
    if place is not None:
        models.insert(place, Made((), lambda part, base, models: base))

    def in_turn() -> Iterator[Tensor]:
        for model in models:
            yield from whole.gathered([model])

    if len(models) == 1:
        (merged,) = in_turn()
    else:
        found = _mean(in_turn, parameters["max_iter"], parameters["tol"])
        merged = base.new_zeros(whole.numel) if found is None else found
    return _Mean(merged, prod(shape[1:]))


@register(
    "karcher",
    equation="W̄ = mean ‖W_t‖ · argmin_m Σ θ(m, W_t/‖W_t‖)²,  ‖m‖ = 1",
    reference=Reference(
        title="Functionality-Oriented LLM Merging on the Fisher--Rao Manifold",
        venue="arXiv 2026",
        arxiv="2603.04972",
        equations="the fixed-point algorithm on the sphere",
    ),
    laws=SCALE_BOUND.copies_give(1.0, "the expert"),
    cost=EntryCost(PerEntry(100, copies=2), PerEntry(copies=3)),
    unit="tensor",
    tensor_pass=TensorPass(
        # A model, its direction, the mean, a step, and two temporaries.
        _tensor_pass,
        lambda parameters: 6 * one_buffer(parameters["arithmetic"]),
        together=True,
    ),
    sees="weights",
    weighted=False,
    stands_alone=_stands_alone,
)
def karcher(
    group: LinearGroup,
    *,
    max_iter: Annotated[int, Field(ge=0, description="most steps along the sphere")] = 10,
    tol: Annotated[
        float,
        Field(
            gt=0, description="a step so short is the last; so short an angle, or a model, is none"
        ),
    ] = 1e-5,
    base_place: Annotated[
        int | None,
        Field(
            ge=0, description="the base is one more model, at this place; null: it takes no part"
        ),
    ] = None,
    arithmetic: ArithmeticParameter = None,
) -> Tensor:
    """Find the direction with the least sum of squared angles to all models.

    m ← Σ u_t / ‖Σ u_t‖; then v = Σ α θ_t / sin θ_t (u_t − cos θ_t m), m ← cos ‖v‖ m + sin ‖v‖ v/‖v‖
    until ‖v‖ < tol; W̄ = Σ ‖W_t‖ / T · m. Norms are computed in at least float32. α is 1 over the number of
    models that are not zero. The experts' weights in the recipe have no effect.

    Args:
        group: models of any one shape; a single model is returned as it is.
        base_place: the base's place among the models; sums are in this order.
        arithmetic: dtype that the inputs are cast to, and that vectors are rounded to.

    Departs from the paper: it stops where mergekit does, and gives mergekit's result.

    Example:
        >>> import torch
        >>> models = (torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0]))
        >>> group = LinearGroup((), (1.0, 1.0), base=torch.zeros(2), models=models)
        >>> [round(x, 6) for x in karcher(group).tolist()]
        [0.707107, 0.707107]
    """
    if group.known:
        merged: Tensor = group.known[0]
        return merged.view(group.models[0].shape).to(group.models[0].dtype)
    base, given = inputs_of(group, arithmetic)
    models = list(given)
    if base_place is not None:
        models.insert(base_place, base)
    if len(models) == 1:
        return models[0].to(group.models[0].dtype)
    found = _mean(lambda: iter(models), max_iter, tol)
    return (torch.zeros_like(base) if found is None else found).to(group.models[0].dtype)


def _mean(models: Callable[[], Iterator[Tensor]], max_iter: int, tol: float) -> Tensor | None:
    """Return the mean of models; `models()` yields all of them, one after the other, at each call.

    Return None if the length of every model is zero.
    """
    sizes = [lengths(model.to(wide(model.dtype))) for model in models()]
    there = [float(size) > tol for size in sizes]
    if not any(there):
        return None
    # mergekit's shares of the models that are not zero: 1/T over their sum.
    share = 1.0 / len(sizes)
    alpha = share / sum([share] * sum(there))

    def units() -> Iterator[Tensor]:
        for model, size, is_there in zip(models(), sizes, there, strict=True):
            if is_there:
                yield (model / size).to(model.dtype)

    mean: Tensor | None = None
    for unit in units():
        mean = torch.zeros_like(unit) if mean is None else mean
        mean += alpha * unit
        del unit
    assert mean is not None
    size = lengths(mean.to(wide(mean.dtype)))
    mean = next(units()).clone() if float(size) < tol else (mean / size).to(mean.dtype)
    for _ in range(max_iter):
        step = _step(mean, units(), alpha, tol)
        size = lengths(step.to(wide(step.dtype)))
        if float(size) < tol:
            break
        step = torch.sin(size) * (step / size)
        mean = (torch.cos(size) * mean + step).to(mean.dtype)
        size = lengths(mean.to(wide(mean.dtype)))
        if float(size) > tol:
            mean = (mean / size).to(mean.dtype)
    total = share * sizes[0]
    for size in sizes[1:]:
        total = total + share * size
    return (total * mean).to(mean.dtype)


def _step(mean: Tensor, units: Iterator[Tensor], alpha: float, tol: float) -> Tensor:
    """Return the mean of the tangent vectors at `mean` to all directions."""
    step = torch.zeros_like(mean)
    for unit in units:
        cosine = torch.dot(mean.flatten(), unit.flatten()).clamp(-1.0, 1.0)
        angle = torch.arccos(cosine)
        if float(angle) >= tol:
            step += alpha * (angle / torch.sin(angle)) * (unit - cosine * mean)
    return step
