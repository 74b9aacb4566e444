"""What methods that merge several groups at once share: which of them a batch can take."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

import torch

from covmerge.base.types import LinearGroup
from covmerge.maths.linalg.batched import norms, numbers
from covmerge.maths.linalg.spectral import EXACT
from covmerge.maths.methods.closed_form import Active

# Norms of updates whose squares, and those of their Gram matrices, are far inside float32.
_EASY = (1e-8, 1e8)


def norms_of_updates(groups: Sequence[LinearGroup]) -> list[list[float]]:
    """‖Δ_t‖_F of every expert of every group, read from the device at once.

    Example:
        >>> norms_of_updates([LinearGroup((torch.eye(4), 2 * torch.eye(4)), (1.0, 1.0))])
        [[2.0, 4.0]]
    """
    experts = range(len(groups[0].updates))
    each = [norms(torch.stack([group.updates[t] for group in groups])) for t in experts]
    return [numbers(own) for own in torch.stack(each, 1)]


def all_active(groups: Sequence[LinearGroup]) -> list[Active | None]:
    """What `active_experts` says of each group; None where a batch cannot take it.

    That is where an expert did not change the layer, so that it leaves the sums, where one is not finite or
    of a size that needs care, and where the group is in coordinates of its own (`LinearGroup.frame`).

    Example:
        >>> groups = [LinearGroup((torch.eye(2), torch.eye(2) * s), (1.0, 3.0)) for s in (1.0, 0.0)]
        >>> [None if found is None else found.weights for found in all_active(groups)]
        [(0.5, 1.5), None]
    """
    return [
        _active(group, own) for group, own in zip(groups, norms_of_updates(groups), strict=True)
    ]


def _active(group: LinearGroup, sizes: Sequence[float]) -> Active | None:
    if group.frame is not None or not all(_EASY[0] < size < _EASY[1] for size in sizes):
        return None
    mean = fmean(group.weights)
    return Active(
        updates=group.updates,
        weights=tuple(weight / mean for weight in group.weights),
        norms=tuple(sizes),
        rounding=group.rounding or (EXACT,) * len(sizes),
        unchanged=0,
        d_in=group.shape[1],
    )
