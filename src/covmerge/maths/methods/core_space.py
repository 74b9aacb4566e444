"""Core Space: adapters are merged in bases of all their factors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from covmerge.base.types import LinearGroup, LowRank, Merged
from covmerge.maths.linalg.auto import FLOAT64, Cost, joint_cost, svd_cost
from covmerge.maths.linalg.joint import far_apart, joint_directions
from covmerge.maths.linalg.lapack import norm
from covmerge.maths.linalg.spectral import RankRule, rank_tolerance, truncated_svd
from covmerge.maths.methods.inner import (
    InnerCombine,
    InnerDensity,
    InnerParameter,
    InnerRankRatio,
    InnerScale,
    Inside,
    cores_of,
    inner_replicas,
    merge_inside,
)
from covmerge.maths.methods.iso import flattened
from covmerge.maths.methods.registry import EQUIVARIANT, Parameters, Reference, register, registry
from covmerge.maths.methods.resolution import RankRtol, resolution

_KNOWN = 1e-8  # resolution of a float64 Gram eigenproblem, relative to the longest update


def _cost(d_out: int, d_in: int, count: int, itemsize: int, *, inner: str = "tsv_m") -> Cost:
    # The cost of full models, whose factors fill both sides.
    side = min(d_out, d_in)
    each = svd_cost(d_out, d_in, side, itemsize)
    left = joint_cost(d_out, side, count, itemsize)
    right = joint_cost(d_in, side, count, itemsize)
    inside = registry.get(inner).cost(d_out, d_in, count, itemsize)
    products = FLOAT64 * 2.0 * d_out * d_in * (d_out + d_in) * (count + 1)
    factors = count * side * (d_out + d_in) * itemsize
    bases = (d_out**2 + d_in**2) * 8
    cores = (count * itemsize + 8 + 8) * d_out * d_in
    in_bases = left.then(right) + Cost(0.0, bases)
    of_factors = each.times(count).then(in_bases) + Cost(0.0, factors)
    return of_factors.then(inside + Cost(products, bases + cores))


def _replicas(parameters: Parameters, count: int) -> float | None:
    return None if parameters["isotropize"] else inner_replicas(parameters, count)


@register(
    "core_space",
    equation="W̄ = W₀ + U f(UᵀΔ_1V, …, UᵀΔ_TV) Vᵀ,  Δ_t = B_tA_t,  "
    "U, V: left singular vectors of [B_1 … B_T], [A_1ᵀ … A_Tᵀ]",
    reference=Reference(
        title="Accurate and Efficient Low-Rank Model Merging in Core Space",
        venue="NeurIPS 2025",
        arxiv="2509.17786",
        equations="Core Space",
    ),
    laws=EQUIVARIANT.copies_give(
        _replicas,
        "what the inner method makes of copies, with a flat spectrum where `isotropize` is on",
    ),
    cost=_cost,
    factored="both",
    diagnostics=Inside,
    published_tuning="α, on labelled validation data",
)
def core_space(
    group: LinearGroup,
    *,
    inner: InnerParameter = "tsv_m",
    isotropize: Annotated[
        bool, Field(description="give the merged core a flat spectrum, as `iso_c` does")
    ] = True,
    density: InnerDensity = 0.2,
    scale: InnerScale = 1.0,
    merge: InnerCombine = "mean",
    rank_ratio: InnerRankRatio = 0.12,
    rank_rtol: RankRtol = None,
) -> Merged:
    """Merge the cores of the updates, in bases of all their factors, by another method.

    W̄ = W₀ + U f(UᵀΔ_1V, …, UᵀΔ_TV) Vᵀ,  Δ_t = B_tA_t  (Core Space), with the left singular
    vectors U of [B_1 … B_T] and V of [A_1ᵀ … A_Tᵀ]. A core has sides of at most Σr.

    If f turns with its updates (all but `ties` do), this is f on the updates, except for counts: r/T of
    TSV-Merge and k of CART depend on the sides of the core. With `ties` the bases matter, and so does the
    factorisation of each update. An adapter comes with its factors. An update that came multiplied out (a
    full model, a part of a fused tensor) is B_t = U_tσ_t^½, A_t = σ_t^½V_tᵀ of its singular value
    decomposition, within its numerical rank. `arbitrary` in the diagnostics counts the bases' directions
    with equal singular values, which may be rotated into each other.

    Args:
        group: updates `(d_out, d_in)`; weights as in the inner method.
        density: density of TIES, as in `ties`; likewise `merge`. N counts the entries of one core.
        rank_rtol: the relative cut-off of the numerical rank of updates, factors and the merged core.

    Departs from the paper: LoRA's α/r is part of B_t (the published code leaves it out). The bases end at
    the numerical rank of the factors, and a flat spectrum at that of the merged core (published: arbitrary
    directions beyond it are raised to the mean). Where norms differ by more than 50-fold, the bases are
    those of updates scaled to one size, and the cores are merged in float64: a flat spectrum depends on the
    number of directions, and those of a small update count as much as any other's. An expert that did not
    change the layer has no part in the bases. The inner methods depart as on their pages.

    Experts that cancel leave directions of rounding only. These are left out, as in `iso_c`, if the norms
    are no more than 50-fold apart. Otherwise a short direction may be that of a small update: it is kept,
    and a flat spectrum makes it as long as the others. `short` in the diagnostics counts the directions
    below the rounding of the longest update.

    Example:
        >>> import torch
        >>> a, b = torch.diag(torch.tensor([3.0, 0.0])), torch.diag(torch.tensor([0.0, 1.0]))
        >>> group = LinearGroup((a, b), weights=(1.0, 1.0))
        >>> core_space(group).delta.round(decimals=4).abs().tolist()
        [[2.0, 0.0], [0.0, 2.0]]
    """
    like = group.updates[0]
    known = resolution(group, rank_rtol)
    rtol = known.rtol
    changed = [t for t, update in enumerate(group.updates) if update.any()]
    diagnostics = Inside(len(group.updates) - len(changed))
    if not changed:
        return Merged(torch.zeros_like(like), diagnostics)
    factors = [
        group.factors[t] if group.factors else _balanced(group.updates[t], known.rule(t))
        for t in changed
    ]
    outputs = joint_directions([each.left for each in factors], rtol=rtol)
    inputs = joint_directions([each.right.mT for each in factors], rtol=rtol)
    left, right = outputs.left, inputs.left
    if not left.shape[1]:  # at most rounding of the stored weights
        return Merged(torch.zeros_like(like), replace(diagnostics, core=(0, 0)))
    if inner == "ties" and outputs.arbitrary + inputs.arbitrary:
        diagnostics = replace(diagnostics, arbitrary=outputs.arbitrary + inputs.arbitrary)
    sizes = [norm(update) for update in group.updates]
    if far_apart(sizes):
        cores = _exact_cores(dict(zip(changed, factors, strict=True)), group, left, right)
        rtol = rank_tolerance(group.shape, torch.float64, rank_rtol)
        # The file's arithmetic limits the factors, already cut; no direction of the cores is due to it.
        errors = tuple(replace(error, eps=0.0) for error in group.rounding)
    else:
        cores, errors = cores_of(group.updates, left, right), group.rounding
    del factors
    inside = LinearGroup(cores, group.weights, rounding=errors)
    merged = merge_inside(inside, inner, scale, density, merge, rank_ratio, rank_rtol)
    core = merged.delta
    if isotropize:
        whole = truncated_svd(core, min(core.shape), replace(known, rtol=rtol).of_sum(group))
        longest = max(abs(w) * size for w, size in zip(group.weights, sizes, strict=True))
        resolved = max(_KNOWN, rank_tolerance(group.shape, like.dtype, None, group.rounding))
        short = int((whole.leading < resolved * longest).sum())
        diagnostics = replace(diagnostics, short=short or None)
        core = flattened(whole)
    delta = left.to(core.dtype) @ core @ right.mT.to(core.dtype)
    diagnostics = replace(diagnostics, core=(core.shape[0], core.shape[1]))
    return Merged(delta.to(like.dtype), diagnostics.beside(merged))


def _balanced(update: Tensor, rule: RankRule) -> LowRank:
    """Return the factors U σ^½ and σ^½ Vᵀ of an update."""
    found = truncated_svd(update, min(update.shape), rule)
    root = found.leading.sqrt().to(update.dtype)
    return LowRank(found.left * root, found.right * root[:, None])


def _exact_cores(
    factors: Mapping[int, LowRank], group: LinearGroup, left: Tensor, right: Tensor
) -> tuple[Tensor, ...]:
    """Return UᵀB_t · A_tV in float64, which has no more directions than the factors.

    A flat spectrum then counts the directions of a small update, and no rounding of a large one.
    """
    nothing = left.new_zeros(left.shape[1], right.shape[1])
    return tuple(
        (left.mT @ factors[t].left.to(torch.float64)) @ (factors[t].right.to(torch.float64) @ right)
        if t in factors
        else nothing
        for t in range(len(group.updates))
    )
