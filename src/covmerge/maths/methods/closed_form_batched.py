r"""(Σ R_tC_t)(Σ C_t)† of layers of one shape at once; see `methods.closed_form.solve_cut_off`.

The layers go through the same steps, those together that come to the same one: Cholesky in their dtype,
Cholesky in float64, and where eigenvalues are cut off the eigenproblem, in which these are masked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import isfinite

import torch

from covmerge.base.types import LinearGroup, Merged, Rounding
from covmerge.maths.covariance.batched import BatchedEquations, batched_equations
from covmerge.maths.covariance.estimate import Covariance
from covmerge.maths.linalg.auto import cut_off_choice
from covmerge.maths.linalg.batched import (
    all_finite,
    factorize_all,
    flags,
    kept_eigenpairs_all,
    largest_eigenvalues,
    numbers,
    solve_right_all,
)
from covmerge.maths.linalg.pinv import least_of_full_rank
from covmerge.maths.methods.batched import all_active
from covmerge.maths.methods.closed_form import Active, CutOff


@dataclass(frozen=True)
class _Layer:
    """One layer: its place in the batch, its covariances, and where the spectrum of their sum ends."""

    place: int
    covariances: Sequence[Covariance]
    cutoff: float
    rounding: Rounding


def cut_off_batched(
    groups: Sequence[LinearGroup],
    covariances_of: Callable[[Active], Sequence[Covariance] | None],
    rtol: float | None,
) -> list[Merged | None]:
    """Solve layers `(d_out, d_in)` as `solve_cut_off` solves each; None: it is to do that one.

    (Σ R_tC_t)(Σ C_t)†  (ACTMat, Eq. 3; WUDI's objective)

    Args:
        groups: layers of one shape, dtype and number of experts.
        covariances_of: those of one layer; None: it is not for a batch.
        rtol: as in `solve_cut_off`.

    Raises:
        LinAlgError: LAPACK ends over one of the eigenproblems; nothing is returned then.

    Example:
        >>> from covmerge.maths.covariance.estimate import gram
        >>> groups = [LinearGroup((torch.eye(2) * s,), (1.0,)) for s in (1.0, 2.0)]
        >>> found = cut_off_batched(groups, lambda active: [gram(u) for u in active.updates], None)
        >>> [merged.delta.diagonal().tolist() for merged in found if merged is not None]
        [[1.0, 1.0], [2.0, 2.0]]
    """
    found: list[Merged | None] = [None] * len(groups)
    layers: list[_Layer] = []
    for place, active in enumerate(all_active(groups)):
        own = None if active is None else covariances_of(active)
        if active is not None and own is not None:
            layers.append(_Layer(place, own, *active.cut_off(own, rtol)))
    normal: BatchedEquations | None = None
    for dtype in dict.fromkeys((groups[0].updates[0].dtype, torch.float64)):
        if len(layers) < 2:
            return found
        exact = dtype == torch.float64
        normal = batched_equations(
            [[replace(c, exact=exact) for c in layer.covariances] for layer in layers]
        )
        left: list[int] = []
        for member, (layer, merged) in enumerate(
            zip(layers, _by_cholesky(normal, layers), strict=True)
        ):
            if merged is None:
                left.append(member)
            else:
                found[layer.place] = _of(merged, groups)
        layers = [layers[member] for member in left]
        normal = normal.only(left)
    if normal is not None and len(layers) > 1 and not _projected(normal):
        for layer, merged in zip(layers, _by_eigenpairs(normal, layers), strict=True):
            found[layer.place] = None if merged is None else _of(merged, groups)
    return found


def _projected(normal: BatchedEquations) -> bool:
    """Whether each is solved faster by itself, without an eigenproblem (`cut_off_right`)."""
    rows, side = normal.numerator.shape[1:]
    return cut_off_choice(side, rows, normal.gram.device.type).taken == "projector64"


def _of(merged: Merged, groups: Sequence[LinearGroup]) -> Merged:
    """The same in the dtype of the updates."""
    return replace(merged, delta=merged.delta.to(groups[0].updates[0].dtype))


def _by_cholesky(normal: BatchedEquations, layers: Sequence[_Layer]) -> list[Merged | None]:
    """Of the layers where nothing is cut off (`solve_full_rank`)."""
    dtype, n = normal.gram.dtype, normal.gram.shape[-1]
    largest = numbers(largest_eigenvalues(normal.gram))
    least = [
        least_of_full_rank(n, dtype, value, rtol=layer.cutoff, floor=layer.rounding.edge**2)
        if isfinite(value)
        else 0.0
        for value, layer in zip(largest, layers, strict=True)
    ]
    _, above = factorize_all(normal.gram, -torch.tensor(least, dtype=torch.float64))
    factors, solvable = factorize_all(normal.gram, torch.zeros(len(layers)))
    solved = normal.lift(solve_right_all(factors, normal.numerator))
    whole = above & solvable & all_finite(solved)
    solver = f"cholesky{torch.finfo(dtype).bits}"
    return [
        Merged(merged, CutOff(normal.route, layer.cutoff, n, solver, unchanged=0))
        if taken and 0.0 < value < torch.inf
        else None
        for merged, layer, taken, value in zip(solved, layers, flags(whole), largest, strict=True)
    ]


def _by_eigenpairs(normal: BatchedEquations, layers: Sequence[_Layer]) -> list[Merged | None]:
    """Of the layers whose eigenvalues are cut off (`pinv_right`), in float64."""
    d_out, d_in = layers[0].covariances[0].update.shape
    shape = (len(layers[0].covariances) * d_out, d_in)
    if not bool(torch.isfinite(normal.gram).all()):
        return [None] * len(layers)
    values, vectors, kept = kept_eigenpairs_all(
        normal.gram,
        rtols=[layer.cutoff for layer in layers],
        roundings=[layer.rounding for layer in layers],
        shape=shape,
    )
    ranks = [int(rank) for rank in numbers(kept.sum(1))]
    inverse = torch.where(kept, 1.0 / values, 0.0).unsqueeze(1)
    solved = normal.lift((normal.numerator @ vectors * inverse) @ vectors.mT)
    return [
        Merged(merged, CutOff(normal.route, layer.cutoff, rank, "eigen64", unchanged=0))
        for merged, layer, rank in zip(solved, layers, ranks, strict=True)
    ]
