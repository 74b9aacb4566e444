"""CART, TSV-Merge, DC-Merge, ResMerge, Iso-C, Iso-CTS and FR-Merging."""

from __future__ import annotations

from itertools import combinations
from typing import Any, cast

import torch
from torch import Tensor

from covmerge.base.types import LinearGroup, Rounding
from covmerge.maths.reference.algebra import deltas_of, length, total, weighted
from covmerge.maths.reference.elementwise import ties_of
from covmerge.maths.reference.rank import (
    Spectrum,
    leading,
    of_sum,
    orthogonalized,
    roundings,
    tolerance,
)

_fft: Any = torch.fft


def cart(group: LinearGroup, *, rank_ratio: float = 0.12, scale: float = 2.0) -> Tensor:
    """Δ̄ + λ Σ w_t SVD_k(Δ_t − Δ̄)  (CART)."""
    deltas = deltas_of(group)
    T = len(deltas)
    weights = [w * T / sum(group.weights) for w in group.weights]
    average = weighted(deltas, weights) / T
    k = max(1, int(rank_ratio * min(average.shape)))
    rtol = tolerance(group, None)
    merged = average.clone()
    for w, d in zip(weights, deltas, strict=True):
        top = leading(d - average, rtol).first(k)
        merged += scale * w * top.U @ torch.diag(top.S) @ top.Vh
    return merged


