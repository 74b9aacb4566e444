"""Norm balance: every update brought to the experts' mean norm."""

from __future__ import annotations

from math import fsum
from typing import Annotated

from pydantic import Field

from covmerge.linalg.lapack import norm
from covmerge.methods.average import elementwise_cost
from covmerge.methods.registry import Laws
from covmerge.steps.registry import register_step
from covmerge.types import LinearGroup


@register_step(
    "norm_balance",
    when="before",
    equation="Δ_t ← Δ_t · (mean_s ‖Δ_s‖ / ‖Δ_t‖)^strength",
    laws=Laws(order_invariant=True, scale_equivariant=True, rotation_equivariant=True),
    cost=elementwise_cost,
    unit="tensor",
    factored="both",
)
def norm_balance(
    group: LinearGroup,
    *,
    strength: Annotated[
        float, Field(ge=0.0, le=1.0, description="1 makes all norms equal, 0 changes nothing")
    ] = 1.0,
) -> LinearGroup:
    """Bring every expert's update to the experts' mean norm, matrix by matrix.

    An expert that was trained longer no longer outweighs the others in a sum. The mean is over the
    experts that changed the layer; one that did not stays as it is. The norm-balanced targets of
    Compress-then-Merge (arXiv:2606.03723) are such updates.

    Args:
        group: updates of any one shape.
        strength: how far.

    Example:
        >>> import torch
        >>> group = LinearGroup((torch.tensor([[1.0]]), torch.tensor([[3.0]])), (1.0, 1.0))
        >>> [update.item() for update in norm_balance(group).updates]
        [2.0, 2.0]
    """
    norms = [norm(update) for update in group.updates]
    changed = [size for size in norms if size > 0.0]
    if not changed:
        return group
    mean = fsum(size / len(changed) for size in changed)
    return group.times([(mean / size) ** strength if size > 0.0 else 1.0 for size in norms])
