"""The numerical rank of a layer's updates: the limits set by computation, file and arithmetic before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import sqrt
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from covmerge.base.types import LinearGroup, Rounding
from covmerge.maths.linalg.joint import far_apart
from covmerge.maths.linalg.lapack import norm, square_norm
from covmerge.maths.linalg.pinv import largest_singular_values
from covmerge.maths.linalg.spectral import EXACT, RankRule, rank_tolerance, truncated_svd

RankRtol = Annotated[
    float | None,
    Field(
        ge=0,
        lt=1,
        description="numerical rank: σ > rank_rtol · σ_max; by default √max(d_out, d_in) · eps, and "
        "what rounding of the stored weights gives",
    ),
]
# ‖E‖² of rounding is as expected to a few per cent. A trained update makes ‖Δ‖² larger.
_AS_EXPECTED = 1.1
_OF_CORES = 256  # the least length assumed for products that may have made a small matrix


@dataclass(frozen=True)
class Resolution:
    """The limits below which directions of a group may be rounding."""

    # √max(d_out, d_in) · eps, eps the larger of the computing dtype's and that of the arithmetic
    # that made the updates
    rtol: float
    # rounding of the stored weights, per expert (`LinearGroup.rounding`)
    rounding: tuple[Rounding, ...]
    given: bool = False  # whether the user gave `rtol`, which replaces all other rules

    def separated(self, updates: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the updates; if their sizes are far apart, in float64 and cut to their numerical ranks.

        Otherwise the rounding of a large update would decide the directions of a small one.
        """
        if not far_apart([norm(update) for update in updates]):
            return tuple(updates)
        return tuple(
            truncated_svd(each, min(each.shape), self.rule(t)).product()
            for t, each in enumerate(updates)
        )

    def rule(self, expert: int) -> RankRule:
        """Return the rule for the numerical rank of the update of the expert at this place."""
        return RankRule(self.rtol, self.rounding[expert])

    def of_sum(self, group: LinearGroup) -> RankRule:
        """Return the rule for the numerical rank of S = Σ w_tΔ_t.

        If updates cancel, the error of arithmetic is `rtol` times the updates, not times S. No direction
        of S counts below rtol √(Σ w_t²σ₁(Δ_t)²), with d at least 256 in `rtol`, because longer products
        may have made a small matrix, such as a core.
        """
        if self.given:
            return RankRule(self.rtol)
        sizes = [float(largest_singular_values(update)) for update in group.updates]
        each = zip(self.rounding, group.weights, sizes, strict=True)
        rtol = self.rtol * max(1.0, sqrt(_OF_CORES / max(group.shape)))
        errors = [replace(error, floor=rtol * size).times(weight) for error, weight, size in each]
        return RankRule(self.rtol, of_terms(group.updates, self.rounding, errors))

    def changed(self, group: LinearGroup) -> list[tuple[Tensor, float, RankRule]]:
        """Return update, weight and rule of the experts that changed the layer."""
        each = enumerate(zip(group.updates, group.weights, strict=True))
        return [(update, weight, self.rule(t)) for t, (update, weight) in each if update.any()]


def of_terms(
    updates: Sequence[Tensor], rounding: Sequence[Rounding], weighted: Sequence[Rounding]
) -> Rounding:
    """Return the rounding of Σ w_tΔ_t, from the updates, their rounding, and the same times w_t.

    Errors of copies are one error: they add up linearly, and independent errors by their squares. For
    independent errors E the difference Δ_s − Δ_t has ‖E_s‖² + ‖E_t‖² at least. If it has less, the missing
    share ρ is common to both errors: ‖Σ w_tE_t‖² = Σ ρ_st w_sw_t ‖E_s‖ ‖E_t‖.
    """
    whole = Rounding.together(weighted)
    sizes = [
        norm(update) if error.energy else 0.0
        for update, error in zip(updates, rounding, strict=True)
    ]
    shared = 0.0
    for s, t in combinations(range(len(updates)), 2):
        apart = rounding[s].energy + rounding[t].energy
        if apart and (sizes[s] - sizes[t]) ** 2 < apart:
            rho = max(0.0, 1.0 - square_norm(updates[s] - updates[t]) / apart)
            shared += 2.0 * rho * sqrt(weighted[s].energy * weighted[t].energy)
    if not shared:
        return whole
    more = 1.0 + shared / whole.energy
    return replace(
        whole, edge=sqrt(more) * whole.edge, energy=more * whole.energy, before=more * whole.before
    )


def without_rounding(group: LinearGroup) -> LinearGroup:
    """Return the group with zeros for updates that are rounding of the stored weights alone.

    Such an expert stores the base's weights in fewer digits, as of a layer that was frozen. It did not
    change the layer. Scaled to the size of the others, its rounding would hide their directions.

    Example:
        >>> import torch
        >>> error = Rounding(edge=0.1, energy=0.02)
        >>> pair = torch.eye(2), 0.1 * torch.eye(2)
        >>> group = LinearGroup(pair, (1.0, 1.0), rounding=(error, error))
        >>> [bool(update.any()) for update in without_rounding(group).updates]
        [True, False]
    """
    if not group.rounding or group.factors:
        return group
    pairs = list(zip(group.updates, group.rounding, strict=True))
    rounded = [_is_rounding(update, error) for update, error in pairs]
    if not any(rounded):
        return group
    updates = [
        torch.zeros_like(update) if only else update
        for (update, _), only in zip(pairs, rounded, strict=True)
    ]
    return replace(group, updates=tuple(updates))


def _is_rounding(update: Tensor, error: Rounding) -> bool:
    """Whether ‖Δ‖² is that of rounding of the weights, and σ₁(Δ) no larger than rounding can make it."""
    share = square_norm(update) / error.energy if error.energy else 0.0
    if not 1 / _AS_EXPECTED < share < _AS_EXPECTED:
        return False
    return bool(largest_singular_values(update) <= error.edge)


def resolution(group: LinearGroup, rank_rtol: float | None) -> Resolution:
    """Return a group's resolution; a tolerance given by the user replaces all of it.

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
