r"""Methods on adapters: exact, and without ever forming a `(d_out, d_in)` matrix.

All updates Δ_t = B_tA_t of a layer lie in the span of Q = orth([A_1; …; A_T]ᵀ) on the right and of
U = orth([B_1 … B_T, 𝟏]) on the left. A method that turns with its inputs, f(UΔQᵀ) = U f(Δ) Qᵀ, is
run on the cores UᵀΔ_tQ, whose sides are Σr + 1 and Σr, and its result is U · f(cores) · Qᵀ: an
adapter of rank at most Σr. ACE does not turn with its inputs, but only through 𝟏, on both sides:
it gets Uᵀ𝟏 and Qᵀ𝟏 (`Frame`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from covmerge.methods.registry import Method
from covmerge.types import Frame, Json, LinearGroup, LowRank

_linalg: Any = torch.linalg


@dataclass(frozen=True)
class MergedFactors:
    """The merged update by its factors, in the dtype of the adapters, and what the method noticed."""

    delta: LowRank
    stats: Mapping[str, Json]


def merge_factors(
    method: Method,
    updates: Sequence[LowRank],
    weights: Sequence[float],
    parameters: Mapping[str, Any],
) -> MergedFactors:
    """Run a method on the cores of low-rank updates.

    Args:
        method: one whose `factored_for(parameters)` holds.
        updates: of one shape, dtype and device.
        weights: one positive number per update.
        parameters: as `method.resolve` returns them.

    Example:
        >>> from covmerge.methods import get
        >>> average = get("average")
        >>> a = LowRank(torch.ones(3, 1), torch.ones(1, 2))
        >>> merge_factors(average, [a, a], [1.0, 1.0], {}).delta.dense()[0].round().tolist()
        [1.0, 1.0]
    """
    dtype = updates[0].left.dtype
    # Bases and cores are small: float64 costs little, and lets a rank be seen.
    lefts = [update.left.to(torch.float64) for update in updates]
    rights = [update.right.to(torch.float64) for update in updates]
    d_out, d_in = updates[0].shape
    ones_out, ones_in = lefts[0].new_ones(d_out, 1), lefts[0].new_ones(d_in)
    left = _orthonormal(torch.cat([*lefts, ones_out], dim=1))
    right = _orthonormal(torch.cat(rights).mT)
    cores = tuple(
        (left.mT @ own_left) @ (own_right @ right)
        for own_left, own_right in zip(lefts, rights, strict=True)
    )
    frame = Frame((d_out, d_in), left.mT @ ones_out[:, 0], right.mT @ ones_in)
    group = LinearGroup(cores, tuple(weights), frame=frame)
    merged = method(group, **parameters)
    if merged.delta.shape[0] < merged.delta.shape[1]:
        factors = left, merged.delta @ right.mT
    else:
        factors = left @ merged.delta, right.mT
    return MergedFactors(LowRank(*(factor.to(dtype) for factor in factors)), merged.stats)


def _orthonormal(columns: Tensor) -> Tensor:
    """An orthonormal basis whose span holds that of the columns."""
    return cast("Tensor", _linalg.qr(columns)[0])
