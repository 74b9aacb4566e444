"""Where the numerical rank of a layer's updates ends: by the computation, the file and what made it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import sqrt

from torch import Tensor

from covmerge.base.types import LinearGroup, Rounding
from covmerge.maths.linalg.joint import far_apart
from covmerge.maths.linalg.lapack import norm
from covmerge.maths.linalg.pinv import largest_singular_values
from covmerge.maths.linalg.spectral import EXACT, rank_tolerance, truncated_svd

_OF_CORES = 256  # the least length of the products that may have made a small matrix


@dataclass(frozen=True)
class Resolution:
    """What can be told from rounding.

    Attributes:
        rtol: of all arithmetic: √max(d_out, d_in) · eps, the larger one of the dtype that computes and of
            what made the updates.
        rounding: of the stored weights, per expert (`LinearGroup.rounding`).
        given: whether the user gave `rtol`, which takes the place of all rules.
    """

    rtol: float
    rounding: tuple[Rounding, ...]
    given: bool = False

    def told_apart(self, updates: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the updates; where their sizes are far apart, in float64 and within their own ranks.

        The rounding of a large update would decide how the directions of a small one lie.
        """
        if not far_apart([norm(update) for update in updates]):
            return tuple(updates)
        return tuple(
            truncated_svd(each, min(each.shape), rtol=self.rtol, rounding=error).product()
            for each, error in zip(updates, self.rounding, strict=True)
        )

    def of_sum(self, group: LinearGroup, sizes: Sequence[float] | None = None) -> Rounding:
        """What rounding gives to S = Σ w_tΔ_t.

        Where updates cancel, arithmetic is off by `rtol` of them and not of S: no direction of S is below
        rtol √(Σ w_t²σ₁(Δ_t)²), with d at least 256 in `rtol`: longer products may have made a small
        matrix, which may be a core. `sizes`: σ₁(Δ_t), where they are known.
        """
        if self.given:
            return EXACT
        if sizes is None:
            sizes = [float(largest_singular_values(update)) for update in group.updates]
        each = zip(self.rounding, group.weights, sizes, strict=True)
        rtol = self.rtol * max(1.0, sqrt(_OF_CORES / max(group.shape)))
        return Rounding.together(
            replace(error, floor=rtol * size).times(weight) for error, weight, size in each
        )

    def changed(self, group: LinearGroup) -> list[tuple[Tensor, float, Rounding]]:
        """Update, weight and rounding of the experts that changed the layer."""
        each = zip(group.updates, group.weights, self.rounding, strict=True)
        return [(update, weight, error) for update, weight, error in each if update.any()]


def resolution(group: LinearGroup, rank_rtol: float | None) -> Resolution:
    """Return a group's resolution; a tolerance that the user gives takes the place of all of it.

    Example:
        >>> import torch
        >>> group = LinearGroup((torch.eye(4),), (1.0,), rounding=(Rounding(0.1, 0.2),))
        >>> resolution(group, None).rounding[0].edge, resolution(group, 0.5).rounding[0].edge
        (0.1, 0.0)
    """
    rtol = rank_tolerance(group.shape, group.updates[0].dtype, rank_rtol, group.rounding)
    unknown = rank_rtol is not None or not group.rounding
    rounding = (EXACT,) * len(group.updates) if unknown else group.rounding
    return Resolution(rtol, rounding, given=rank_rtol is not None)