def tsv_m(
    group: LinearGroup,
    *,
    scale: float = 1.0,
    lossless: bool = False,
    rank_rtol: float | None = None,
) -> Tensor:
    """α polar(U) diag(σ) polar(V)ᵀ  (TSV-Merge), over the experts that changed the layer."""
    rtol = tolerance(group, rank_rtol)
    changed = _changed(group, rank_rtol)
    if not changed:
        return torch.zeros_like(group.updates[0], dtype=torch.float64)
    r = min(group.shape)
    share = r if lossless else max(1, r // len(changed))
    parts = [leading(d, rtol, error).first(share) for d, _, error in changed]
    sigma = torch.cat([w * part.S for part, (_, w, _) in zip(parts, changed, strict=True)])
    left, right = orthogonalized(parts, rtol)
    return scale * left @ torch.diag(sigma) @ right


def dc_merge(
    group: LinearGroup,
    *,
    density: float = 1e-3,
    smoothing: float | None = None,
    scale: float = 1.0,
    rank_rtol: float | None = None,
) -> Tensor:
    """α Û diag(M₁₁ … M_TT) V̂ᵀ  (DC-Merge), M elected among M_t = Ûᵀ U_t diag(w_tσ_t) V_tᵀ V̂."""
    rtol = tolerance(group, rank_rtol)
    changed = _changed(group, rank_rtol)
    if not changed:
        return torch.zeros_like(group.updates[0], dtype=torch.float64)
    share = max(1, min(group.shape) // len(changed))
    parts = [leading(d, rtol, error).first(share) for d, _, error in changed]
    if not any(len(part.S) for part in parts):
        return torch.zeros_like(parts[0].U @ parts[0].Vh)
    left, right = orthogonalized(parts, rtol)
    cores = [
        w * left.T @ part.U @ torch.diag(_smooth(part.S, smoothing)) @ part.Vh @ right.T
        for part, (_, w, _) in zip(parts, changed, strict=True)
    ]
    # Entries below the rounding of the largest do not vote, and rounding separates no two entries.
    noise = [4 * max(group.shape) ** 0.5 * 2**-23 * float(M.abs().max()) for M in cores]
    votes = max(1, int(density * cores[0].numel()))
    last = [float(M.abs().flatten().sort(descending=True).values[votes - 1]) for M in cores]
    limits = [max(a - e, e) for a, e in zip(last, noise, strict=True)]
    M = ties_of(cores, [1.0] * len(cores), density, "mean", limits)
    owner = torch.cat([torch.full((len(part.S),), t) for t, part in enumerate(parts)])
    return scale * left @ (M * (owner[:, None] == owner)) @ right


def _smooth(S: Tensor, rho: float | None) -> Tensor:
    """The singular values replaced by a line from min(ρ, σ_1/σ_k) to 1, scaled to the same sum."""
    if rho is None:
        return S
    ratio = min(rho, float(S[0] / S[-1]))
    steps = torch.arange(len(S), dtype=torch.float64)
    line = ratio - (ratio - 1) * steps / max(1, len(S) - 1)
    return S.sum() * line / line.sum()


def resmerge(
    group: LinearGroup,
    *,
    head_rank: int = 1,
    head_ratio: float = 0.2,
    beta_min: float = 0.7,
    beta_max: float = 1.0,
    rank_rtol: float | None = None,
) -> Tensor:
    """A + ρ s_H ‖A‖ H̄/‖H̄‖, A = c_R^β n̄ q, Δ_t = H_t + R_t with H_t of rank K  (ResMerge)."""
    rtol = tolerance(group, rank_rtol)
    changed = _changed(group, rank_rtol)
    if not changed:
        return torch.zeros_like(group.updates[0], dtype=torch.float64)
    H: list[tuple[Tensor, float]] = []
    R: list[tuple[Tensor, float]] = []
    for d, w, error in changed:
        found = leading(d, rtol, error)
        top = found.first(head_rank)
        H.append((top.U @ torch.diag(top.S) @ top.Vh, w))
        if len(found.S) > len(top.S):
            R.append((d - H[-1][0], w))
    if not R:
        return _mean([(d, w) for d, w, _ in changed])
    A = _src_a(R, beta_min, beta_max)
    head = _mean(H)
    if length(head) <= 1e-4 * sum(w * length(h) for h, w in H) / sum(w for _, w in H):
        return A
    return A + head_ratio * _mean_cosine(H, least=0.0) * length(A) * head / length(head)


def _src_a(R: list[tuple[Tensor, float]], beta_min: float, beta_max: float) -> Tensor:
    """c^β n̄ q, q the direction of ΣR_t/‖R_t‖; the mean if residuals have nothing in common."""
    s = _mean_cosine(R)
    if s <= 1e-4:
        return _mean(R)
    weights = sum(w for _, w in R)
    m = _mean([(r / length(r), w) for r, w in R])
    q = m / length(m)
    c = sum(w * float((r / length(r) * q).sum()) for r, w in R) / weights
    beta = beta_max - (beta_max - beta_min) * ((s + 1) / 2 + (c + 1) / 2) / 2
    return c**beta * sum(w * length(r) for r, w in R) / weights * q


def _mean(pairs: list[tuple[Tensor, float]]) -> Tensor:
    """Σ w_t A_t / Σ w_t."""
    return total(w * a for a, w in pairs) / sum(w for _, w in pairs)


def _mean_cosine(pairs: list[tuple[Tensor, float]], least: float = -1.0) -> float:
    """The mean over i < j, weighted by w_i w_j, of max(cosine, `least`); 1 for one tensor."""
    two = list(combinations(pairs, 2))
    found = [
        (max(least, float((a * b).sum()) / (length(a) * length(b))), v * w)
        for (a, v), (b, w) in two
    ]
    return sum(c * w for c, w in found) / sum(w for _, w in found) if two else 1.0


def iso_c(group: LinearGroup, *, scale: float = 1.0, rank_rtol: float | None = None) -> Tensor:
    """α σ̄ U Vᵀ of Σ w_t Δ_t = U diag(σ) Vᵀ  (Iso-C), within the numerical rank of the sum."""
    return scale * flat(spectrum_of_sum(group, rank_rtol))


def flat(found: Spectrum) -> Tensor:
    """σ̄ U Vᵀ."""
    return found.S.mean().nan_to_num() * found.U @ found.Vh


def iso_cts(
    group: LinearGroup,
    *,
    common_fraction: float = 0.8,
    scale: float = 1.0,
    rank_rtol: float | None = None,
) -> Tensor:
    """α σ̄ polar([U_1 … U_T U_c]) polar([V_1 … V_T V_c])ᵀ  (Iso-CTS), with r = rank directions."""
    rtol = tolerance(group, rank_rtol)
    changed = _changed(group, rank_rtol)
    whole = spectrum_of_sum(group, rank_rtol)
    r, T = len(whole.S), len(changed)
    if r == 0:
        return torch.zeros_like(group.updates[0], dtype=torch.float64)
    s = max(1, round((r - int(r * common_fraction)) / T))
    common = whole.first(max(0, r - s * T))
    parts: list[Spectrum] = []
    sigma: list[Tensor] = []
    for d, w, error in changed:
        rest = d - common.U @ common.U.T @ d
        parts.append(leading(rest, rtol, error, largest=length(d)).first(s))
        sigma.append(w * parts[-1].S)
    mean = torch.cat([*sigma, common.S]).mean()
    left, right = orthogonalized([*parts, common], rtol)
    return scale * mean * left @ right


def free(
    group: LinearGroup, *, filter_ratio: float = 0.7, scale: float = 0.7, align: bool = False
) -> Tensor:
    """λ Σ w_t a_t F⁻¹(M ⊙ F(Δ_t))  (FR-Merging), with the mask of the published code."""
    H, W = group.updates[0].shape
    y, x = torch.arange(H)[:, None], torch.arange(W)
    # In float32, as in the published code: it decides which frequencies are on the rim.
    distance = ((y - H // 2) ** 2 + (x - W // 2) ** 2).float().sqrt()
    low, high = min(H, W) // 10, min(H, W) * filter_ratio
    mask = (distance <= low).double() + ((low <= distance) & (distance <= high)).double()
    filtered = [_filtered(d, mask) for d in deltas_of(group)]
    if not align:
        return scale * weighted(filtered, group.weights)
    sizes = [float(f.abs().mean()) for f in filtered]
    eps = torch.finfo(group.updates[0].dtype).eps
    # The rounding that is left of an update without high frequencies adds nothing.
    kept = [s > eps * float(d.abs().mean()) for s, d in zip(sizes, group.updates, strict=True)]
    largest = max((s for s, k in zip(sizes, kept, strict=True) if k), default=0.0)
    factors = [
        w * largest / s if k else 0.0 for w, s, k in zip(group.weights, sizes, kept, strict=True)
    ]
    return scale * total(a * f for a, f in zip(factors, filtered, strict=True))


def spectrum_of_sum(group: LinearGroup, rank_rtol: float | None) -> Spectrum:
    """The SVD of Σ w_t Δ_t, within its numerical rank."""
    rtol = tolerance(group, rank_rtol)
    rounding = of_sum(group, rank_rtol, rtol)
    return leading(weighted(deltas_of(group), group.weights), rtol, rounding)


def _changed(group: LinearGroup, rank_rtol: float | None) -> list[tuple[Tensor, float, Rounding]]:
    """Δ_t, w_t and the rounding error, for the experts that changed the layer."""
    errors = roundings(group, rank_rtol)
    each = zip(deltas_of(group), group.weights, errors, strict=True)
    return [(d, w, error) for d, w, error in each if d.any()]


def _filtered(d: Tensor, mask: Tensor) -> Tensor:
    return cast("Tensor", _fft.ifft2(_fft.fft2(d) * mask).real)


REFERENCES = {
    "cart": cart,
    "tsv_m": tsv_m,
    "dc_merge": dc_merge,
    "resmerge": resmerge,
    "iso_c": iso_c,
    "iso_cts": iso_cts,
    "free": free,
}
