"""Where the numerical rank of a layer's updates ends: by the computation, the file and what made it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import sqrt
from typing import Annotated

from pydantic import Field
from torch import Tensor

from covmerge.base.types import LinearGroup, Rounding
from covmerge.maths.linalg.joint import far_apart
from covmerge.maths.linalg.lapack import norm, square_norm
from covmerge.maths.linalg.pinv import largest_singular_values
from covmerge.maths.linalg.spectral import EXACT, rank_tolerance, truncated_svd

RankRtol = Annotated[
    float | None,
    Field(
        ge=0,
        lt=1,
        description="numerical rank: σ > rank_rtol · σ_max; by default √max(d_out, d_in) · eps, and "
        "what rounding of the stored weights gives",
    ),
]
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

    def separated(self, updates: Sequence[Tensor]) -> tuple[Tensor, ...]:
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
        errors = [replace(error, floor=rtol * size).times(weight) for error, weight, size in each]
        return of_terms(group.updates, self.rounding, errors)

    def changed(self, group: LinearGroup) -> list[tuple[Tensor, float, Rounding]]:
        """Update, weight and rounding of the experts that changed the layer."""
        each = zip(group.updates, group.weights, self.rounding, strict=True)
        return [(update, weight, error) for update, weight, error in each if update.any()]


def of_terms(
    updates: Sequence[Tensor], rounding: Sequence[Rounding], weighted: Sequence[Rounding]
) -> Rounding:
    """What rounding gives to Σ w_tΔ_t, of the updates, what it gave to each, and the same times w_t.

    Errors of copies are one error: they add up as they are, and independent ones by their squares. Of
    independent errors E the difference Δ_s − Δ_t has ‖E_s‖² + ‖E_t‖² at least, and what it has less is the
    share ρ of the errors that both have: ‖Σ w_tE_t‖² = Σ ρ_st w_sw_t ‖E_s‖ ‖E_t‖.
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
