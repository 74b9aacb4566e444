"""What ACE-Merging goes by, of one layer and of several at once: its constants and where a rank ends."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

import torch
from torch import Tensor

from covmerge.base.types import Rounding
from covmerge.maths.covariance.estimate import TRACE_FLOOR, Covariance
from covmerge.maths.linalg.joint import joint_directions
from covmerge.maths.linalg.spectral import has_above, rank_tolerance
from covmerge.maths.methods.closed_form import Active

# Share of an update's energy that centring must leave. A mean row of random rows has 1/d_out of it.
BLIND = 1e-2
# An expert with so much ridge for its whole energy leaves the sums. The published code's own outputs
# that covmerge is held to go up to 125 (`golden/ace_eps0.04`).
DROWNED = 200.0
# The condition number up to which sums and solve in float32 agree with float64's to 2e-3: in d_in axes
# the error is 1.5 eps times it, in the row space of the updates a hundredth of that
# (tests/methods/test_precision.py).
FLOAT32_CONDITION = 1e4
# A solve may make rounding of stored weights so many times as long; beyond that it leaves it out. It is an
# order of magnitude, and was compared with no other value.
AMPLIFIED = 10.0
# σ/σ₁ of a direction that the rounding of a well-conditioned solve cannot have made.
_CLEAR = 1e-2


def ridge_share(covariances: Sequence[Covariance], energies: Sequence[float], d_in: int) -> float:
    """The most that a ridge has in an expert's covariance: ε d_in over Tr Δ̃_tᵀΔ̃_t, the experts' energies.

    From about 1 on ACE follows the ridge in place of that expert.
    """
    pairs = zip(covariances, energies, strict=True)
    return max(c.ridge * d_in / (c.scale * energy + TRACE_FLOOR) for c, energy in pairs)


def wanted_directions(
    shape: Sequence[int], dtype: torch.dtype, k_frac: float, rank_rtol: float | None
) -> tuple[int, float]:
    """Return k of Eq. 18, and where the numerical rank of W̄_fused ends."""
    rtol = max(shape) * torch.finfo(dtype).eps if rank_rtol is None else rank_rtol
    return max(1, int(k_frac * min(shape))), rtol


def stands_clear(sigma: Tensor, k: int) -> bool:
    """Whether the k-th singular value, of descending ones, is above what a solve's rounding may make."""
    return float(sigma[k - 1]) > _CLEAR * float(sigma[0])


def known_rank(active: Active, shape: Sequence[int], dtype: torch.dtype, enough: int) -> int:
    """The numerical rank of the updates' row space, each of norm 1: none is lost beside another.

    Where one update alone has `enough` directions of it, and more is not asked, that is the answer: of
    updates below one another no singular value is less than of one of them.
    """
    rtol = rank_tolerance(shape, dtype, None, active.rounding)
    errors = [e.times(1 / size) for e, size in zip(active.rounding, active.norms, strict=True)]
    # Updates of norm 1 have no singular value together that is more than √T.
    floor = max(rtol * sqrt(len(errors)), Rounding.together(errors).edge)
    longest = max(range(len(errors)), key=active.norms.__getitem__)
    if has_above(active.updates[longest], enough, floor * active.norms[longest]):
        return enough
    units = [update.mT / size for update, size in zip(active.updates, active.norms, strict=True)]
    return max(1, len(joint_directions(units, rtol=rtol, rounding=errors).sigma))
