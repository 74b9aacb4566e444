"""The weighted mean, or sum, of the models' weights themselves."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from covmerge.base.errors import RecipeError
from covmerge.base.types import LinearGroup
from covmerge.maths.methods.arithmetic import (
    ArithmeticParameter,
    Weight,
    inputs_of,
    weights_of,
    wide,
)
from covmerge.maths.methods.registry import (
    EQUIVARIANT,
    EntryCost,
    Parameters,
    PerEntry,
    Reference,
    register,
)


def _stands_alone(parameters: Parameters) -> bool:
    return parameters["base_weight"] is None


@register(
    "linear",
    equation="W̄ = Σ w_t W_t / Σ w_t",
    reference=Reference(
        title="Model soups: averaging weights of multiple fine-tuned models improves accuracy "
        "without increasing inference time",
        venue="ICML 2022",
        arxiv="2203.05482",
        equations="Table 1",
    ),
    laws=EQUIVARIANT.copies_give(
        lambda parameters, count: 1.0 if parameters["normalize"] else None, "the expert"
    ),
    # Inputs in another dtype are copied.
    cost=EntryCost(PerEntry(2, copies=1), PerEntry(copies=2)),
    unit="element",
    sees="weights",
    stands_alone=_stands_alone,
)
def linear(
    group: LinearGroup,
    *,
    weight: Weight = 1.0,
    normalize: Annotated[bool, Field(description="divide by Σ w_t")] = True,
    base_weight: Annotated[
        float | None, Field(description="w_0 of the base as one more model; null: it takes no part")
    ] = None,
    arithmetic: ArithmeticParameter = None,
) -> Tensor:
    """Average the models' weights themselves, one multiply-add after the other.

    W̄ = (w_0 W_0 +) Σ w_t W_t [/ Σ w_t]  (Model soups, Table 1), summed in at least float32

    This is bit for bit mergekit's `linear`. `average` is the same mean computed from the updates, which
    rounds less and keeps adapters as factors. Weights may be negative or zero.

    Args:
        group: models of any one shape.
        arithmetic: dtype that the inputs are cast to, and the result; the sum is at least float32.

    Raises:
        RecipeError: the mean is asked for, and the weights add up to 0.

    Departs from the paper: nowhere.

    Example:
        >>> import torch
        >>> group = LinearGroup((), (1.0, 1.0), base=torch.zeros(2),
        ...                     models=(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 6.0])))
        >>> linear(group, weight=[3.0, 1.0]).tolist()
        [1.5, 3.0]
    """
    base, models = inputs_of(group, arithmetic)
    factors = weights_of(weight, group)
    if base_weight is not None:
        models, factors = [base, *models], [base_weight, *factors]
    shares = torch.tensor([factors], dtype=wide(base.dtype), device=base.device)
    total = shares.sum(dim=1)
    if normalize and float(total) == 0.0:
        raise RecipeError(
            f"method 'linear': the weights {factors} add up to 0: set `normalize: false`, or change one"
        )
    result = torch.zeros_like(base, dtype=shares.dtype)
    for model, share in zip(models, shares[0], strict=True):
        result.addcmul_(model.to(result.dtype), share)
    if normalize:
        result.div_(total if base.dim() else total[0])
    return result.to(base.dtype).to(group.models[0].dtype)
