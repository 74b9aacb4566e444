"""Averaging, Task Arithmetic, ACTMat and ACE."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from covmerge.types import LinearGroup


def average(group: LinearGroup) -> Tensor:
    return task_arithmetic(group, scale=1.0) / sum(group.weights)


def task_arithmetic(group: LinearGroup, *, scale: float = 0.3) -> Tensor:
    return scale * sum(w * d.double() for w, d in zip(group.weights, group.updates, strict=True))


def actmat(group: LinearGroup, *, rtol: float | None = None) -> Tensor:
    """ACTMat, Eq. 3 for differences."""
    deltas = [d.double() for d in group.updates]
    d_in = deltas[0].shape[1]
    weights = mean_one(deltas, group.weights)
    C = [w * d.T @ d for w, d in zip(weights, deltas, strict=True)]
    cutoff = d_in * torch.finfo(torch.float32).eps if rtol is None else rtol
    inverse = torch.linalg.pinv(sum(C), rtol=cutoff, hermitian=True)
    return sum(d @ c for d, c in zip(deltas, C, strict=True)) @ inverse


def ace(
    group: LinearGroup,
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
    """ACE-Merging, Algorithm 1; experts of which it can tell nothing are averaged."""
    weights = mean_one(group.updates, group.weights)
    pairs = [(d.double(), w) for d, w in zip(group.updates, weights, strict=True) if d.any()]
    if not pairs:
        return torch.zeros_like(group.updates[0], dtype=torch.float64)

    def fires(told: Sequence[tuple[Tensor, float]]) -> bool:  # Eq. 7
        if len(told) < 2 or not normalize:
            return False
        log_energy = torch.stack([(d**2).sum().log() for d, _ in told])
        gamma = log_energy.var(unbiased=True)
        if gate == "paper":
            gamma = gamma / log_energy.mean() ** 2
        threshold = tau if tau is not None else {"paper": 0.3, "scale_free": 1.0}[gate]
        return bool(gamma > threshold)

    def energy(d: Tensor) -> float:
        return float(((d - d.mean(0)) ** 2).sum())

    told = [(d, w) for d, w in pairs if energy(d) > 0.01 * d.norm() ** 2]
    if fires(told):
        told = [(d, w) for d, w in told if eps <= 200 * energy(d)]
    kept = [id(d) for d, _ in told]
    rest = [w * d / len(pairs) for d, w in pairs if id(d) not in kept]
    if not told:
        return sum(rest)
    deltas = [d for d, _ in told]
    weights = mean_one(deltas, [w for _, w in told])
    T, (d_out, d_in) = len(deltas), deltas[0].shape
    one_out = torch.ones(d_out, 1, dtype=torch.float64)
    one_in = torch.ones(d_in, 1, dtype=torch.float64)
    identity = torch.eye(d_in, dtype=torch.float64)
    fired = fires(told)

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
    return merged + sum(rest)


def mean_one(deltas: Sequence[Tensor], weights: Sequence[float]) -> list[float]:
    """Weights of mean 1 over the experts that changed the layer."""
    active = [w for d, w in zip(deltas, weights, strict=True) if d.any()] or [1.0]
    return [w * len(active) / sum(active) for w in weights]


TWINS = {"average": average, "task_arithmetic": task_arithmetic, "actmat": actmat, "ace": ace}

# ACE's ablation (its Table 4).
ABLATION = {
    "E1": {"normalize": False, "prior": False},
    "E2": {"prior": False, "refine": False},
    "E3": {"refine": False},
    "E4": {},
}
VARIANTS = [
    ("average", {}),
    ("task_arithmetic", {"scale": 0.4}),
    ("actmat", {}),
    *[("ace", {"eps": eps, **step}) for eps in (1e-5, 1e-2) for step in ABLATION.values()],
    ("ace", {"gate": "scale_free", "tau": 0.5, "k_frac": 0.6}),
    ("ace", {"tau": 1e-9}),  # fires for nearly equal norms
]
# Parameters that keep low-rank updates well posed: the twin's directions beyond the rank are arbitrary.
LOW_RANK = {"ace": {"rank_rtol": 1e-9}}
