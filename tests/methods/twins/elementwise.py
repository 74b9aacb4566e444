"""TIES, DARE, DELLA, Consensus Task Arithmetic and EMR."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from covmerge.types import LinearGroup


def trimmed(delta: Tensor, density: float) -> Tensor:
    """The entries from the (N − ⌊density·N⌋)-th smallest magnitude on; the others are zero."""
    ordered = delta.abs().flatten().sort().values
    N, kept = delta.numel(), int(density * delta.numel())
    if kept == N:
        return delta
    return torch.where(delta.abs() >= ordered[N - kept - 1], delta, torch.zeros_like(delta))


def disjoint(deltas: Sequence[Tensor], weights: Sequence[float], merge: str) -> Tensor:
    """Elect a sign by mass, then merge the entries that have it; an exact tie elects nobody."""
    v = torch.stack(list(deltas))
    w = torch.tensor(weights, dtype=torch.float64).view(-1, *[1] * (v.dim() - 1))
    elected = (w * v).sum(0).sign()
    agree = (v.sign() == elected) & (elected != 0)
    total = torch.where(agree, w * v, torch.zeros_like(v)).sum(0)
    if merge == "sum":
        return total
    mass = torch.where(agree, w, torch.zeros_like(w)).sum(0)
    return torch.where(mass > 0, total / mass, torch.zeros_like(total))


def ties(
    group: LinearGroup,
    *,
    density: float = 0.2,
    scale: float = 1.0,
    trim: str = "global",
    merge: str = "mean",
) -> Tensor:
    """TIES, Algorithm 1. Of one tensor, so that both trims are the same."""
    return scale * ties_of([d.double() for d in group.updates], group.weights, density, merge)


def ties_of(
    deltas: Sequence[Tensor], weights: Sequence[float], density: float, merge: str
) -> Tensor:
    return disjoint([trimmed(d, density) for d in deltas], weights, merge)


def dare(group: LinearGroup, drop: float, rescale: bool, seed: int) -> list[Tensor]:
    """DARE, §3: δ̃ = (1 − m) ⊙ δ, δ̂ = δ̃ / (1 − p)."""
    sparse = []
    for d, stream in zip(group.updates, group.streams, strict=True):
        m = (stream.uniform(seed, tuple(d.shape)) < drop).double()
        sparse.append((1 - m) * d.double() / ((1 - drop) if rescale else 1.0))
    return sparse


def dare_task_arithmetic(
    group: LinearGroup,
    *,
    drop: float = 0.5,
    rescale: bool = True,
    scale: float = 0.3,
    seed: int = 0,
) -> Tensor:
    sparse = dare(group, drop, rescale, seed)
    return scale * sum(w * d for w, d in zip(group.weights, sparse, strict=True))


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
    return scale * ties_of(dare(group, drop, rescale, seed), group.weights, density, merge)


def della(
    group: LinearGroup,
    *,
    density: float = 0.3,
    window: float = 0.2,
    scale: float = 1.1,
    seed: int = 0,
) -> Tensor:
    """DELLA: MAGPRUNE row by row, elect, fuse."""
    sampled = []
    for d, stream in zip(group.updates, group.streams, strict=True):
        d = d.double()
        n = d.shape[1]
        # Rank of each entry: how many of its row are smaller.
        rank = (d.abs()[:, :, None] > d.abs()[:, None, :]).sum(2).double()
        epsilon = window / 2
        keep = density - epsilon + rank * 2 * epsilon / (n - 1)
        b = (stream.uniform(seed, tuple(d.shape)) < keep).double()
        sampled.append(b * d / keep)
    return scale * disjoint(sampled, group.weights, "mean")


def consensus(
    group: LinearGroup, *, mask_lambda: float = 0.4, k: int = 2, scale: float = 0.3
) -> Tensor:
    """TALL masks |θ_t − θ_0| > λ |θ_MTL − θ_t|, and what k of them keep of θ_MTL − θ_0."""
    tau = [d.double() for d in group.updates]
    tau_mtl = sum(tau)
    masks = [t.abs() > mask_lambda * (tau_mtl - t).abs() for t in tau]
    agreed = sum(m.int() for m in masks) >= min(k, len(tau))
    return scale * agreed * sum(w * t for w, t in zip(group.weights, tau, strict=True))


def emr(group: LinearGroup) -> Tensor:
    """EMR's unified task vector."""
    tau = torch.stack([d.double() for d in group.updates])
    votes = sum(w * d for w, d in zip(group.weights, tau, strict=True))
    sign = torch.where(votes > 0, 1.0, -1.0)
    return sign * torch.where(tau * sign > 0, tau.abs(), torch.zeros_like(tau)).amax(0)


TWINS = {
    "ties": ties,
    "dare_task_arithmetic": dare_task_arithmetic,
    "dare_ties": dare_ties,
    "della": della,
    "consensus": consensus,
    "emr": emr,
}
VARIANTS = [
    ("ties", {}),
    ("ties", {"density": 0.5, "merge": "sum", "scale": 0.7}),
    ("ties", {"density": 1.0, "trim": "tensor"}),
    ("ties", {"density": 1e-9}),  # one entry of each expert
    ("dare_task_arithmetic", {}),
    ("dare_task_arithmetic", {"drop": 0.9, "rescale": False, "scale": 1.0, "seed": 7}),
    ("dare_ties", {}),
    ("dare_ties", {"drop": 0.25, "density": 0.6, "merge": "sum", "trim": "tensor", "seed": 3}),
    ("dare_ties", {"drop": 0.9}),  # the threshold is zero
    ("della", {}),
    ("della", {"density": 0.7, "window": 0.6, "scale": 1.0, "seed": 5}),
    ("della", {"density": 0.5, "window": 0.0}),
    ("consensus", {}),
    ("consensus", {"mask_lambda": 0.2, "k": 1, "scale": 1.0}),
    ("consensus", {"k": 4}),
    ("emr", {}),
]
LOW_RANK: dict[str, dict[str, object]] = {}
