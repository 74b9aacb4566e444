"""Averaging, Task Arithmetic, ACTMat and ACE."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, inf, log

import torch
from torch import Tensor

from covmerge.base.types import LinearGroup, Rounding
from covmerge.maths.reference.algebra import (
    deltas_of,
    identity,
    inverse,
    length,
    svd,
    total,
    weighted,
)
from covmerge.maths.reference.rank import (
    gram_inverse,
    leading,
    of_terms,
    roundings,
    together,
    tolerance,
)


def average(group: LinearGroup) -> Tensor:
    """Σ w_t Δ_t / Σ w_t  (Model soups)."""
    return task_arithmetic(group, scale=1.0) / sum(group.weights)


def task_arithmetic(group: LinearGroup, *, scale: float = 0.3) -> Tensor:
    """λ Σ w_t Δ_t  (Task Arithmetic, §2)."""
    return scale * weighted(deltas_of(group), group.weights)


def actmat(group: LinearGroup, *, rtol: float | None = None) -> Tensor:
    """(Σ w_t Δ_t C_t)(Σ w_t C_t)†, C_t = Δ_tᵀΔ_t  (ACTMat, Eq. 3 for differences)."""
    return least_interference(group, mean_one(group.updates, group.weights), rtol)


def least_interference(group: LinearGroup, scales: Sequence[float], rtol: float | None) -> Tensor:
    """(Σ s_t Δ_t Δ_tᵀΔ_t)(Σ s_t Δ_tᵀΔ_t)†, with the cut-off of ACTMat's published code in float32."""
    deltas = deltas_of(group)
    cutoff = group.shape[1] * torch.finfo(torch.float32).eps if rtol is None else rtol
    roots = [s**0.5 * d for s, d in zip(scales, deltas, strict=True)]
    errors = [e.times(s**0.5) for e, s in zip(roundings(group, rtol), scales, strict=True)]
    numerator = total(s * d @ d.T @ d for s, d in zip(scales, deltas, strict=True))
    changed = [t for t, d in enumerate(deltas) if d.any()]
    if not changed:
        return numerator
    D = torch.vstack([roots[t] for t in changed])
    rounding = Rounding.together(errors[t] for t in changed)
    return numerator @ gram_inverse(D, cutoff, rounding)


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
    """ACE-Merging, Algorithm 1; experts whose estimate tells nothing are averaged."""
    weights = mean_one(group.updates, group.weights)
    errors = roundings(group, None)
    each = zip(deltas_of(group), weights, errors, strict=True)
    changed = [(d, w, e) for d, w, e in each if d.any()]
    if not changed:
        return torch.zeros_like(group.updates[0], dtype=torch.float64)

    def fires(updates: Sequence[Tensor]) -> bool:
        threshold = tau if tau is not None else {"paper": 0.3, "scale_free": 1.0}[gate]
        return normalize and gamma(updates, gate) > threshold

    known = [entry for entry in changed if energy(entry[0]) > 0.01 * length(entry[0]) ** 2]
    if fires([d for d, _, _ in known]):
        known = [entry for entry in known if eps <= 200 * energy(entry[0])]
    summed = [id(d) for d, _, _ in known]
    rest = [w * d / len(changed) for d, w, _ in changed if id(d) not in summed]
    if not known:
        return total(rest)
    deltas = [d for d, _, _ in known]
    weights = mean_one(deltas, [w for _, w, _ in known])
    T, (d_out, d_in) = len(deltas), deltas[0].shape
    one_out = torch.ones(d_out, 1, dtype=torch.float64)
    one_in = torch.ones(d_in, 1, dtype=torch.float64)
    fired = fires(deltas)

    mu = [d.T @ one_out / d_out for d in deltas]  # Eq. 5
    centred = [d - one_out @ m.T for d, m in zip(deltas, mu, strict=True)]
    raw = [c.T @ c for c in centred]  # Eq. 6
    traces = [float(r.trace()) + 1e-12 if fired else 1.0 for r in raw]
    structural = [w * r / tr for w, r, tr in zip(weights, raw, traces, strict=True)]  # Eqs. 8, 15
    reg = [  # Eqs. 9, 10
        s + w * eps / tr * identity(d_in)
        for s, w, tr in zip(structural, weights, traces, strict=True)
    ]
    system = total(reg)
    if prior:
        c = one_in.T @ total(structural) / d_in  # Eq. 11
        if fired:
            c = c / (sum(length(d) ** 2 for d in deltas) / T)  # Eqs. 12, 13
        system = system + one_in @ c
    numerator = total(c @ r for c, r in zip(centred, reg, strict=True))

    def within(inputs: Tensor) -> Tensor:
        return numerator @ inputs @ inverse(inputs.T @ system @ inputs) @ inputs.T

    if eps:
        merged = numerator @ inverse(system)  # Eq. 14
        scales = [w / tr for w, tr in zip(weights, traces, strict=True)]
        inputs = clear_inputs(merged, deltas, centred, scales, [e for _, _, e in known], total(reg))
        merged = merged if inputs is None else within(inputs)
    else:  # the limit of a vanishing ridge, within the inputs that the sums span
        merged = within(leading(total(reg), d_in * torch.finfo(torch.float64).eps).U)
    if fired and refine:
        mean_reg = total(reg) / T  # Eq. 16
        residual = total(
            d @ (s - mean_reg) for d, s in zip(deltas, structural, strict=True)
        )  # Eq. 17
        rtol = max(d_out, d_in) * torch.finfo(torch.float64).eps if rank_rtol is None else rank_rtol
        k = max(1, int(k_frac * min(d_out, d_in)))
        if rank_rtol is None:  # the fused update has no more directions than the updates
            k = min(k, joint_rank(deltas, [e for _, _, e in known], tolerance(group, None)))
        top = leading(merged + residual, rtol).first(k)
        merged = merged + top.S.mean() * top.U @ top.Vh  # Eqs. 18, 19
    return total([merged, *rest])


