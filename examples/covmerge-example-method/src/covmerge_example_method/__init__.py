"""A merge method and a step for covmerge: `covmerge methods` lists both once this is installed."""

from dataclasses import replace
from typing import Annotated

import torch
from pydantic import Field

import covmerge
from covmerge import Laws, LinearGroup


@covmerge.register(
    "example_median",
    equation="W̄ = W₀ + scale · median_t Δ_t",
    unit="element",
    laws=Laws(order_invariant=True, scale_equivariant=True, rotation_equivariant=False),
)
def median(
    group: LinearGroup,
    *,
    scale: Annotated[float, Field(gt=0.0, description="factor of the median")] = 1.0,
) -> torch.Tensor:
    """Take the middle of the experts' updates, entry by entry."""
    return scale * torch.stack(group.updates).median(dim=0).values


@covmerge.register_step(
    "example_clip",
    when="before",
    equation="Δ_t ← max(−c, min(c, Δ_t)),  c = at · max |Δ_t|",
    unit="tensor",
    laws=Laws(order_invariant=True, scale_equivariant=True),
)
def clip(
    group: LinearGroup,
    *,
    at: Annotated[float, Field(gt=0.0, le=1.0, description="share of the largest entry")] = 0.5,
) -> LinearGroup:
    """Cut off each update's largest entries."""
    limits = [at * float(update.abs().max()) for update in group.updates]
    clipped = zip(group.updates, limits, strict=True)
    return replace(group, updates=tuple(update.clamp(-c, c) for update, c in clipped))
