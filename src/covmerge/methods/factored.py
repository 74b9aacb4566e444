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
from typing import Any

import torch
from torch import Tensor

from covmerge.linalg.basis import Basis, basis_of
from covmerge.linalg.lapack import svd
from covmerge.methods.registry import Method
from covmerge.types import Frame, Json, LinearGroup, LowRank


@dataclass(frozen=True)
class MergedFactors:
    """The merged update as U · core · Qᵀ, and what the method noticed.

    Attributes:
        left: U, a basis of the left factors and of 𝟏.
        core: `(p, q)`, float64.
        right: Q, a basis of the right factors.
        dtype: of the adapters.
        stats: what the method noticed.
    """

    left: Basis
    core: Tensor
    right: Basis
    dtype: torch.dtype
    stats: Mapping[str, Json]

    @property
    def delta(self) -> LowRank:
        """The merged update, exact, of rank min(p, q)."""
        return self.truncated(min(self.core.shape))[0]

    def truncated(self, rank: int) -> tuple[LowRank, Tensor]:
        """Return the best approximation of a rank, and all singular values.

        U and Q are orthonormal, so these are the singular values of the core. The factors share √σ,
        as trained ones do.
        """
        u, sigma, v = svd(self.core)
        root = sigma[:rank].sqrt()
        left = self.left.expand(u[:, :rank] * root)
        right = self.right.expand(v[:rank].mT * root).mT
        return LowRank(left, right).to(self.dtype), sigma


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
    d_out, d_in = updates[0].shape
    ones = updates[0].left.new_ones(d_out, 1)
    left = basis_of([*(update.left for update in updates), ones])
    right = basis_of([update.right.mT for update in updates])
    *lefts, ones_out = left.blocks
    # Cores are small, and float64 lets their rank be seen.
    cores = tuple(own @ other.mT for own, other in zip(lefts, right.blocks, strict=True))
    ones_in = right.coordinates(updates[0].right.new_ones(d_in))
    frame = Frame((d_out, d_in), ones_out[:, 0], ones_in)
    merged = method(LinearGroup(cores, tuple(weights), frame=frame), **parameters)
    return MergedFactors(left, merged.delta, right, updates[0].dtype, merged.stats)
