"""Rescale: the merged update is scaled to the experts' mean norm."""

from __future__ import annotations

from dataclasses import replace
from math import fsum
from typing import Annotated

from pydantic import Field

from covmerge.base.types import LinearGroup, Merged
from covmerge.maths.linalg.lapack import norm
from covmerge.maths.methods.registry import EQUIVARIANT, MULTIPLY_ADD
from covmerge.maths.steps.registry import register_step

# Updates that cancel leave about this share as rounding; enlarging it would merge noise.
_NOISE = 1e-4


@register_step(
    "rescale",
    when="after",
    equation="W̄ − W₀ ← (W̄ − W₀) · scale · mean_t ‖Δ_t‖ / ‖W̄ − W₀‖",
    laws=EQUIVARIANT,
    cost=MULTIPLY_ADD,
    unit="tensor",
    factored="both",
)
def rescale(
    group: LinearGroup,
    merged: Merged,
    *,
    scale: Annotated[float, Field(gt=0.0, description="factor of the experts' mean norm")] = 1.0,
) -> Merged:
    """Scale the merged update to the experts' mean norm, matrix by matrix.

    Means are shorter than the updates they average, and sums are longer; experts work at their own norm.
    The mean is over the experts that changed the layer. Pico's code (arXiv:2604.16826) ends with this step.

    Args:
        group: the experts' updates before all steps, of any one shape.
        merged: the method's result.

    Departs from the paper: Pico's mean is over all experts, including those without a change. A merged
    update below 1e-4 of the mean is the rounding of updates that cancel, and stays as it is.

    Example:
        >>> import torch
        >>> group = LinearGroup((torch.tensor([[3.0, 0.0]]), torch.tensor([[0.0, 5.0]])), (1.0, 1.0))
        >>> rescale(group, Merged(torch.tensor([[1.0, 0.0]]))).delta.tolist()
        [[4.0, 0.0]]
    """
    changed = [size for size in map(norm, group.updates) if size > 0.0]
    if not changed:
        return merged
    mean = fsum(size / len(changed) for size in changed)
    size = norm(merged.delta)
    if size <= _NOISE * mean:
        return merged
    return replace(merged, delta=merged.delta * (scale * mean / size))
