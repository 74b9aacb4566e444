"""Parameters of methods on the models' weights: the dtype of computation, and values per expert."""

from __future__ import annotations

from collections.abc import Sequence
from math import fsum
from typing import Annotated, Literal, TypeVar

import torch
from pydantic import Field
from torch import Tensor

from covmerge.base.types import LinearGroup
from covmerge.maths.linalg.lapack import norm
from covmerge.maths.registry import Parameters, PerExpert

STORED = "stored"  # value of `arithmetic`: the plan inserts each tensor's stored dtype

_T = TypeVar("_T", int, float)

ArithmeticParameter = Annotated[
    Literal["float16", "bfloat16", "float32", "float64", "stored"] | None,
    Field(
        description="inputs are cast to this dtype, and each operation rounds to it; `stored`: the one "
        "that the models are stored in; null: that of the computation"
    ),
]
Weight = Annotated[
    float | list[float],
    PerExpert(),
    Field(description="w_t, factor of each expert, which multiplies its `weight` in the recipe"),
]

Around = Annotated[
    Literal["zero", "base"],
    Field(description="centre of the sphere: weights are turned, or updates"),
]


def around_zero(parameters: Parameters) -> bool:
    """Return whether the centre of the sphere is zero, so that a merge needs no base."""
    return parameters["around"] == "zero"


def each(value: _T | list[_T], group: LinearGroup) -> list[_T]:
    """Return one value for each expert."""
    return value if isinstance(value, list) else [value] * len(group.weights)


def weights_of(weight: float | list[float], group: LinearGroup) -> list[float]:
    """Return each expert's factor: the parameter times the expert's weight."""
    return [factor * w for factor, w in zip(each(weight, group), group.weights, strict=True)]


def inputs_of(group: LinearGroup, arithmetic: str | None) -> tuple[Tensor, Sequence[Tensor]]:
    """Return W_0 and the W_t in the dtype in which they are merged.

    Float32 represents half-precision numbers exactly, so a file's bits survive a group in float32.
    """
    assert group.base is not None
    dtype = group.base.dtype if arithmetic in (None, STORED) else getattr(torch, arithmetic)
    return group.base.to(dtype), [model.to(dtype) for model in group.models]


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for sums and angles over numbers of a dtype: at least float32."""
    return torch.promote_types(dtype, torch.float32)


# Updates scaled towards one norm, as in the step `norm_balance`.

Strength = Annotated[
    float,
    Field(
        ge=0.0,
        le=1.0,
        description="how far norms go towards their mean: 1 makes them equal, 0 changes nothing",
    ),
]


def balanced(group: LinearGroup, strength: float) -> LinearGroup:
    """Return the group with the norm of every update moved towards the experts' mean norm.

    The mean is over the experts that changed the layer; the updates of the others stay as they are.
    """
    norms = [norm(update) for update in group.updates]
    changed = [size for size in norms if size > 0.0]
    mean = fsum(size / len(changed) for size in changed)
    return group.times(
        [1.0 - strength + strength * mean / size if size > 0.0 else 1.0 for size in norms]
    )
