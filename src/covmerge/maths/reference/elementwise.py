"""TIES, DARE, DELLA, Consensus Task Arithmetic and EMR."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from covmerge.base.types import LinearGroup
from covmerge.maths.reference.algebra import deltas_of, total, weighted


def threshold(delta: Tensor, density: float) -> float:
    """The (N − ⌊density·N⌋)-th smallest of N magnitudes; 0 if all are kept."""
    ordered = delta.abs().flatten().sort().values
    N, count = delta.numel(), int(density * delta.numel())
    return 0.0 if count == N else float(ordered[N - count - 1])


def trimmed(delta: Tensor, limit: float) -> Tensor:
    """The entries of magnitude `limit` or more; the others are zero."""
    return torch.where(delta.abs() >= limit, delta, torch.zeros_like(delta))


def disjoint(deltas: Sequence[Tensor], weights: Sequence[float], merge: str) -> Tensor:
    """Elect a sign by mass, then merge the entries that have it; an exact tie elects no sign."""
    elected = weighted(deltas, weights).sign()
    agree = [(d.sign() == elected) & (elected != 0) for d in deltas]
    summed = weighted([a * d for a, d in zip(agree, deltas, strict=True)], weights)
    if merge == "sum":
        return summed
    mass = weighted([a.double() for a in agree], weights)
    return torch.where(mass > 0, summed / mass, torch.zeros_like(summed))


def ties(
    group: LinearGroup,
    *,
    density: float = 0.2,
    scale: float = 1.0,
    trim: str = "global",
    merge: str = "mean",
) -> Tensor:
    """TIES, Algorithm 1, with the thresholds of the whole model if the group has them."""
    del trim  # `group.thresholds` depend on it
    return scale * ties_of(deltas_of(group), group.weights, density, merge, group.thresholds)


def ties_of(
    deltas: Sequence[Tensor],
    weights: Sequence[float],
    density: float,
    merge: str,
    thresholds: Sequence[float] | None,
) -> Tensor:
    """Trim, elect, merge  (TIES, Algorithm 1)."""
    limits = thresholds or [threshold(d, density) for d in deltas]
    left = [trimmed(d, limit) for d, limit in zip(deltas, limits, strict=True)]
    return disjoint(left, weights, merge)


def dare(group: LinearGroup, drop: float, rescale: bool, seed: int) -> list[Tensor]:
    """DARE, §3: δ̃ = (1 − m) ⊙ δ, δ̂ = δ̃ / (1 − p)."""
    sparse: list[Tensor] = []
    for d, stream in zip(deltas_of(group), group.streams, strict=True):
        m = (stream.uniform(seed, tuple(d.shape)) < drop).double()
        sparse.append((1 - m) * d * (1 / (1 - drop) if rescale else 1.0))
    return sparse


def dare_task_arithmetic(
    group: LinearGroup,
    *,
    drop: float = 0.5,
    rescale: bool = True,
    scale: float = 0.3,
    seed: int = 0,
) -> Tensor:
    """λ Σ w_t δ̂_t  (DARE, §3)."""
    return scale * weighted(dare(group, drop, rescale, seed), group.weights)


def dare_ties(
    group: LinearGroup,
    *,
    drop: float = 0.5,
    rescale: bool = True,
    density: float = 0.2,
    scale: float = 1.0,
    trim: str = "global",
    merge: str = "mean",
    seed: int = 0,
) -> Tensor:
    """TIES of δ̂_1, …, δ̂_T  (DARE, §3)."""
    del trim  # `group.thresholds` depend on it
    sparse = dare(group, drop, rescale, seed)
    return scale * ties_of(sparse, group.weights, density, merge, group.thresholds)


def della(
    group: LinearGroup,
    *,
    density: float = 0.3,
    window: float = 0.2,
    scale: float = 1.1,
    seed: int = 0,
) -> Tensor:
    """DELLA: MAGPRUNE row by row, elect, fuse; a vector is one row, and a single entry has no rank."""
    sampled: list[Tensor] = []
    for d, stream in zip(deltas_of(group), group.streams, strict=True):
        rows = d.flatten(1) if d.dim() > 1 else d.reshape(1, -1)
        n = rows.shape[1]
        # The rank of each entry in its row: how many are smaller, or equal and further left.
        rank = rows.abs().argsort(dim=1, stable=True).argsort(dim=1).double()
        epsilon = window / 2
        keep = density - epsilon + rank * 2 * epsilon / (n - 1) if n > 1 else rank + density
        b = (stream.uniform(seed, tuple(d.shape)).view_as(rows) < keep).double()
        sampled.append((b * rows / keep).view_as(d))
    return scale * disjoint(sampled, group.weights, "mean")


def consensus(
    group: LinearGroup, *, mask_lambda: float = 0.4, k: int = 2, scale: float = 0.3
) -> Tensor:
    """TALL masks |θ_t − θ_0| > λ |θ_MTL − θ_t|, and the entries of θ_MTL − θ_0 that k of them keep."""
    tau = deltas_of(group)
    tau_mtl = total(tau)
    masks = [t.abs() > mask_lambda * (tau_mtl - t).abs() for t in tau]
    agreed = total(m.int() for m in masks) >= min(k, len(tau))
    return scale * (agreed * weighted(tau, group.weights))


def emr(group: LinearGroup) -> Tensor:
    """EMR's unified task vector."""
    tau = deltas_of(group)
    votes = weighted(tau, group.weights)
    sign = torch.where(votes > 0, 1.0, -1.0).double()
    agreeing = [torch.where(t * sign > 0, t.abs(), torch.zeros_like(t)) for t in tau]
    return sign * torch.stack(agreeing).amax(0)


REFERENCES = {
    "ties": ties,
    "dare_task_arithmetic": dare_task_arithmetic,
    "dare_ties": dare_ties,
    "della": della,
    "consensus": consensus,
    "emr": emr,
}
