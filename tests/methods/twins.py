"""The papers' equations typed literally, in float64, without any thought of speed.

Every fast kernel is compared with its twin here. Names follow the papers.
"""

from __future__ import annotations

import torch
from torch import Tensor


def average(deltas: list[Tensor], weights: list[float]) -> Tensor:
    return sum(w * d for w, d in zip(weights, deltas, strict=True)) / sum(weights)


def task_arithmetic(deltas: list[Tensor], weights: list[float], *, scale: float = 0.3) -> Tensor:
    return scale * sum(w * d for w, d in zip(weights, deltas, strict=True))


def actmat(deltas: list[Tensor], weights: list[float], *, rtol: float | None = None) -> Tensor:
    """ACTMat, Eq. 3 for differences."""
    deltas = [d.double() for d in deltas]
    d_in = deltas[0].shape[1]
    weights = _mean_one(deltas, weights)
    C = [w * d.T @ d for w, d in zip(weights, deltas, strict=True)]
    cutoff = d_in * torch.finfo(torch.float32).eps if rtol is None else rtol
    inverse = torch.linalg.pinv(sum(C), rtol=cutoff, hermitian=True)
    return sum(d @ c for d, c in zip(deltas, C, strict=True)) @ inverse


def ace(
    deltas: list[Tensor],
    weights: list[float],
    *,
    eps: float = 1e-5,
    tau: float | None = None,
    k_frac: float = 0.3,
    rank_rtol: float | None = None,
    normalize: bool = True,
    prior: bool = True,
    refine: bool = True,
    gate: str = "paper",
) -> Tensor:
    """ACE-Merging, Algorithm 1."""
    weights = _mean_one(deltas, weights)
    pairs = [(d.double(), w) for d, w in zip(deltas, weights, strict=True) if d.any()]
    if not pairs:
        return torch.zeros_like(deltas[0], dtype=torch.float64)
    deltas, weights = [d for d, _ in pairs], [w for _, w in pairs]
    T, (d_out, d_in) = len(deltas), deltas[0].shape
    one_out = torch.ones(d_out, 1, dtype=torch.float64)
    one_in = torch.ones(d_in, 1, dtype=torch.float64)
    identity = torch.eye(d_in, dtype=torch.float64)

    log_energy = torch.stack([(d**2).sum().log() for d in deltas])
    gamma = torch.tensor(0.0)
    if T > 1:  # Eq. 7
        gamma = log_energy.var(unbiased=True)
        if gate == "paper":
            gamma = gamma / log_energy.mean() ** 2
    threshold = tau if tau is not None else {"paper": 0.3, "scale_free": 1.0}[gate]
    fired = bool(gamma > threshold) and normalize

    mu = [d.T @ one_out / d_out for d in deltas]  # Eq. 5
    centred = [d - one_out @ m.T for d, m in zip(deltas, mu, strict=True)]
    raw = [c.T @ c for c in centred]  # Eq. 6
    traces = [float(r.trace()) + 1e-12 if fired else 1.0 for r in raw]
    structural = [w * r / tr for w, r, tr in zip(weights, raw, traces, strict=True)]  # Eqs. 8, 15
    reg = [  # Eqs. 9, 10
        s + w * eps / tr * identity for s, w, tr in zip(structural, weights, traces, strict=True)
    ]
    system = sum(reg)
    if prior:
        c = one_in.T @ sum(structural) / d_in  # Eq. 11
        if fired:
            c = c / torch.stack([(d**2).sum() for d in deltas]).mean()  # Eqs. 12, 13
        system = system + one_in @ c
    numerator = sum(c @ r for c, r in zip(centred, reg, strict=True))
    merged = numerator @ torch.linalg.inv(system)  # Eq. 14
    if fired and refine:
        mean_reg = sum(reg) / T  # Eq. 16
        residual = sum(
            d @ (s - mean_reg) for d, s in zip(deltas, structural, strict=True)
        )  # Eq. 17
        U, S, Vh = torch.linalg.svd(merged + residual, full_matrices=False)
        tol = max(d_out, d_in) * torch.finfo(torch.float64).eps if rank_rtol is None else rank_rtol
        k = max(1, min(int(k_frac * min(d_out, d_in)), int((S > tol * S[0]).sum())))
        merged = merged + S[:k].mean() * U[:, :k] @ Vh[:k]  # Eqs. 18, 19
    return merged


def _mean_one(deltas: list[Tensor], weights: list[float]) -> list[float]:
    active = [w for d, w in zip(deltas, weights, strict=True) if d.any()] or [1.0]
    return [w * len(active) / sum(active) for w in weights]


TWINS = {"average": average, "task_arithmetic": task_arithmetic, "actmat": actmat, "ace": ace}
