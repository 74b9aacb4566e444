r"""Steps 1 and 2 of `auto`, of one layer and of several at once: R = (Σ b_tΔ_tC_t)(ΣC_t)⁻¹, and Ĝ.

C_t = Δ_tᵀΔ_t / ‖Δ_t‖² + 0.1 I / d_in, s_tw_t times. Outside the inputs that the updates together use
there is nothing but rounding, which the ridge would let grow a hundredfold, and the spectrum's lift once
more: R is zero there. `docs/auto.md` derives it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import sqrt

import torch
from torch import Tensor

from covmerge.base.types import Rounding
from covmerge.maths.covariance.batched import BatchedEquations, batched_equations
from covmerge.maths.covariance.estimate import Covariance
from covmerge.maths.covariance.mixed import solve_mixed
from covmerge.maths.covariance.normal import normal_equations
from covmerge.maths.covariance.told import UNTOLD
from covmerge.maths.linalg.auto import precision_choice
from covmerge.maths.linalg.batched import (
    all_finite,
    factorize_all,
    flags,
    kept_eigenpairs_all,
    largest_eigenvalues,
    numbers,
    solve_right_all,
)
from covmerge.maths.linalg.cholesky import all_above
from covmerge.maths.linalg.pinv import kept_eigenpairs, largest_eigenvalue
from covmerge.maths.linalg.spectral import truncated_svd
from covmerge.maths.methods.closed_form import Active, solve_ridge
from covmerge.maths.methods.equalise import Counted

# An eigenvalue that is larger than where the rank ends by so much is in it, whatever rounding did.
_CLEARLY = 1.1


def roots_of_told(active: Active, shares: Tensor) -> list[float]:
    """What makes each update a root of Ĝ: Σ s_tw_t Δ_tᵀΔ_t/‖Δ_t‖², of mean eigenvalue 1."""
    counts = [weight * float(s) for weight, s in zip(active.weights, shares, strict=True)]
    to_mean_one = active.d_in / sum(counts)
    pairs = zip(counts, active.norms, strict=True)
    return [sqrt(count * to_mean_one) / size for count, size in pairs]


def least_squares(counted: Counted, rtol: float) -> Tensor:
    """Return R `(d_out, d_in)`, float64; the rank of the updates ends at `rtol`."""
    active = counted.active
    covariances = _covariances(counted)
    rounding = _rounding(active, covariances)
    energy = sum(own.scale * size**2 for own, size in zip(covariances, active.norms, strict=True))
    floor = _CLEARLY * _end(rtol, energy, rounding)
    solved = solve_mixed(covariances, energy=energy, floor=floor)
    if solved is not None:
        return solved
    normal = normal_equations([replace(own, exact=True) for own in covariances])
    floor = _end(rtol, largest_eigenvalue(normal.gram), rounding)
    if all_above(normal.gram, _CLEARLY * floor):
        return solve_ridge(normal)[0]
    d_out, d_in = active.updates[0].shape
    stacked = (len(covariances) * d_out, d_in)
    if normal.basis is not None and active.updates[0].dtype == torch.float64:
        # DDᵀ has directions of 1e-8 and less of the longest for rounding, and loses what it takes for zero
        # with the weight that opposite updates have there.
        top = truncated_svd(normal.basis, min(stacked), rtol=rtol, rounding=rounding)
        values, vectors = top.kept.square(), top.left
    else:
        values, vectors = kept_eigenpairs(
            normal.gram, rtol=rtol**2, rounding=rounding, shape=stacked
        )
    coordinates = (normal.numerator @ vectors) / (values + normal.ridge)
    return normal.lift(coordinates @ vectors.mT)


def least_squares_all(layers: Sequence[Counted], rtol: float) -> tuple[Tensor, list[bool]]:
    """Return R `(n, d_out, d_in)` of layers of one shape, of their dtype, and which of them are known.

    Where products in float32 are the cheaper ones, layers go one after another: how many directions
    these keep apart is each layer's own.
    """
    first = layers[0].active.updates[0]
    d_out, d_in = first.shape
    count = len(layers[0].active.updates)
    choice = precision_choice(d_out, d_in, count, first.dtype.itemsize, first.device.type)
    if choice.taken == "mixed":
        solved = torch.stack([least_squares(own, rtol).to(first.dtype) for own in layers])
        return solved, flags(all_finite(solved))
    covariances = [[replace(c, exact=True) for c in _covariances(own)] for own in layers]
    roundings = [_rounding(own.active, each) for own, each in zip(layers, covariances, strict=True)]
    normal = batched_equations(covariances)
    pairs = zip(numbers(largest_eigenvalues(normal.gram)), roundings, strict=True)
    floors = torch.tensor([_end(rtol, *pair) for pair in pairs], dtype=torch.float64)
    _, above = factorize_all(normal.gram, -_CLEARLY * floors)
    factors, known = factorize_all(normal.gram, normal.ridges)
    solved = normal.lift(solve_right_all(factors, normal.numerator))
    del factors
    ends = [member for member, own in enumerate(flags(above)) if not own]
    if ends and normal.basis is not None and first.dtype == torch.float64:
        known[ends] = False  # by an SVD: see above
    elif ends:
        found = _within_rank(
            normal.only(ends), [roundings[member] for member in ends], rtol, count * d_out
        )
        solved[ends], known[ends] = found, True
    solved = solved.to(first.dtype)
    return solved, flags(known & all_finite(solved))


def _within_rank(
    normal: BatchedEquations, roundings: Sequence[Rounding], rtol: float, rows: int
) -> Tensor:
    """Of layers whose updates leave inputs out: these are masked."""
    shape = (rows, normal.gram.shape[-1] if normal.basis is None else normal.basis.shape[-1])
    values, vectors, kept = kept_eigenpairs_all(
        normal.gram, rtols=[rtol**2] * len(roundings), roundings=roundings, shape=shape
    )
    inverse = torch.where(kept, 1.0 / (values + normal.ridges.unsqueeze(1)), 0.0)
    coordinates = (normal.numerator @ vectors) * inverse.unsqueeze(1)
    return normal.lift(coordinates @ vectors.mT)


def _covariances(counted: Counted) -> list[Covariance]:
    """s_tw_t C_t of every expert, with b_t as the length of its update."""
    active = counted.active
    ridge = UNTOLD / active.d_in
    each = zip(active.updates, active.norms, counted.bounds, strict=True)
    counts = zip(active.weights, counted.shares, strict=True)
    return [
        Covariance(update, scale=1.0 / size**2, ridge=ridge, length=own).times(weight * float(s))
        for (update, size, own), (weight, s) in zip(each, counts, strict=True)
    ]


def _rounding(active: Active, covariances: Sequence[Covariance]) -> Rounding:
    """What rounding of the stored weights gives to D = [√s_t Δ_t]_t."""
    pairs = zip(active.rounding, covariances, strict=True)
    return Rounding.together(error.times(sqrt(own.scale)) for error, own in pairs)


def _end(rtol: float, largest: float, rounding: Rounding) -> float:
    """The eigenvalue of DᵀD at which the rank of D may end."""
    return max(rtol**2 * largest, rounding.edge**2)
