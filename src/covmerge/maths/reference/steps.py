"""Reference implementations of steps, which may stand before or after any method.

The reference of a step before a method returns the updates in float64; that of a step after it returns
the merged update.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from covmerge.base.types import LinearGroup
from covmerge.maths.reference.algebra import deltas_of, length, svd
from covmerge.maths.reference.rank import leading, roundings, tolerance, with_equals


def norm_balance(group: LinearGroup, *, strength: float = 1.0) -> list[Tensor]:
    """Δ_t (1 − strength + strength · mean_s ‖Δ_s‖ / ‖Δ_t‖), over the experts that changed the layer."""
    deltas = deltas_of(group)
    mean = _mean_length(deltas)
    return [d * (1 - strength + strength * mean / length(d)) if d.any() else d for d in deltas]


def pact(group: LinearGroup, *, core: float = 0.8, own: int = 10) -> list[Tensor]:
    """Δ_t (I − P_t), P_t onto span{(I − V_sV_sᵀ) V₀ : s ≠ t}  (PACT)."""
    assert group.base is not None
    deltas = deltas_of(group)
    rtol, errors = tolerance(group, None), roundings(group, None)
    V0 = leading(group.base.double(), rtol).first(max(1, int(core * min(group.shape)))).Vh.T
    relied: list[Tensor] = []
    for d, error in zip(deltas, errors, strict=True):
        V = leading(d, rtol, error).first(own).Vh.T
        relied.append(V0 - V @ V.T @ V0)
    filtered: list[Tensor] = []
    for t, d in enumerate(deltas):
        others = [block for s, block in enumerate(relied) if s != t]
        if others:
            U, S, _ = svd(torch.hstack(others))
            P = U[:, S > 1e-4]
            left = d - d @ P @ P.T
            nothing = P.shape[1] == len(P) or length(left) <= 4 * rtol * length(d)
            d = torch.zeros_like(d) if nothing else left
        filtered.append(d)
    return filtered


def pico(group: LinearGroup, *, factors: str = "balanced") -> list[Tensor]:
    """Δ_t + U diag(α − 1) UᵀΔ_t, [B_1 … B_T] = U diag(σ) Vᵀ, α_i = 1/(1 + (T − 1) σ_i²/Σσ²)  (Pico)."""
    deltas = deltas_of(group)
    rtol, errors = tolerance(group, None), roundings(group, None)
    blocks: list[Tensor] = []
    for t, d in enumerate(deltas):
        if not d.any():
            continue
        if factors == "given" and group.factors:
            blocks.append(group.factors[t].left.double())
        else:
            found = leading(d, rtol, errors[t])
            blocks.append(found.U @ torch.diag(found.S.sqrt()))
    T = len(blocks)
    if T < 2:
        return deltas
    U, S, _ = svd(torch.hstack(blocks))
    alpha = 1 / (1 + (T - 1) * S**2 / (S**2).sum())
    return [d + U @ torch.diag(alpha - 1) @ U.T @ d for d in deltas]


def rescale(group: LinearGroup, merged: Tensor, *, scale: float = 1.0) -> Tensor:
    """Δ · scale · mean_t ‖Δ_t‖ / ‖Δ‖, unless Δ is only rounding."""
    merged = merged.double()
    mean = _mean_length(deltas_of(group))
    if length(merged) <= 1e-4 * mean:
        return merged
    return merged * scale * mean / length(merged)


def svc(group: LinearGroup, merged: Tensor, *, alpha: float = 0.1) -> Tensor:
    """Σ_r σ_r T / Σ_t max(α, s_r^t) u_r v_rᵀ  (SVC), with one s for all u_r of equal singular values."""
    merged = merged.double()
    rtol = tolerance(group, None)
    experts = [
        (d, max((rtol * length(d)) ** 2, 1.5 * error.energy / len(d)))
        for d, error in zip(deltas_of(group), roundings(group, None), strict=True)
        if d.any()
    ]
    found = leading(merged, rtol)
    calibrated = merged - found.U @ torch.diag(found.S) @ found.Vh
    r = 0
    while r < len(found.S):
        end = with_equals(found.S, r + 1)
        U = found.U[:, r:end]
        total = 0.0
        for d, nothing in experts:
            along = U.T @ d
            energy = float((along**2).sum())
            carried = energy > (end - r) * nothing
            total += max(alpha, float((U.T @ merged * along).sum()) / energy if carried else 0.0)
        sigma = torch.diag(found.S[r:end])
        calibrated += len(experts) / total * U @ sigma @ found.Vh[r:end]
        r = end
    return calibrated


def _mean_length(deltas: list[Tensor]) -> float:
    """The mean norm of the updates that changed the layer."""
    sizes = [length(d) for d in deltas if d.any()]
    return sum(sizes) / max(1, len(sizes))


STEP_REFERENCES: Mapping[str, Callable[..., Tensor | list[Tensor]]] = {
    "norm_balance": norm_balance,
    "pact": pact,
    "pico": pico,
    "rescale": rescale,
    "svc": svc,
}
