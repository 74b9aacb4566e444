"""KnOTS and Core Space: other methods, in coordinates of their own."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from covmerge.twins.algebra import deltas_of, length, weighted
from covmerge.twins.elementwise import ties_of
from covmerge.twins.rank import far_apart, leading, of_sum, roundings, together, tolerance
from covmerge.twins.spectral import cart, flat, iso_c, tsv_m
from covmerge.types import LinearGroup, Rounding


def inside(
    group: LinearGroup,
    inner: str,
    *,
    density: float,
    scale: float,
    merge: str,
    rank_ratio: float,
    rank_rtol: float | None,
) -> Tensor:
    """The inner method."""
    if inner == "average":
        return scale * weighted(group.updates, group.weights) / sum(group.weights)
    if inner == "task_arithmetic":
        return scale * weighted(group.updates, group.weights)
    if inner == "ties":
        # Entries in other coordinates: those that equal a threshold do so but for rounding.
        limits = group.thresholds and [limit * (1 - 1e-9) for limit in group.thresholds]
        return scale * ties_of(group.updates, group.weights, density, merge, limits)
    if inner == "cart":
        return cart(group, rank_ratio=rank_ratio, scale=scale)
    return {"tsv_m": tsv_m, "iso_c": iso_c}[inner](group, scale=scale, rank_rtol=rank_rtol)


def knots(
    group: LinearGroup,
    *,
    inner: str = "ties",
    space: str = "sv",
    concat: str = "inputs",
    density: float = 0.2,
    scale: float = 1.0,
    trim: str = "global",
    merge: str = "mean",
    rank_ratio: float = 0.12,
    rank_rtol: float | None = None,
) -> Tensor:
    """U f(ΣV_1ᵀ, …, ΣV_Tᵀ) of [Δ_1 … Δ_T] = U Σ [V_1ᵀ … V_Tᵀ], or UΣ f(V_1ᵀ, …, V_Tᵀ)  (KnOTS)."""
    del trim  # `group.thresholds` follow it
    rtol, errors = tolerance(group, rank_rtol), roundings(group, rank_rtol)
    deltas = [d if concat == "inputs" else d.T for d in deltas_of(group)]
    if far_apart([length(d) for d in deltas]):
        found = [leading(d, rtol, e) for d, e in zip(deltas, errors, strict=True)]
        deltas = [each.U @ torch.diag(each.S) @ each.Vh for each in found]
    changed = [t for t, d in enumerate(deltas) if d.any()]
    if not changed:
        return torch.zeros_like(group.updates[0], dtype=torch.float64)
    U, S = together([deltas[t] for t in changed], rtol, [errors[t] for t in changed])
    back, there = (U, U.T) if space == "sv" else (U @ torch.diag(S), torch.diag(1 / S) @ U.T)
    aligned = LinearGroup(
        tuple(there @ d for d in deltas),
        group.weights,
        thresholds=group.thresholds,
        rounding=group.rounding if space == "sv" else (),
    )
    merged = back @ inside(
        aligned,
        inner,
        density=density,
        scale=scale,
        merge=merge,
        rank_ratio=rank_ratio,
        rank_rtol=rank_rtol,
    )
    return merged if concat == "inputs" else merged.T


def core_space(
    group: LinearGroup,
    *,
    inner: str = "tsv_m",
    isotropize: bool = True,
    density: float = 0.2,
    scale: float = 1.0,
    merge: str = "mean",
    rank_ratio: float = 0.12,
    rank_rtol: float | None = None,
) -> Tensor:
    """U f(UᵀΔ_1V, …, UᵀΔ_TV) Vᵀ  (Core Space), U of [B_1 … B_T] and V of [A_1ᵀ … A_Tᵀ].

    With the factors of the group, or those of each update's SVD.
    """
    rtol, errors = tolerance(group, rank_rtol), roundings(group, rank_rtol)
    deltas = deltas_of(group)
    changed = [t for t, d in enumerate(deltas) if d.any()]
    if not changed:
        return torch.zeros_like(deltas[0])
    B, A = zip(*(_factors(group, t, rtol, errors[t]) for t in changed), strict=True)
    U, _ = together(B, rtol)
    V, _ = together([a.T for a in A], rtol)
    if far_apart([length(d) for d in deltas]):  # of no more directions than the factors
        exact = dict(zip(changed, (b @ a for b, a in zip(B, A, strict=True)), strict=True))
        deltas = [exact.get(t, torch.zeros_like(d)) for t, d in enumerate(deltas)]
        rtol = max(group.shape) ** 0.5 * 2**-52 if rank_rtol is None else rank_rtol
    cores = replace(group, updates=tuple(U.T @ d @ V for d in deltas), factors=(), thresholds=None)
    merged = inside(
        cores,
        inner,
        density=density,
        scale=scale,
        merge=merge,
        rank_ratio=rank_ratio,
        rank_rtol=rank_rtol,
    )
    if isotropize:
        merged = flat(leading(merged, rtol, of_sum(errors, group.weights)))
    return U @ merged @ V.T


def _factors(group: LinearGroup, t: int, rtol: float, error: Rounding) -> tuple[Tensor, Tensor]:
    """B_t and A_t with Δ_t = B_t A_t."""
    if group.factors:
        return group.factors[t].left.double(), group.factors[t].right.double()
    found = leading(group.updates[t].double(), rtol, error)
    root = torch.diag(found.S.sqrt())
    return found.U @ root, root @ found.Vh


TWINS = {"knots": knots, "core_space": core_space}