def auto(group: LinearGroup) -> Tensor:
    """(1 − h) R + h F, a regression and a flat spectrum, times s  (docs/auto.md)."""
    each = zip(deltas_of(group), group.weights, roundings(group, None), strict=True)
    changed = [(d, length(d), w, e) for d, w, e in each if d.any()]
    if not changed:
        return torch.zeros_like(group.updates[0], dtype=torch.float64)
    c = sum(n for _, n, _, _ in changed) / sum(w * n for _, n, w, _ in changed)
    changed = [(d, n, c * w, e) for d, n, w, e in changed]
    alike = sum(
        w * v * n * m * (1.0 if x is y else float((x * y).sum() / n / m) ** 2)
        for x, n, w, _ in changed
        for y, m, v, _ in changed
    )
    N = max(1.0, sum(w * n for _, n, w, _ in changed) ** 2 / alike)
    kappa = sum(w * n**2 for _, n, w, _ in changed) / alike
    S = total(w * d for d, _, w, _ in changed)
    B = total(w * d.T @ d / n for d, n, w, _ in changed)
    rho = 0.1 * length(B) ** 2 / float(B.trace())
    numerator = total(w * d @ (d.T @ d) / n for d, n, w, _ in changed) + rho * kappa * S
    R = numerator @ inverse(B + rho * identity(group.shape[1]))
    D, errors = [d for d, _, _, _ in changed], [e for _, _, _, e in changed]
    rounding = of_terms(D, errors, [e.times(w) for _, _, w, e in changed])
    top = leading(S, tolerance(group, None), rounding)
    h = (1 - N**-2) / 2
    if not len(top.S):
        return (1 - h) * R
    tau = 0.01 * (top.S**2).sum() / top.S.sum()
    raised = top.S / (top.S**2 + tau**2).sqrt()
    F = top.U @ torch.diag(raised * kappa * top.S.sum() / raised.sum()) @ top.Vh
    e = float(raised.sum()) / min(group.shape)
    one = sum(w * n**2 for _, n, w, _ in changed) / sum(w * n for _, n, w, _ in changed)
    q = min(1.0, one / (kappa * length(top.S)))
    return (e + (1 - e) * (1 + q) / 2) * ((1 - h) * R + h * F)


