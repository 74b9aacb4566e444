"""KnOTS, Core Space and Compress-then-Merge, which run other methods in coordinates of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from covmerge.base.types import LinearGroup, Rounding
from covmerge.maths.reference.algebra import deltas_of, identity, length, weighted
from covmerge.maths.reference.elementwise import ties_of
from covmerge.maths.reference.rank import (
    far_apart,
    leading,
    of_sum,
    roundings,
    together,
    tolerance,
    with_equals,
)
from covmerge.maths.reference.spectral import cart, flat, iso_c, tsv_m
from covmerge.maths.reference.steps import norm_balance


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
    """The result of the inner method."""
    if inner == "average":
        return scale * weighted(group.updates, group.weights) / sum(group.weights)
    if inner == "task_arithmetic":
        return scale * weighted(group.updates, group.weights)
    if inner == "ties":
        # In other coordinates, entries equal a threshold only up to rounding.
        limits = group.thresholds and [limit * (1 - 1e-9) for limit in group.thresholds]
        return scale * ties_of(group.updates, group.weights, density, merge, limits)
    if inner == "cart":
        return cart(group, rank_ratio=rank_ratio, scale=scale)
    return {"tsv_m": tsv_m, "iso_c": iso_c}[inner](group, scale=scale, rank_rtol=rank_rtol)


def separated(deltas: list[Tensor], rtol: float, errors: Sequence[Rounding]) -> list[Tensor]:
    """The updates; each cut to its numerical rank if their sizes are far apart."""
    if not far_apart([length(d) for d in deltas]):
        return deltas
    found = [leading(d, rtol, e) for d, e in zip(deltas, errors, strict=True)]
    return [each.U @ torch.diag(each.S) @ each.Vh for each in found]


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
    deltas = separated(deltas, rtol, errors)
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

    The factors are those of the group, or those of each update's SVD.
    """
    rtol, errors = tolerance(group, rank_rtol), roundings(group, rank_rtol)
    deltas = deltas_of(group)
    changed = [t for t, d in enumerate(deltas) if d.any()]
    if not changed:
        return torch.zeros_like(deltas[0])
    B, A = zip(*(_factors(group, t, rtol, errors[t]) for t in changed), strict=True)
    U, _ = together(B, rtol)
    V, _ = together([a.T for a in A], rtol)
    if far_apart([length(d) for d in deltas]):  # products have no more directions than the factors
        exact = dict(zip(changed, (b @ a for b, a in zip(B, A, strict=True)), strict=True))
        deltas = [exact.get(t, torch.zeros_like(d)) for t, d in enumerate(deltas)]
        rtol = max(group.shape) ** 0.5 * 2**-52 if rank_rtol is None else rank_rtol
        group = replace(group, rounding=tuple(replace(e, eps=0.0) for e in group.rounding))
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
        merged = flat(leading(merged, rtol, of_sum(group, rank_rtol, rtol)))
    return U @ merged @ V.T


def _factors(group: LinearGroup, t: int, rtol: float, error: Rounding) -> tuple[Tensor, Tensor]:
    """B_t and A_t with Δ_t = B_t A_t."""
    if group.factors:
        return group.factors[t].left.double(), group.factors[t].right.double()
    found = leading(group.updates[t].double(), rtol, error)
    root = torch.diag(found.S.sqrt())
    return found.U @ root, root @ found.Vh


def ctm(
    group: LinearGroup,
    *,
    core_rank: int = 16,
    inner: str = "ties",
    strength: float = 1.0,
    density: float = 0.2,
    scale: float = 1.0,
    merge: str = "mean",
    rank_ratio: float = 0.12,
    rank_rtol: float | None = None,
) -> Tensor:
    """U f(UᵀΔ_1V, …, UᵀΔ_TV) Vᵀ  (Compress-then-Merge), U and V from updates with balanced norms."""
    rtol, errors = tolerance(group, rank_rtol), roundings(group, rank_rtol)
    deltas = deltas_of(group)
    changed = [t for t, d in enumerate(deltas) if d.any()]
    if not changed:
        return torch.zeros_like(deltas[0])
    balanced = norm_balance(group, strength=strength)
    E = [errors[t].times(length(balanced[t]) / length(deltas[t])) for t in changed]
    U, V = bases(separated([balanced[t] for t in changed], rtol, E), core_rank, rtol, E)
    deltas = separated(deltas, rtol, errors)
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
    return U @ merged @ V.T


def bases(
    X: list[Tensor], rank: int, rtol: float, errors: Sequence[Rounding]
) -> tuple[Tensor, Tensor]:
    """HOSVD and HOOI: U and V of `rank` columns with the largest share of all X_t ≈ U (UᵀX_tV) Vᵀ."""
    U, _ = together(X, rtol, errors)
    V, S = together([x.T for x in X], rtol, errors)
    G = [U.T @ x @ V for x in X]
    if not len(S):
        return U, V
    v = identity(len(S))[:, : with_equals(S, rank)]
    off: list[float] = []
    while True:
        u = most([g @ v for g in G], rank, rtol)
        v = most([g.T @ u for g in G], rank, rtol)
        held = sum(length(u.T @ g @ v) ** 2 for g in G) / sum(length(g) ** 2 for g in G)
        off.append(max(0.0, 1 - held) ** 0.5)
        if len(off) == 1000 or (len(off) > 2 and abs(off[-2] - off[-1]) < 1e-6):
            return U @ u, V @ v


def most(blocks: list[Tensor], k: int, rtol: float) -> Tensor:
    """The k leading left singular vectors of blocks side by side, and those that equal the k-th."""
    U, S = together(blocks, rtol)
    return U[:, : with_equals(S, k)]


REFERENCES = {"knots": knots, "core_space": core_space, "ctm": ctm}
