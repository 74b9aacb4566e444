"""NearSwap: takes the expert's weights where they are close to the base's."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from torch import Tensor

from covmerge.base.types import LinearGroup
from covmerge.maths.methods.arithmetic import ArithmeticParameter, inputs_of
from covmerge.maths.methods.registry import BOUND, EntryCost, PerEntry, register

_NEAREST = 1e-6  # least divisor of a distance


@register(
    "nearswap",
    equation="W̄ = s W_1 + (1 − s) W₀,  s = min(1, t / max(|W_1 − W₀|, 10⁻⁶))",
    laws=BOUND.copies_give(None, "each entry moved by t at most"),
    cost=EntryCost(PerEntry(copies=1), PerEntry(10, copies=4)),
    unit="element",
    sees="weights",
    experts=(1, 1),
)
def nearswap(
    group: LinearGroup,
    *,
    t: Annotated[
        float, Field(description="how far an entry may go; nearer ones are the expert's")
    ] = 1e-3,
    arithmetic: ArithmeticParameter = None,
) -> Tensor:
    """Move each entry of the base towards the expert's by t, and no further than the expert's.

    s = t / max(|W_1 − W₀|, 1e-6), limited to [0, 1]; W̄ = s W_1 + (1 − s) W₀

    Args:
        group: one model of any shape beside the base.

    Departs from the paper: there is none; this is bit for bit mergekit's result. In mergekit t has no
    default.

    Example:
        >>> import torch
        >>> group = LinearGroup((), (1.0,), base=torch.zeros(2), models=(torch.tensor([4.0, 0.5]),))
        >>> nearswap(group, t=1.0).tolist()
        [1.0, 0.5]
    """
    base, (model,) = inputs_of(group, arithmetic)
    share = (t / (base - model).abs_().clamp_(min=_NEAREST)).clamp_(min=0, max=1)
    return (share * model + (1 - share) * base).to(group.models[0].dtype)