def share_of_inputs(G: Tensor) -> float:
    """ψ = log det(I + 10⁴Ĝ) / (d_in log(1 + 10⁴)) for a Ĝ of mean eigenvalue 1  (docs/auto-measured.md)."""
    return float((identity(len(G)) + 10**4 * G).logdet()) / len(G) / log(1 + 10**4)


def share_used(D: Tensor) -> float:
    """ω = log det(I + 10⁴ m ΔᵀΔ/‖Δ‖²) / (m log(1 + 10⁴)), m = min(d_out, d_in)  (docs/auto-measured.md)."""
    U = (D if len(D) >= D.shape[1] else D.T) / length(D)
    return min(1.0, share_of_inputs(min(D.shape) * U.T @ U))


def equalised(
    group: LinearGroup,
    R: Tensor,
    C0: Tensor,
) -> Tensor | None:
    """(1 − a) λ (K + τ²I)^(−q/2) R + a R, K = R C₀ Rᵀ; None where RC₀^½ has numerical rank 0."""
    d_out = len(R)
    weights = mean_one(group.updates, group.weights)
    changed = [(d, w) for d, w in zip(deltas_of(group), weights, strict=True) if d.any()]
    b = bounds([length(d) for d, _ in changed])
    changed = [(f * d, w) for f, (d, w) in zip(b, changed, strict=True)]
    s = shares([length(d) for d, _ in changed])
    scales = [f * w for f, (_, w) in zip(s, changed, strict=True)]
    w = [x * sum(s) / sum(scales) for _, x in changed]
    L = root(C0)
    images = [d @ L for d, _ in changed]
    sizes = [max(length(x), 1e-150) for x in images]
    same = [
        [
            1.0 if i == j else float((x * y).sum() / sizes[i] / sizes[j]) ** 2
            for j, y in enumerate(images)
        ]
        for i, x in enumerate(images)
    ]
    alike = sum(s[i] * s[j] * same[i][j] for i in range(len(s)) for j in range(len(s)))
    N = sum(s) ** 2 / alike
    top = leading(R @ L, tolerance(group, None), Rounding())
    if not len(top.S):
        return None
    tau = 0.01 * (top.S**2).sum() / top.S.sum()
    phi = float((top.S**2 / (top.S**2 + tau**2)).sum()) / min(R.shape)
    omega = [share_used(d) for d, _ in changed]
    middle = sum(share * x for share, x in zip(s, omega, strict=True)) / sum(s)
    spread = [share * (x - middle) ** 2 for share, x in zip(s, omega, strict=True)]
    eta = sum(spread) / sum(s) / middle / (1 - middle) if middle < 1 else 0.0
    q = (0.75 - phi / 4) * (1 - N**-2) * (1 - min(1.0, eta))
    lift = (top.S**2 + tau**2) ** (-q / 2)
    unseen = tau**-q
    power = unseen * identity(d_out) + top.U @ torch.diag(lift - unseen) @ top.U.T
    whole = svd(weighted(images, w))[1].sum()
    M = whole * sum(share**2 for share in s) / alike / (top.S * lift).sum() * power @ R
    if group.base_norm is None:
        return M
    if group.base_norm == 0:
        return R
    squares = [o * x * length(d) ** 2 for o, x, (d, _) in zip(s, w, changed, strict=True)]
    rho = sum(squares) ** 0.5 / group.base_norm
    a = 1 - 1 / (1 + (3 * rho) ** 4)
    return (1 - a) * M + a * R


def shares(norms: Sequence[float]) -> list[float]:
    """s_t = ‖Δ_t‖² / (‖Δ_t‖² + 0.01 Σ‖Δ_s‖⁴/Σ‖Δ_s‖²)."""
    usual = sum(n**4 for n in norms) / sum(n**2 for n in norms)
    return [n**2 / (n**2 + 0.01 * usual) for n in norms]


