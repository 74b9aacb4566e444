"""One model's weights, unchanged or scaled."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from torch import Tensor

from covmerge.base.types import LinearGroup
from covmerge.maths.methods.arithmetic import ArithmeticParameter, inputs_of
from covmerge.maths.methods.registry import EQUIVARIANT, EntryCost, PerEntry, register


@register(
    "passthrough",
    equation="W̄ = s W_1",
    laws=EQUIVARIANT.copies_give(1.0, "the expert"),
    cost=EntryCost(PerEntry(copies=1), PerEntry(1, copies=1)),
    unit="element",
    sees="weights",
    stands_alone=True,
    experts=(1, 1),
)
def passthrough(
    group: LinearGroup,
    *,
    scale: Annotated[float | None, Field(description="s; null: nothing is multiplied")] = None,
    arithmetic: ArithmeticParameter = None,
) -> Tensor:
    """Take the weights of one model, bit for bit, or times a number.

    Args:
        group: one model of any shape.

    Departs from the paper: there is none.

    Example:
        >>> import torch
        >>> group = LinearGroup((), (1.0,), base=torch.zeros(2), models=(torch.tensor([1.0, 2.0]),))
        >>> passthrough(group, scale=0.5).tolist()
        [0.5, 1.0]
    """
    _, (model,) = inputs_of(group, arithmetic)
    return (model if scale is None else model * scale).to(group.models[0].dtype)
