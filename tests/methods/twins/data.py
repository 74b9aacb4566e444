"""WUDI, and the methods that use data: RegMean, RegMean++, LOT, Fisher."""

from __future__ import annotations

import torch
from torch import Tensor

from covmerge.types import LinearGroup
from tests.methods.twins.closed_form import mean_one


def wudi(
    group: LinearGroup,
    *,
    solver: str = "closed",
    rtol: float | None = None,
    iterations: int = 300,
    learning_rate: float = 1e-5,
) -> Tensor:
    deltas = [d.double() for d in group.updates]
    pairs = [
        (d, w) for d, w in zip(deltas, mean_one(deltas, group.weights), strict=True) if d.any()
    ]
    if not pairs:
        return torch.zeros_like(deltas[0])
    if solver == "closed":
        C = [w * d.T @ d / d.norm() ** 2 for d, w in pairs]
        cutoff = deltas[0].shape[1] * torch.finfo(torch.float32).eps if rtol is None else rtol
        inverse = torch.linalg.pinv(sum(C), rtol=cutoff, hermitian=True)
        return sum(d @ c for (d, _), c in zip(pairs, C, strict=True)) @ inverse

    W = sum(w * d for d, w in pairs).requires_grad_()
    optimizer = torch.optim.Adam([W], lr=learning_rate)
    for _ in range(iterations):
        optimizer.zero_grad()
        wudi_loss(W, pairs).backward()
        optimizer.step()
    return W.detach()


def wudi_loss(W: Tensor, pairs: list[tuple[Tensor, float]]) -> Tensor:
    """Σ w_t ‖(W − Δ_t)Δ_tᵀ‖² / ‖Δ_t‖² over (Δ_t, w_t)."""
    return sum(w * ((W - d) @ d.T).square().sum() / d.square().sum() for d, w in pairs)


def regmean(group: LinearGroup, *, off_diagonal: float = 0.9, ridge: float = 0.0) -> Tensor:
    G = []
    for measured, weight in zip(group.measured, group.weights, strict=True):
        g = measured.value.double()
        G.append(weight * (off_diagonal * g + (1 - off_diagonal) * torch.diag(torch.diag(g))))
    system = sum(G)
    d_in = len(system)
    system = system + ridge * system.trace() / d_in * torch.eye(d_in, dtype=torch.float64)
    return sum(d.double() @ g for d, g in zip(group.updates, G, strict=True)) @ system.inverse()


def regmean_plus_plus(
    group: LinearGroup, *, off_diagonal: float = 0.95, ridge: float = 0.0
) -> Tensor:
    return regmean(group, off_diagonal=off_diagonal, ridge=ridge)


def lot(group: LinearGroup, *, rtol: float | None = None) -> Tensor:
    G = [w * m.value.double() for w, m in zip(group.weights, group.measured, strict=True)]
    cutoff = len(G[0]) * torch.finfo(torch.float32).eps if rtol is None else rtol
    inverse = torch.linalg.pinv(sum(G), rtol=cutoff, hermitian=True)
    return sum(d.double() @ g for d, g in zip(group.updates, G, strict=True)) @ inverse


def fisher(
    group: LinearGroup,
    *,
    floor: float = 1e-6,
    floor_how: str = "max",
    floor_on: str = "all",
    normalize: bool = True,
) -> Tensor:
    F = []
    for t, (measured, weight) in enumerate(zip(group.measured, group.weights, strict=True)):
        f = measured.value.double()
        if floor_on == "all" or t == 0:
            f = f + floor if floor_how == "add" else torch.maximum(f, torch.tensor(floor).double())
        norm = measured.total
        if not normalize or norm == 0:
            norm = 1.0
        elif floor_how == "add":
            norm = norm + floor
        F.append(weight / norm * f)
    return sum(f * d.double() for f, d in zip(F, group.updates, strict=True)) / sum(F)


TWINS = {
    "wudi": wudi,
    "regmean": regmean,
    "regmean++": regmean_plus_plus,
    "lot": lot,
    "fisher": fisher,
}
VARIANTS = [
    ("wudi", {}),
    ("wudi", {"rtol": 1e-3}),
    ("wudi", {"solver": "adam", "iterations": 20, "learning_rate": 1e-3}),
    ("regmean", {}),
    ("regmean", {"off_diagonal": 1.0}),
    ("regmean", {"off_diagonal": 0.1, "ridge": 0.5}),
    ("regmean++", {}),
    ("lot", {}),
    ("lot", {"rtol": 0.2}),
    ("fisher", {}),
    ("fisher", {"floor": 0.5, "floor_how": "add", "normalize": False}),
    ("fisher", {"floor": 0.5, "floor_on": "first"}),
    ("fisher", {"floor": 0.5, "floor_how": "add"}),
]
LOW_RANK = {}
