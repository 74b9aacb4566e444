"""CART, TSV-Merge, Iso-C, Iso-CTS and FR-Merging."""

from __future__ import annotations

import torch
from torch import Tensor

from covmerge.types import LinearGroup


def cart(group: LinearGroup, *, rank_ratio: float = 0.12, scale: float = 2.0) -> Tensor:
    deltas = [d.double() for d in group.updates]
    T = len(deltas)
    weights = [w * T / sum(group.weights) for w in group.weights]
    average = sum(w * d for w, d in zip(weights, deltas, strict=True)) / T
    k = max(1, int(rank_ratio * min(average.shape)))
    merged = average.clone()
    for w, d in zip(weights, deltas, strict=True):
        U, S, Vh = torch.linalg.svd(d - average, full_matrices=False)
        merged += scale * w * U[:, :k] @ torch.diag(S[:k]) @ Vh[:k]
    return merged


def tsv_m(
    group: LinearGroup,
    *,
    scale: float = 1.0,
    lossless: bool = False,
    rank_rtol: float | None = None,
) -> Tensor:
    rtol = tolerance(group, rank_rtol)
    pairs = [(d.double(), w) for d, w in zip(group.updates, group.weights, strict=True) if d.any()]
    if not pairs:
        return torch.zeros_like(group.updates[0], dtype=torch.float64)
    r = min(pairs[0][0].shape)
    share = r if lossless else max(1, r // len(pairs))
    left, sigma, right = [], [], []
    for d, w in pairs:
        U, S, Vh = torch.linalg.svd(d, full_matrices=False)
        k = min(share, int((S > rtol * S[0]).sum()))
        left.append(U[:, :k])
        sigma.append(w * S[:k])
        right.append(Vh[:k])
    return (
        scale
        * polar(torch.hstack(left), rtol)
        @ torch.diag(torch.cat(sigma))
        @ polar(torch.vstack(right), rtol)
    )


def iso_c(group: LinearGroup, *, scale: float = 1.0, rank_rtol: float | None = None) -> Tensor:
    U, S, Vh = spectrum_of_sum(group, tolerance(group, rank_rtol))
    return scale * S.mean().nan_to_num() * U @ Vh


def iso_cts(
    group: LinearGroup,
    *,
    common_fraction: float = 0.8,
    scale: float = 1.0,
    rank_rtol: float | None = None,
) -> Tensor:
    rtol = tolerance(group, rank_rtol)
    pairs = [(d.double(), w) for d, w in zip(group.updates, group.weights, strict=True) if d.any()]
    U, S, Vh = spectrum_of_sum(group, rtol)
    r, T = len(S), len(pairs)
    if r == 0:
        return torch.zeros_like(group.updates[0], dtype=torch.float64)
    s = max(1, round((r - int(r * common_fraction)) / T))
    c = max(0, r - s * T)
    Uc, Sc, Vhc = U[:, :c], S[:c], Vh[:c]
    left, sigma, right = [], [], []
    for d, w in pairs:
        Ut, St, Vht = torch.linalg.svd(d - Uc @ Uc.T @ d, full_matrices=False)
        k = min(s, int((St > rtol * d.norm()).sum()))
        left.append(Ut[:, :k])
        sigma.append(w * St[:k])
        right.append(Vht[:k])
    flat = torch.cat([*sigma, Sc]).mean()
    return (
        scale
        * flat
        * polar(torch.hstack([*left, Uc]), rtol)
        @ polar(torch.vstack([*right, Vhc]), rtol)
    )


def free(
    group: LinearGroup, *, filter_ratio: float = 0.7, scale: float = 0.7, align: bool = False
) -> Tensor:
    H, W = group.updates[0].shape
    mask = torch.zeros(H, W, dtype=torch.float64)
    for y in range(H):
        for x in range(W):
            distance = ((y - H // 2) ** 2 + (x - W // 2) ** 2) ** 0.5
            low, high = min(H, W) // 10, min(H, W) * filter_ratio * (1 + 1e-7)
            mask[y, x] = (distance <= low) + (low <= distance <= high)
    filtered = [torch.fft.ifft2(torch.fft.fft2(d.double()) * mask).real for d in group.updates]
    sizes = [f.abs().mean() for f in filtered]
    ratios = [max(sizes) / size if align and size > 0 else 1.0 for size in sizes]
    return scale * sum(w * a * f for w, a, f in zip(group.weights, ratios, filtered, strict=True))


def tolerance(group: LinearGroup, given: float | None) -> float:
    update = group.updates[0]
    return max(update.shape) ** 0.5 * torch.finfo(update.dtype).eps if given is None else given


def spectrum_of_sum(group: LinearGroup, rtol: float) -> tuple[Tensor, Tensor, Tensor]:
    """The SVD of the weighted sum, within its numerical rank."""
    total = sum(w * d.double() for w, d in zip(group.weights, group.updates, strict=True))
    U, S, Vh = torch.linalg.svd(total, full_matrices=False)
    r = int((S > rtol * S[0]).sum())
    return U[:, :r], S[:r], Vh[:r]


def polar(A: Tensor, rtol: float) -> Tensor:
    """A (AᵀA)^{†½}."""
    U, S, Vh = torch.linalg.svd(A, full_matrices=False)
    kept = S > rtol * S[0]
    return U[:, kept] @ Vh[kept]


TWINS = {"cart": cart, "tsv_m": tsv_m, "iso_c": iso_c, "iso_cts": iso_cts, "free": free}
VARIANTS = [
    ("cart", {}),
    ("cart", {"rank_ratio": 0.5, "scale": 1.5}),
    ("tsv_m", {}),
    ("tsv_m", {"lossless": True, "scale": 0.5}),
    ("iso_c", {}),
    ("iso_cts", {}),
    ("iso_cts", {"common_fraction": 0.5, "scale": 1.5}),
    ("free", {}),
    ("free", {"filter_ratio": 0.4}),
    ("free", {"align": True}),
]
LOW_RANK: dict[str, dict[str, object]] = {}
