"""Methods on the models' weights themselves, each as its documentation says; they return W̄.

If an arithmetic is named, its rounding is part of the method, and is torch's; otherwise everything is in
float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import torch
from torch import Tensor

from covmerge.base.types import LinearGroup
from covmerge.maths.reference.algebra import lengths, total

_NAMED = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


def given(group: LinearGroup, arithmetic: str | None) -> tuple[Tensor, list[Tensor]]:
    """W_0 and the W_t in the named arithmetic, or in float64."""
    dtype = _NAMED.get(arithmetic or "", torch.float64)
    assert group.base is not None
    return group.base.to(dtype), [model.to(dtype) for model in group.models]


def by_expert(value: float | Sequence[float], group: LinearGroup) -> list[float]:
    """One value for each expert."""
    return list(value) if isinstance(value, Sequence) else [value] * len(group.weights)


def shares_of(weight: float | Sequence[float], group: LinearGroup) -> list[float]:
    """w_t: the parameter times the expert's weight."""
    return [a * b for a, b in zip(by_expert(weight, group), group.weights, strict=True)]


def linear(
    group: LinearGroup,
    *,
    weight: float | list[float] = 1.0,
    normalize: bool = True,
    base_weight: float | None = None,
    arithmetic: str | None = None,
) -> Tensor:
    """Σ w_t W_t / Σ w_t, with W_0 as one more model if it has a weight."""
    W0, models = given(group, arithmetic)
    w = shares_of(weight, group)
    if base_weight is not None:
        models, w = [W0, *models], [base_weight, *w]
    # Sums are at least float32; in float64 their order makes no difference.
    summed = total(share * W.double() for share, W in zip(w, models, strict=True))
    mean = summed / sum(w) if normalize else summed
    return mean.to(W0.dtype).double()


def passthrough(
    group: LinearGroup, *, scale: float | None = None, arithmetic: str | None = None
) -> Tensor:
    """S W_1."""
    _, (W,) = given(group, arithmetic)
    return (W if scale is None else scale * W).double()


def nearswap(group: LinearGroup, *, t: float = 1e-3, arithmetic: str | None = None) -> Tensor:
    """S W_1 + (1 − s) W_0, s = t / max(|W_1 − W_0|, 1e-6) within 0 and 1."""
    W0, (W,) = given(group, arithmetic)
    s = (t / (W0 - W).abs().clamp(min=1e-6)).clamp(0, 1)
    return (s * W + (1 - s) * W0).double()


def arcee_fusion(group: LinearGroup, *, arithmetic: str | None = "float32") -> Tensor:
    """W_0 + Δ ⊙ [I ≥ Q_2 + 1.5 (Q_3 − Q_1)], I = |Δ| KL(softmax W_1 ‖ softmax W_0), with rounding."""
    start, (end,) = given(group, arithmetic)
    if start.numel() == 0:
        return start.double()
    W0, W = (x.view(start.shape or (1,)) for x in (start, end))
    p, q = torch.softmax(W, dim=-1) + 1e-8, torch.softmax(W0, dim=-1) + 1e-8
    KL = (p * torch.log(p / q)).sum(dim=-1, keepdim=True)
    importance = (W - W0).abs() * KL
    ranked = importance.flatten().sort().values
    last = importance.numel() - 1
    Q1, Q2, Q3 = (ranked[int(last * quarter)] for quarter in (0.25, 0.5, 0.75))
    taken = (importance >= Q2 + 1.5 * (Q3 - Q1)).double()
    return (W0.double() + (W - W0).double() * taken).view(start.shape)


