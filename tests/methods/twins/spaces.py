"""KnOTS and Core Space: other methods, in coordinates of their own."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from covmerge.types import LinearGroup
from tests.methods.twins.elementwise import ties_of
from tests.methods.twins.spectral import cart, iso_c, tolerance, tsv_m


def inside(
    group: LinearGroup,
    inner: str,
    *,
    density: float = 0.2,
    scale: float = 1.0,
    merge: str = "mean",
    rank_ratio: float = 0.12,
    rank_rtol: float | None = None,
    trim: str = "global",
) -> Tensor:
    """The inner method. Of one tensor, so that both trims are the same."""
    total = sum(w * d for w, d in zip(group.weights, group.updates, strict=True))
    if inner == "average":
        return scale * total / sum(group.weights)
    if inner == "task_arithmetic":
        return scale * total
    if inner == "ties":
        return scale * ties_of(group.updates, group.weights, density, merge)
    if inner == "cart":
        return cart(group, rank_ratio=rank_ratio, scale=scale)
    return {"tsv_m": tsv_m, "iso_c": iso_c}[inner](group, scale=scale, rank_rtol=rank_rtol)


def knots(
    group: LinearGroup,
    *,
    inner: str = "ties",
    space: str = "sv",
    concat: str = "inputs",
    rank_rtol: float | None = None,
    **of_inner: object,
) -> Tensor:
    deltas = [d.double() if concat == "inputs" else d.double().T for d in group.updates]
    T, d_in = len(deltas), deltas[0].shape[1]
    U, S, Vh = leading(torch.hstack(deltas), tolerance(group, rank_rtol))
    V = [Vh[:, t * d_in : (t + 1) * d_in] for t in range(T)]
    if space == "sv":
        V, S = [torch.diag(S) @ v for v in V], torch.ones_like(S)
    aligned = replace(group, updates=tuple(V))
    merged = U @ torch.diag(S) @ inside(aligned, inner, rank_rtol=rank_rtol, **of_inner)
    return merged if concat == "inputs" else merged.T


def core_space(
    group: LinearGroup,
    *,
    inner: str = "tsv_m",
    isotropize: bool = True,
    rank_rtol: float | None = None,
    **of_inner: object,
) -> Tensor:
    """With the factors of the group, or those of each update's SVD."""
    rtol = tolerance(group, rank_rtol)
    deltas = [d.double() for d in group.updates]
    if group.factors:
        B, A = [f.left.double() for f in group.factors], [f.right.double() for f in group.factors]
    else:
        parts = [leading(d, rtol) for d in deltas]
        B = [U @ torch.diag(S.sqrt()) for U, S, _ in parts]
        A = [torch.diag(S.sqrt()) @ Vh for _, S, Vh in parts]
    U, _, _ = leading(torch.hstack(B), rtol)
    _, _, Vh = leading(torch.vstack(A), rtol)
    cores = replace(group, updates=tuple(U.T @ d @ Vh.T for d in deltas))
    M = inside(cores, inner, rank_rtol=rank_rtol, **of_inner)
    if isotropize:
        left, S, right = leading(M, rtol)
        M = S.mean() * left @ right
    return U @ M @ Vh


def leading(A: Tensor, rtol: float) -> tuple[Tensor, Tensor, Tensor]:
    """The SVD within the numerical rank."""
    U, S, Vh = torch.linalg.svd(A, full_matrices=False)
    k = int((S > rtol * S[0]).sum())
    return U[:, :k], S[:k], Vh[:k]


TWINS = {"knots": knots, "core_space": core_space}
VARIANTS = [
    ("knots", {}),
    ("knots", {"density": 0.5, "merge": "sum", "scale": 0.7, "concat": "outputs"}),
    # Of a 2 × 2 block of V two pairs of entries are equal: at 0.9 all of them are kept.
    ("knots", {"space": "v", "density": 0.9}),
    ("knots", {"space": "v", "density": 1.0, "concat": "outputs"}),
    ("knots", {"inner": "average"}),
    ("knots", {"inner": "cart", "rank_ratio": 0.4, "scale": 1.5}),
    ("knots", {"inner": "iso_c", "space": "v"}),
    ("knots", {"inner": "tsv_m"}),
    ("knots", {"inner": "iso_c", "scale": 0.5}),
    ("core_space", {}),
    ("core_space", {"inner": "ties", "isotropize": False}),
    ("core_space", {"inner": "ties", "density": 0.6, "merge": "sum", "scale": 0.7}),
    ("core_space", {"inner": "task_arithmetic", "isotropize": False}),
    ("core_space", {"inner": "cart", "rank_ratio": 0.4}),
    ("core_space", {"inner": "iso_c", "scale": 0.5}),
]
LOW_RANK = {"knots": {"rank_rtol": 1e-9}, "core_space": {"rank_rtol": 1e-9}}
