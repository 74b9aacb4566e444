"""Rescale: the merged update brought to the experts' mean norm."""

from __future__ import annotations

from dataclasses import replace
from math import fsum
from typing import Annotated

from pydantic import Field

from covmerge.base.types import LinearGroup, Merged
from covmerge.maths.linalg.lapack import norm
from covmerge.maths.methods.registry import EQUIVARIANT, MULTIPLY_ADD
from covmerge.maths.steps.registry import register_step

# Of updates that cancel rounding leaves about this share; to enlarge it would be to merge noise.
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
    """Bring the merged update to the experts' mean norm, matrix by matrix.

    Means are shorter than what they are of, and sums are longer; experts work at their own length.
    The mean is over the experts that changed the layer. Pico's code (arXiv:2604.16826) ends with it.

    Args:
        group: the experts' updates as they came, of any one shape.
        merged: what the method made of them.
        scale: of the mean.

    Departs from the paper: Pico's mean is over all experts, those without a change too. A merged
    update below 1e-4 of the mean is what rounding leaves of updates that cancel, and stays as it is.

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
