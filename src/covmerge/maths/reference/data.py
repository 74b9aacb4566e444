"""WUDI, its spectral filters, and methods that use data: RegMean, LOT, SSR, ESM, Fisher."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import ceil
from typing import Any

import torch
from torch import Tensor

from covmerge.base.types import LinearGroup, Rounding
from covmerge.maths.reference.algebra import deltas_of, identity, length, pinv, svd, total, weighted
from covmerge.maths.reference.closed_form import (
    average,
    bounds,
    equalised,
    least_interference,
    mean_one,
    share_of_inputs,
    shares,
)
from covmerge.maths.reference.rank import leading, roundings, tolerance, with_equals


def wudi(
    group: LinearGroup,
    *,
    solver: str = "closed",
    rtol: float | None = None,
    iterations: int = 300,
    learning_rate: float = 1e-5,
) -> Tensor:
    """argmin_W Σ w_t ‖(W − Δ_t)Δ_tᵀ‖² / ‖Δ_t‖²  (WUDI), or Adam's steps from Σ w_t Δ_t towards it."""
    deltas = deltas_of(group)
    weights = mean_one(deltas, group.weights)
    if solver == "closed":
        each = zip(deltas, weights, strict=True)
        return least_interference(
            group, [w / length(d) ** 2 if d.any() else 0.0 for d, w in each], rtol
        )
    pairs = [(d, w) for d, w in zip(deltas, weights, strict=True) if d.any()]
    if not pairs:
        return torch.zeros_like(deltas[0])
    with torch.enable_grad():
        W = total(w * d for d, w in pairs).requires_grad_()
        optimizer: Any = torch.optim.Adam([W], lr=learning_rate)
        for _ in range(iterations):
            optimizer.zero_grad()
            loss: Any = wudi_loss(W, pairs)
            loss.backward()
            optimizer.step()
    return W.detach()


def aswudi(
    group: LinearGroup, *, start: str = "sum", scale: float = 1.0, rtol: float | None = None
) -> Tensor:
    """Θ₀(I − Q_KQ_Kᵀ) + D Q_KΛ_K⁻¹Q_Kᵀ, K = ⌈(Σ√λ)² / Σλ⌉  (ASWUDI)."""

    def most(roots: Tensor) -> Tensor:
        k = int(torch.ceil(roots.sum() ** 2 / (roots**2).sum() - 1e-9)) if len(roots) else 0
        return torch.ones(with_equals(roots, k), dtype=torch.float64)

    return spectral_filter(group, most, start, scale, rtol)


def swudi(
    group: LinearGroup,
    *,
    time: float = 1300.0,
    rank_ratio: float = 0.65,
    start: str = "sum",
    scale: float = 1.0,
    rtol: float | None = None,
) -> Tensor:
    """Θ₀ − Θ₀QhQᵀ + D Q(h/Λ)Qᵀ, h = 1[k ≤ K](1 − e^(−tλ)), K = ⌈ratio · d_in⌉  (SWUDI)."""

    def reached(roots: Tensor) -> Tensor:
        k = with_equals(roots, ceil(rank_ratio * group.shape[1] - 1e-9))
        return 1 - torch.exp(-time * roots[:k] ** 2)

    return spectral_filter(group, reached, start, scale, rtol)


def spectral_filter(
    group: LinearGroup,
    choose: Callable[[Tensor], Tensor],
    start: str,
    scale: float,
    rtol: float | None,
) -> Tensor:
    """λ (Θ₀ − Θ₀QhQᵀ + D Q(h/Λ)Qᵀ), where `choose` returns h for √Λ."""
    weights = mean_one(group.updates, group.weights)
    each = zip(deltas_of(group), weights, roundings(group, rtol), strict=True)
    changed = [(d, w, e) for d, w, e in each if d.any()]
    if not changed:
        return torch.zeros_like(group.updates[0], dtype=torch.float64)
    s = [w / length(d) ** 2 for d, w, _ in changed]
    D = total(a * d @ d.T @ d for a, (d, _, _) in zip(s, changed, strict=True))
    stacked = torch.vstack([a**0.5 * d for a, (d, _, _) in zip(s, changed, strict=True)])
    rounding = Rounding.together(e.times(a**0.5) for a, (_, _, e) in zip(s, changed, strict=True))
    cutoff = group.shape[1] * torch.finfo(torch.float32).eps if rtol is None else rtol
    found = leading(stacked, cutoff**0.5, rounding)
    theta = total(w * d for d, w, _ in changed) / (len(changed) if start == "mean" else 1)
    h = choose(found.S)
    Q, L = found.Vh[: len(h)].T, found.S[: len(h)] ** 2
    return scale * (theta - theta @ Q @ torch.diag(h) @ Q.T + D @ Q @ torch.diag(h / L) @ Q.T)


