"""Compress-then-Merge: updates are compressed into two bases of few directions, and merged there."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import nan
from typing import Annotated

import torch
from pydantic import Field

from covmerge.base.types import LinearGroup, Merged
from covmerge.maths.linalg.auto import FLOAT64, Cost, joint_cost, svd_cost
from covmerge.maths.linalg.joint import tucker2
from covmerge.maths.methods.arithmetic import Strength, balanced
from covmerge.maths.methods.inner import (
    InnerCombine,
    InnerDensity,
    InnerParameter,
    InnerRankRatio,
    InnerScale,
    Inside,
    cores_of,
    merge_inside,
)
from covmerge.maths.methods.registry import EQUIVARIANT, Reference, register
from covmerge.maths.methods.resolution import RankRtol, resolution

_RANK = 16
_ROUNDS = 20  # rounds that plans assume for the bases; adapters mostly take as many


@dataclass(frozen=True)
class Compressed(Inside):
    """Diagnostics of the bases, beside those of the method that merged in them."""

    rounds: int | None = None  # how often both bases were recomputed
    share_held: float | None = None  # the share of the balanced updates' energy that the bases hold


def _cost(d_out: int, d_in: int, count: int, itemsize: int) -> Cost:
    # The cost of full models, whose directions fill both sides, at the default rank.
    left = joint_cost(d_out, d_in, count, itemsize)
    right = joint_cost(d_in, d_out, count, itemsize)
    coordinates = FLOAT64 * 2.0 * d_out * d_in * (d_out + d_in) * count
    projections = FLOAT64 * 4.0 * d_out * d_in * _RANK * count
    bases = [svd_cost(d, count * _RANK, _RANK, 8) for d in (d_out, d_in)]
    rounds = Cost(projections, 0).then(*bases).times(_ROUNDS)
    updates = count * d_out * d_in
    rounds += Cost(coordinates, (updates + 5 * d_out * d_in) * 8)
    return left.then(right, rounds) + Cost(0.0, updates * itemsize + (d_out**2 + d_in**2) * 8)


@register(
    "ctm",
    equation="W̄ = W₀ + U f(UᵀΔ_1V, …, UᵀΔ_TV) Vᵀ,  U, V: of r directions, the least "
    "Σ‖Δ̂_t − UUᵀΔ̂_tVVᵀ‖²,  Δ̂_t = Δ_t(1 − s + s · mean_u ‖Δ_u‖ / ‖Δ_t‖)",
    reference=Reference(
        title="Compress then Merge: From Multiple LoRAs into One Low-Rank Adapter",
        venue="ICML 2026",
        arxiv="2606.03723",
        equations="the authors' code, `merge_space=low_rank_core`",
    ),
    laws=EQUIVARIANT.copies_give(
        nan,  # depends on the number of the expert's directions
        "what the inner method makes of copies of the expert, truncated to rank r",
    ),
    cost=_cost,
    factored="both",
    diagnostics=Compressed,
    published_tuning="λ, the density and s (their β is 1 − s), on labelled validation data",
)
def ctm(
    group: LinearGroup,
    *,
    core_rank: Annotated[
        int, Field(ge=1, description="r: directions of each basis, and the rank of the result")
    ] = _RANK,
    inner: InnerParameter = "ties",
    strength: Strength = 1.0,
    density: InnerDensity = 0.2,
    scale: InnerScale = 1.0,
    merge: InnerCombine = "mean",
    rank_ratio: InnerRankRatio = 0.12,
    rank_rtol: RankRtol = None,
) -> Merged:
    """Compress the updates into two bases of r directions, and merge the cores by another method.

    W̄ = W₀ + U f(UᵀΔ_1V, …, UᵀΔ_TV) Vᵀ,  U `(d_out, r)`, V `(d_in, r)` orthonormal and the least
    Σ‖Δ̂_t − UUᵀΔ̂_tVVᵀ‖²,  Δ̂_t = Δ_t(1 − s + s · mean_u ‖Δ_u‖ / ‖Δ_t‖)  (Compress-then-Merge)

    The result has rank r, and loses nothing if it is written as an adapter of that rank (`--rank r`).
    The bases are a Tucker decomposition along outputs and inputs, by HOSVD and then HOOI. They are made of
    the updates Δ̂_t with balanced norms (the step `norm_balance`), so that no short expert is left out; the
    cores are made of the updates themselves. The authors' `isotropize`, a flat spectrum of the sum, is
    `inner: iso_c` here.

    Args:
        group: updates `(d_out, d_in)`; weights as in the inner method; they do not change the bases.
        core_rank: r; if the updates together have fewer directions, all of them.
        inner: f; TIES in the authors' example.
        strength: s, how far the norms are balanced; the authors' β is 1 − s.
        density: density of TIES, as in `ties`; likewise `merge`. N counts the entries of one core.
        rank_rtol: the relative cut-off of the numerical rank of the updates together, and in the inner
            method.

    Departs from the paper: LoRA's α/r is part of an update (the published code leaves it out). All
    directions whose singular values equal the r-th are kept, so the rank may be above r. If the updates
    together have fewer directions than r, the bases end there (published: arbitrary ones follow, up to the
    ranks of all adapters together). An expert that did not change the layer has no part in the bases or in
    the mean norm (published: 0/0). Where norms differ by more than 50-fold, each update is taken within its
    own numerical rank, in float64. DARE, alone or before TIES, is not among the inner methods, which depart
    as on their pages.

    Example:
        >>> a, b = torch.diag(torch.tensor([3.0, 0.0])), torch.diag(torch.tensor([0.0, 1.0]))
        >>> group = LinearGroup((a, b), weights=(1.0, 1.0))
        >>> ctm(group, inner="task_arithmetic").delta.round(decimals=4).abs().tolist()
        [[3.0, 0.0], [0.0, 1.0]]
    """
    like = group.updates[0]
    targets = balanced(group, strength)
    known = resolution(targets, rank_rtol)
    changed = [t for t, update in enumerate(targets.updates) if update.any()]
    diagnostics = Compressed(len(group.updates) - len(changed))
    if not changed:
        return Merged(torch.zeros_like(like), diagnostics)
    apart = known.separated(targets.updates)
    bases = tucker2(
        [apart[t] for t in changed],
        core_rank,
        rtol=known.rtol,
        rounding=[known.rounding[t] for t in changed],
    )
    del targets, apart
    left, right = bases.left.left, bases.right.left
    if not left.shape[1]:  # at most rounding of the stored weights
        return Merged(torch.zeros_like(like), replace(diagnostics, core=(0, 0)))
    if inner == "ties":
        diagnostics = replace(
            diagnostics, arbitrary=bases.left.arbitrary + bases.right.arbitrary or None
        )
    cores = cores_of(resolution(group, rank_rtol).separated(group.updates), left, right)
    inside = LinearGroup(cores, group.weights, rounding=group.rounding)
    merged = merge_inside(inside, inner, scale, density, merge, rank_ratio, rank_rtol)
    diagnostics = replace(
        diagnostics,
        core=(left.shape[1], right.shape[1]),
        rounds=bases.iterations,
        share_held=bases.energy,
    )
    delta = left @ merged.delta.to(torch.float64) @ right.mT
    return Merged(delta.to(like.dtype), diagnostics.beside(merged))
