"""Updates brought to one norm, as the step `norm_balance` does."""

from __future__ import annotations

from math import fsum
from typing import Annotated

from pydantic import Field

from covmerge.base.types import LinearGroup
from covmerge.maths.linalg.lapack import norm

Strength = Annotated[
    float,
    Field(
        ge=0.0,
        le=1.0,
        description="how far norms go towards their mean: 1 makes them equal, 0 changes nothing",
    ),
]


def balanced(group: LinearGroup, strength: float) -> LinearGroup:
    """Return the group with the norm of every update so far on its way to the experts' mean norm.

    The mean is over the experts that changed the layer; one that did not stays as it is.

    Example:
        >>> import torch
        >>> group = LinearGroup((torch.tensor([[1.0]]), torch.tensor([[3.0]])), (1.0, 1.0))
        >>> [update.item() for update in balanced(group, 0.5).updates]
        [1.5, 2.5]
    """
    norms = [norm(update) for update in group.updates]
    changed = [size for size in norms if size > 0.0]
    mean = fsum(size / len(changed) for size in changed)
    return group.times(
        [1.0 - strength + strength * mean / size if size > 0.0 else 1.0 for size in norms]
    )