def wudi_loss(W: Tensor, pairs: list[tuple[Tensor, float]]) -> Tensor:
    """Σ w_t ‖(W − Δ_t)Δ_tᵀ‖² / ‖Δ_t‖² over (Δ_t, w_t)."""
    return total(w * ((W - d) @ d.T).square().sum() / d.square().sum() for d, w in pairs)


def regmean(group: LinearGroup, *, off_diagonal: float = 0.9, ridge: float = 0.0) -> Tensor:
    """(Σ w_t Δ_t G̃_t)(Σ w_t G̃_t + ρI)⁻¹, G̃_t = a·G_t + (1 − a)·diag G_t  (RegMean, §3).

    The result is zero along inputs that no data has, and the average if there are no data.
    """
    G: list[Tensor] = []
    for measured, weight in zip(group.expert_statistics, group.weights, strict=True):
        g = measured.value.double()
        G.append(weight * (off_diagonal * g + (1 - off_diagonal) * torch.diag(torch.diag(g))))
    system = total(G)
    if not system.any():
        return average(group)
    d_in = len(system)
    system = system + ridge * system.trace() / d_in * identity(d_in)
    return total(d @ g for d, g in zip(deltas_of(group), G, strict=True)) @ pinv(system)


def auto_measured(group: LinearGroup) -> Tensor:
    """(1 − a) λ (K + τ²I)^(−q/2) R + a R, K = R ΣG̃_t Rᵀ, R = (Σ b_tΔ_tC_t)(ΣC_t)⁻¹.

    The symbols are those of docs/auto-measured.md.
    """
    heard = [bool(m.value.any()) for m in group.expert_statistics]
    deltas = [d * known for d, known in zip(deltas_of(group), heard, strict=True)]
    changed = [t for t, d in enumerate(deltas) if d.any()]
    if not changed:
        return average(group)
    group = replace(group, updates=tuple(deltas))
    b = dict(zip(changed, bounds([length(deltas[t]) for t in changed]), strict=True))
    s = dict(zip(changed, shares([b[t] * length(deltas[t]) for t in changed]), strict=True))
    d_in = group.shape[1]
    values = [m.value.double() for m in group.expert_statistics]
    G = [0.9 * g + 0.1 * torch.diag(torch.diag(g)) for g in values]
    C = list(G)
    for t in changed:
        U = deltas[t].T @ deltas[t] / length(deltas[t]) ** 2
        C[t] = G[t] + s[t] * share_of_inputs(d_in * U) * G[t].trace() * U
    w = group.weights
    numerator = total(w[t] * b[t] * deltas[t] @ C[t] for t in changed)
    R = numerator @ pinv(weighted(C, w))
    found = equalised(group, R, weighted(G, w))
    return R if found is None else found


def lot(group: LinearGroup, *, rtol: float | None = None) -> Tensor:
    """(Σ w_t Δ_t G_t)(Σ w_t G_t)†  (LOT Merging, Eq. 9)."""
    G = [w * m.value.double() for w, m in zip(group.weights, group.expert_statistics, strict=True)]
    cutoff = len(G[0]) * torch.finfo(torch.float32).eps if rtol is None else rtol
    return total(d @ g for d, g in zip(deltas_of(group), G, strict=True)) @ pinv(total(G), cutoff)


def ssr(group: LinearGroup, *, ridge: float = 1e-4, rank_rtol: float | None = None) -> Tensor:
    """B Q(G + ρI)⁻¹ A, z = A x, G = Σ w_t E_t[z zᵀ], Q_t = w_t E_t[z_t zᵀ]  (SSR-Merge)."""
    rtol, errors = tolerance(group, rank_rtol), roundings(group, rank_rtol)
    deltas = deltas_of(group)
    changed = [
        t for t, d in enumerate(deltas) if d.any() and group.expert_statistics[t].value.any()
    ]
    if len(changed) < 2:
        return deltas[changed[0]] if changed else torch.zeros_like(deltas[0])
    if group.factors:
        pairs = [(group.factors[t].left.double(), group.factors[t].right.double()) for t in changed]
    else:
        found = [leading(deltas[t], rtol, errors[t]) for t in changed]
        pairs = [(each.U @ torch.diag(each.S), each.Vh) for each in found]
    B, A = torch.hstack([b for b, _ in pairs]), torch.vstack([a for _, a in pairs])
    of_inputs = [group.weights[t] * group.expert_statistics[t].value.double() for t in changed]
    G = total(A @ g @ A.T for g in of_inputs)
    Q = torch.vstack([a @ g @ A.T for (_, a), g in zip(pairs, of_inputs, strict=True)])
    rho = ridge * float(G.trace()) / max(1, len(G))
    return B @ Q @ pinv(G + rho * identity(len(G)), torch.finfo(torch.float32).eps) @ A