def ram(
    group: LinearGroup,
    *,
    epsilon: float = 1e-5,
    boost: float = 0.0,
    most: float = 0.2,
    arithmetic: str | None = None,
) -> Tensor:
    """Changes by one expert are kept, times λ_t; changes by several are averaged."""
    W0, models = given(group, arithmetic)
    tau = [W - W0 for W in models]
    masks = [t.abs() > epsilon for t in tau]
    n = total(mask.int() for mask in masks)
    terms: list[Tensor] = []
    # RAM+ continues in at least float32.
    wide = torch.promote_types(W0.dtype, torch.float32) if boost else W0.dtype
    for t, mask in zip(tau, masks, strict=True):
        shared, unique = int((mask & (n > 1)).sum()), int((mask & (n == 1)).sum())
        rho = min(shared / max(unique, epsilon), most) if shared or unique else 0.0
        scaled = t.to(wide) * (1 + boost * rho)
        alone = torch.where(mask & (n == 1), scaled, torch.zeros_like(scaled))
        terms.append(alone + torch.where(mask & (n > 1), t / n.clamp(min=1), torch.zeros_like(t)))
    return (W0 + torch.stack(terms).sum(0)).double()


def model_stock(
    group: LinearGroup, *, filter_wise: bool = False, arithmetic: str | None = None
) -> Tensor:
    """W_0 + r (mean W_t − W_0), r = Nc / (1 + (N − 1)c), c the mean cosine of two updates."""
    W0, models = given(group, arithmetic)
    shape = W0.shape
    rows = (-1, shape[-1]) if filter_wise and len(shape) > 1 else (1, -1)
    if W0.numel() == 0:
        return W0.double()
    start, ends = W0.reshape(rows), [W.reshape(rows) for W in models]
    tau = [end - start for end in ends]
    N = len(tau)
    cosines = [
        ((a * b).sum(1) / (lengths(a, 1) * lengths(b, 1)).clamp(min=1e-6)).clamp(-1, 1)
        for a, b in combinations(tau, 2)
    ]
    c = torch.stack(cosines).mean(dim=0)[:, None]
    pole = (1 + (N - 1) * c).abs() < 1e-6
    r = torch.where(pole, torch.zeros_like(c), N * c / (1 + (N - 1) * c))
    return (r * (total(ends) / N) + (1 - r) * start).reshape(shape).double()


def sce(group: LinearGroup, *, select_topk: float = 1.0, arithmetic: str | None = None) -> Tensor:
    """Select the entries of largest variance, weigh by energy, erase the minority's signs."""
    W0, models = given(group, arithmetic)
    if W0.numel() == 0:
        return W0.double()
    tau = torch.stack([W - W0 for W in models])
    if select_topk < 1:
        variance = tau.var(dim=0, unbiased=False).flatten()
        count = int(int((variance != 0).sum()) * select_topk)
        selected = torch.zeros_like(variance)
        selected[variance.topk(count).indices] = 1
        tau = tau * selected.view_as(W0)
    gamma = torch.where(tau.sum(0) >= 0, 1.0, -1.0)
    M = (tau.sign() == gamma).to(tau.dtype)
    eta = tau.square().flatten(1).mean(dim=1)
    summed = float(eta.sum())
    eta = torch.ones_like(eta) / len(eta) if summed < 1e-6 else eta / summed
    wM = M * eta.reshape(-1, *[1] * W0.dim())
    return (W0 + (tau * wM).sum(0) / wM.sum(0).clamp(min=1e-6)).double()