def bounds(norms: Sequence[float]) -> list[float]:
    """b_t = ((1 + 2⁻⁴) / (1 + (‖Δ_t‖/2g)⁴))^¼, log g = Σ c_t log ‖Δ_t‖ / Σ c_t."""
    n = [norm / max(norms) for norm in norms]
    if len(n) == 1:
        return [1.0]
    pairs = [[u**0.25 / (1 + 0.01 * (u / t) ** 2) for u in n] for t in n]
    c = [sum(row[:t] + row[t + 1 :]) for t, row in enumerate(pairs)]
    g = max(norms) * exp(sum(f * log(t) for f, t in zip(c, n, strict=True)) / sum(c))
    return [((1 + 2**-4) / (1 + (n / (2 * g)) ** 4)) ** 0.25 for n in norms]


def root(C0: Tensor) -> Tensor:
    """L with LLᵀ = C₀, scaled to trace d."""
    U, S, _ = svd(C0)
    above = S > len(S) * torch.finfo(S.dtype).eps * S.max()  # smaller ones are rounding
    return U @ torch.diag((S * above / S.mean()).sqrt())


def clear_inputs(
    merged: Tensor,
    deltas: Sequence[Tensor],
    roots: Sequence[Tensor],
    scales: Sequence[float],
    errors: Sequence[Rounding],
    system: Tensor,
) -> Tensor | None:
    """The inputs above the rounding E_t if the solve amplifies it more than tenfold; else None.

    To first order W̄ has Σ s_t(Δ_t − W̄)Δ_tᵀE_t(Σ C_t)⁻¹ of it, on the inputs that are in any update.
    """
    D = torch.vstack([s**0.5 * root for s, root in zip(scales, roots, strict=True)])
    sigma = svd(system)[1][: min(D.shape)]
    made = sum(
        s**2 * e.energy / d.numel() * length((d - merged) @ d.T) ** 2
        for d, s, e in zip(deltas, scales, errors, strict=True)
    )
    if float(made * (sigma**-2).sum()) <= 100 * sum(e.energy for e in errors):
        return None
    known = zip(errors, scales, strict=True)
    rounding = Rounding.together(e.times(s**0.5) for e, s in known)
    found = leading(D, 0.0, rounding)
    return found.Vh.T if found.edge and len(found.S) else None


def energy(d: Tensor) -> float:
    """Tr Δ̃ᵀΔ̃ of the centred update."""
    return length(d - d.mean(0)) ** 2


def gamma(deltas: Sequence[Tensor], gate: str) -> float:
    """γ  (ACE, Eq. 7), and 0 for norms that agree to rounding."""
    norms = [length(d) for d in deltas]
    if len(norms) < 2 or max(norms) - min(norms) <= 1e-6 * max(norms):
        return 0.0
    log_energy = torch.tensor(norms, dtype=torch.float64).square().log()
    variance, mean = float(log_energy.var(unbiased=True)), float(log_energy.mean())
    if gate == "scale_free":
        return variance
    return variance / mean**2 if mean else inf


def joint_rank(deltas: Sequence[Tensor], errors: Sequence[Rounding], rtol: float) -> int:
    """The dimension of the row space of all updates, each scaled to norm 1."""
    units = [d.T / length(d) for d in deltas]
    scaled = [e.times(1 / length(d)) for d, e in zip(deltas, errors, strict=True)]
    return max(1, len(together(units, rtol, scaled)[1]))


def mean_one(deltas: Sequence[Tensor], weights: Sequence[float]) -> list[float]:
    """Weights scaled to mean 1 over the experts that changed the layer."""
    active = [w for d, w in zip(deltas, weights, strict=True) if d.any()] or [1.0]
    return [w * len(active) / sum(active) for w in weights]


REFERENCES = {
    "average": average,
    "task_arithmetic": task_arithmetic,
    "actmat": actmat,
    "ace": ace,
    "auto": auto,
}