def esm(
    group: LinearGroup,
    *,
    power: float = 2.0,
    energy_power: float = 0.15,
    scale: float = 2.0,
    energy_rtol: float = 2.0**-23,
    rank_rtol: float | None = None,
) -> Tensor:
    """α σ̄_U σ̄_V polar([U_1s_1 …]) polar([s_1U_1ᵀΔ̂_1; …]c), U_t of Δ_tG_tΔ_tᵀ  (ESM)."""
    rtol, errors = tolerance(group, rank_rtol), roundings(group, rank_rtol)
    deltas, data = deltas_of(group), [m.value.double() for m in group.expert_statistics]
    heard = [t for t, d in enumerate(deltas) if d.any() and data[t].any()]
    share = max(1, group.shape[0] // max(1, len(heard)))
    mean = sum(length(deltas[t]) for t in heard) / max(1, len(heard))
    U: list[Tensor] = []
    V: list[Tensor] = []
    off_U: list[Tensor] = []
    off_V: list[Tensor] = []
    for t in heard:
        known = leading(deltas[t], rtol, errors[t])
        d = known.U @ torch.diag(known.S) @ known.Vh
        axes, lam = principal(d, data[t], len(known.S), energy_rtol)
        k = with_equals(lam.sqrt(), min(share, len(lam)))
        axes, lam = axes[:, :k], lam[:k]
        if k:
            s = (lam / lam.mean()) ** energy_power
            s = s / s.mean()
            f = group.weights[t] * (length(deltas[t]) / mean) ** power
            U.append(axes * s)
            V.append(f * s[:, None] * (axes.T @ d))
            turned = torch.diag(0.5 * known.edge / known.S) @ known.U.T @ axes
            off_U.append(s * (turned**2).sum(0).sqrt())
            off_V.append(s * f * known.end)
    if not U:
        return torch.zeros_like(deltas[0])
    A, B = torch.hstack(U), torch.vstack(V)
    columns = (B**2).sum(0).sqrt()
    c = (columns / columns.mean()) ** power
    off = torch.cat(off_V) * (c**2).mean().sqrt()
    order = ((B * c) ** 2).sum(1).argsort(descending=True)  # so LAPACK keeps all digits
    exact = max(group.shape) ** 0.5 * torch.finfo(torch.float64).eps
    left, of_left = flat_range(A[:, order], rtol, torch.cat(off_U)[order])
    right, of_right = flat_range((B * c)[order].T, exact, off[order])
    return scale * of_left * of_right * left @ right.T


def principal(d: Tensor, G: Tensor, rank: int, rtol: float) -> tuple[Tensor, Tensor]:
    """Eigenvectors of dGdᵀ and their eigenvalues, descending, above `rtol` times the largest."""
    U, L, _ = svd(d @ G @ d.T)
    largest = float(svd(d)[1][0]) ** 2 * float(G.trace()) * rank * torch.finfo(torch.float64).eps
    end = max(rtol * float(L[0]), largest)
    count = int((L[:rank] > end).sum())
    return U[:, :count], L[:count]


def flat_range(A: Tensor, rtol: float, errors: Tensor) -> tuple[Tensor, float]:
    """A (AᵀA)^{†½}, and the mean singular value; those beyond the numerical rank count as zero."""
    found = leading(A, rtol)
    known = found.S**2 > (found.Vh**2) @ errors**2
    return found.U[:, known] @ found.Vh[known], float(found.S[known].sum()) / min(A.shape)


def fisher(
    group: LinearGroup,
    *,
    floor: float = 1e-6,
    floor_how: str = "max",
    floor_on: str = "all",
    normalize: bool = True,
) -> Tensor:
    """Σ c_t F_t Δ_t / Σ c_t F_t, c_t = w_t / ‖F_t‖₂  (Fisher merging), entry by entry."""
    F: list[Tensor] = []
    for t, (measured, weight) in enumerate(
        zip(group.expert_statistics, group.weights, strict=True)
    ):
        f = measured.value.double()
        if floor_on == "all" or t == 0:
            f = f + floor if floor_how == "add" else torch.maximum(f, torch.tensor(floor).double())
        norm = measured.total
        if not normalize or norm == 0:
            norm = 1.0
        elif floor_how == "add":
            norm = norm + floor
        F.append(weight / norm * f)
    return total(f * d for f, d in zip(F, deltas_of(group), strict=True)) / total(F)


REFERENCES = {
    "wudi": wudi,
    "aswudi": aswudi,
    "swudi": swudi,
    "auto_measured": auto_measured,
    "regmean": regmean,
    "lot": lot,
    "ssr": ssr,
    "esm": esm,
    "fisher": fisher,
}