def kept_by(
    tau: Tensor, sparsify: str, p: float, gamma: float, epsilon: float, numbers: Tensor | None
) -> Tensor:
    """The mask that a rule gives for an update."""
    size = tau.abs().flatten()
    n, k = tau.numel(), int(p * tau.numel())
    mask = torch.zeros(n, dtype=torch.bool)
    if sparsify == "magnitude":
        mask[size.float().argsort(descending=True, stable=True)[: max(1, k)]] = True
        return mask.view_as(tau)
    if sparsify == "band":
        bottom = max(0, n - k - int(gamma * n))
        mask[size.float().argsort(stable=True)[bottom : bottom + k]] = True
        return mask.view_as(tau)
    assert numbers is not None
    if sparsify == "bernoulli":
        chance = (
            torch.full_like(tau, p) if tau.dtype == torch.bfloat16 else torch.full(tau.shape, p)
        )
        return numbers < chance.float()
    rows = tau if tau.dim() > 1 else tau.reshape(1, -1)
    chance = torch.full(rows.shape, p)
    if rows.shape[1] > 1:
        work = torch.bfloat16 if tau.dtype == torch.bfloat16 else torch.float32
        rank = rows.abs().argsort(dim=1).argsort(dim=1).to(work) + 1
        low, high = rank.amin(1, keepdim=True), rank.amax(1, keepdim=True)
        chance = ((p - epsilon) + (rank - low) / (high - low) * 2 * epsilon).float()
    return (numbers.view(rows.shape) < chance).view(tau.shape)


def of_torch(seed: int, place: int, shape: torch.Size) -> Tensor:
    """Numbers of torch's generator, from a place in its stream on."""
    generator = torch.Generator().manual_seed(seed)
    while place:
        passed = min(place, 2**20)
        torch.rand(passed, generator=generator)
        place -= passed
    return torch.rand(shape, generator=generator)


def generalized_task_arithmetic(
    group: LinearGroup,
    *,
    weight: float | list[float] = 1.0,
    sparsify: str = "none",
    density: float | list[float] = 1.0,
    gamma: float | list[float] = 0.01,
    epsilon: float | list[float] = 0.15,
    rescale: bool = False,
    consensus: bool = False,
    normalize: bool = False,
    scale: float = 1.0,
    seed: int = 0,
    drawn: int | list[int] | None = None,
    arithmetic: str | None = None,
) -> Tensor:
    """W_0 + λ Σ w_t S(Δ_t) M_t [/ Σ w_t M_t]."""
    W0, models = given(group, arithmetic)
    p, band, width = (by_expert(value, group) for value in (density, gamma, epsilon))
    tau: list[Tensor] = []
    for t, W in enumerate(models):
        d = W - W0
        if sparsify == "none" or p[t] >= 1 or d.numel() == 0:
            tau.append(d)
            continue
        numbers = None
        if sparsify in ("bernoulli", "ranked") and p[t] > 0:
            numbers = (
                group.streams[t].uniform(seed, tuple(d.shape))
                if drawn is None
                else of_torch(seed, int(by_expert(drawn, group)[t]), d.shape)
            )
        if p[t] <= 0 and sparsify != "band":
            tau.append(torch.zeros_like(d))
            continue
        mask = kept_by(d, sparsify, p[t], band[t], width[t], numbers)
        # Random masks are applied in float32 or in bfloat16.
        work = d.float() if d.dtype != torch.bfloat16 and numbers is not None else d
        left = work * mask
        before, after = work.abs().sum(), left.abs().sum()
        if rescale and float(before) >= 1e-7 and float(after) >= 1e-7:
            left = left * (before / after)
        tau.append(left.to(d.dtype))
    w = torch.tensor(shares_of(weight, group), dtype=W0.dtype).view(-1, *[1] * W0.dim())
    m = torch.stack(tau) * w
    elected = torch.where(m.sum(0) >= 0, 1.0, -1.0)
    M = (m.sign() == elected).to(m.dtype) if consensus else torch.ones_like(m)
    merged, mass = (m * M).sum(0), (w * M).sum(0)
    empty = mass == 0 if consensus else mass.abs() < 1e-8
    if normalize:
        merged = merged / torch.where(empty, torch.ones_like(mass), mass)
    return (W0 + (merged if scale == 1 else merged * scale)).double()


REFERENCES = {
    "linear": linear,
    "passthrough": passthrough,
    "nearswap": nearswap,
    "arcee_fusion": arcee_fusion,
    "ram": ram,
    "model_stock": model_stock,
    "sce": sce,
    "generalized_task_arithmetic": generalized_task_arithmetic,
}
