"""RAM: changes by one expert alone are kept whole, changes by several experts are averaged."""

from __future__ import annotations

from collections.abc import Sequence
from math import nan
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from covmerge.base.types import LinearGroup
from covmerge.maths.methods.arithmetic import ArithmeticParameter, inputs_of
from covmerge.maths.methods.registry import (
    AXIS_BOUND_UP_TO_BOUNDS,
    AnyRows,
    EntryCost,
    Groups,
    Parameters,
    PerEntry,
    Reference,
    TensorPass,
    Unit,
    register,
)


def _unit(parameters: Parameters) -> Unit:
    return "tensor" if parameters["boost"] else "element"


def _tensor_pass(groups: Groups, shape: Sequence[int], parameters: Parameters) -> AnyRows:
    del shape
    epsilon: float = parameters["epsilon"]
    found: list[tuple[Tensor, Tensor]] = []
    for group in groups():
        base, models = inputs_of(group, parameters["arithmetic"])
        changed = torch.stack([(model - base).reshape(-1).abs() > epsilon for model in models])
        found.append(_counted(changed, changed.sum(dim=0, keepdim=True)))
    together, unique = (torch.stack(counts).sum(dim=0) for counts in zip(*found, strict=True))
    return AnyRows(_ratio(together, unique, epsilon, parameters["most"]))


@register(
    "ram",
    equation="W̄ = W₀ + Σ λ_t^[n = 1] Δ_t [|Δ_t| > ε] / max(n, 1),  n = #{t : |Δ_t| > ε}",
    reference=Reference(
        title="Behavior Knowledge Merge in Reinforced Agentic Models",
        venue="arXiv 2026",
        arxiv="2601.13572",
        equations="RAM and RAM+",
    ),
    laws=AXIS_BOUND_UP_TO_BOUNDS.copies_give(nan, "the expert's entries above ε"),
    cost=EntryCost(PerEntry(20, copies=3, bytes=2), PerEntry(copies=2, bytes=2 * 8)),
    unit=_unit,
    tensor_pass=TensorPass(_tensor_pass, lambda parameters: 0.0, together=True),
    sees="weights",
    weighted=False,
)
def ram(
    group: LinearGroup,
    *,
    epsilon: Annotated[float, Field(ge=0, description="ε, a change that counts is larger")] = 1e-5,
    boost: Annotated[
        float,
        Field(
            ge=0,
            description="r of RAM+: λ_t = 1 + r ρ_t, ρ_t shared over unique changes; 0: λ_t = 1",
        ),
    ] = 0.0,
    most: Annotated[float, Field(ge=0, description="of RAM+: the most that ρ_t counts as")] = 0.2,
    arithmetic: ArithmeticParameter = None,
) -> Tensor:
    """Keep the changes made by one expert alone, and average those made by several.

    Δ̂_t = Δ_t [|Δ_t| > ε], n of them non-zero at an entry; W̄ = W₀ + Σ λ_t Δ̂_t if n = 1, else Σ Δ̂_t / n;
    λ_t = 1 + r · min(shared_t / max(unique_t, ε), most)  (RAM, RAM+), counted within the tensor

    The experts' weights in the recipe have no effect.

    Args:
        group: models of any one shape.

    Departs from the paper: RAM+ counts within one tensor, not over the model. This is the result of
    mergekit's `ram`, and of its `ramplus_tl` with `boost: 0.1`.

    Example:
        >>> import torch
        >>> models = (torch.tensor([2.0, 4.0, 0.0]), torch.tensor([0.0, 2.0, 0.0]))
        >>> group = LinearGroup((), (1.0, 1.0), base=torch.zeros(3), models=models)
        >>> ram(group).tolist()
        [2.0, 3.0, 0.0]
    """
    base, models = inputs_of(group, arithmetic)
    updates = torch.stack([model - base for model in models]).view(len(models), -1)
    changed = updates.abs() > epsilon
    count = changed.sum(dim=0, keepdim=True)
    alone, shared = count == 1, count > 1
    changes = updates.mul_(changed)
    unique = changes * alone
    if boost:
        if group.known:
            ratio = group.known[0]
        else:
            ratio = _ratio(*_counted(changed, count), epsilon, most)
        unique = unique * (1 + boost * ratio).unsqueeze(-1)  # at least float32 from here on
    merged = unique.add_(changes.mul_(shared).div_(count.clamp_(min=1))).sum(dim=0)
    return (base + merged.view(base.shape)).to(group.models[0].dtype)


def _counted(changed: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """Return, by expert, how many entries it changed with others, and how many alone."""
    return (changed & (count > 1)).sum(dim=1), (changed & (count == 1)).sum(dim=1)


def _ratio(together: Tensor, unique: Tensor, epsilon: float, most: float) -> Tensor:
    return (together / unique.clamp(min=epsilon)).clamp(min=0, max=most)
