r"""What any weighted sum of updates keeps of an expert: retention as a quadratic form in the weights.

For W̄ − W_0 = Σ_t w_t Δ_t the share that is kept of expert s (`covmerge.maths.measures.retention`) is

    1 − Tr[(Σ w_tΔ_t − Δ_s) Ĉ_s (Σ w_tΔ_t − Δ_s)ᵀ] / Tr[Δ_s Ĉ_s Δ_sᵀ]  =  2 (Q_s w)_s − wᵀ Q_s w

    Q_s[t, u] = Tr[Δ_t Ĉ_s Δ_uᵀ] / Tr[Δ_s Ĉ_s Δ_sᵀ],      Ĉ_s = Δ_sᵀΔ_s

A merged model's update may be one of the Δ_t: with w its own unit vector, the retention is that model's.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

import torch
from torch import Tensor

from covmerge.base.types import LowRank
from covmerge.maths.linalg.lapack import dot, norm

Update = Tensor | LowRank


def quadratics(updates: Sequence[Update], experts: int) -> list[Tensor | None]:
    """Return Q_s of the first so many updates, each `(T, T)` in float64.

    Args:
        updates: Δ_t `(d_out, d_in)` of one dtype and device; adapters by their factors.
        experts: of how many of them retention is asked.

    Returns:
        Of each expert its Q_s; None where it did not change the layer.

    Departs from the paper: it has none; Ĉ_t is the papers' estimate.

    Example:
        >>> one, two = torch.tensor([[2.0, 0.0]]), torch.tensor([[1.0, 1.0]])
        >>> [found] = quadratics([one, two], 1)
        >>> found.round(decimals=6).tolist()
        [[1.0, 0.5], [0.5, 0.25]]
    """
    sizes = [_size(update) for update in updates]
    # Of updates of norm 1: products of four small numbers would leave float32.
    units = [
        _times(update, 1.0 / (size or 1.0)) for update, size in zip(updates, sizes, strict=True)
    ]
    found: list[Tensor | None] = []
    for unit, size in zip(units[:experts], sizes, strict=False):
        if size == 0.0:
            found.append(None)
            continue
        form = _form(units, unit)
        place = len(found)
        relative = torch.tensor(sizes, dtype=torch.float64) / size
        scaled = form / form[place, place] * torch.outer(relative, relative)
        found.append(scaled)
    return found


def kept(form: Tensor, expert: int, weights: Tensor) -> float:
    """Return the share of an expert that a weighted sum keeps, 2 (Q_s w)_s − wᵀ Q_s w.

    Args:
        form: Q_s `(T, T)`.
        expert: s.
        weights: w `(T,)`, of the dtype of Q_s.

    Example:
        >>> kept(torch.tensor([[1.0, 0.5], [0.5, 0.25]]), 0, torch.tensor([0.5, 0.0]))
        0.75
    """
    image = form @ weights
    return float(2.0 * image[expert] - weights @ image)


def _form(units: Sequence[Update], expert: Update) -> Tensor:
    """Return Tr[Δ_t Ĉ_s Δ_uᵀ] of all t and u, through the smaller side of Δ_s."""
    if isinstance(expert, LowRank):  # Ĉ = Aᵀ(BᵀB)A
        plain = [_product(unit, expert.right.mT) for unit in units]
        weighed = [left @ (expert.left.mT @ expert.left) for left in plain]
    elif expert.shape[0] <= expert.shape[1]:
        plain = weighed = [_product(unit, expert.mT) for unit in units]
    else:
        gram = expert.mT @ expert
        plain = [unit.dense() if isinstance(unit, LowRank) else unit for unit in units]
        weighed = [left @ gram for left in plain]
    form = torch.empty(len(units), len(units), dtype=torch.float64)
    for t, left in enumerate(weighed):
        for u, right in enumerate(plain[: t + 1]):
            form[t, u] = form[u, t] = dot(left, right)
    return form


def _product(update: Update, matrix: Tensor) -> Tensor:
    return update.left @ (update.right @ matrix) if isinstance(update, LowRank) else update @ matrix


def _times(update: Update, factor: float) -> Update:
    if isinstance(update, LowRank):
        return LowRank(update.left * factor, update.right)
    return update * factor


def _size(update: Update) -> float:
    return sqrt(update.square_norm()) if isinstance(update, LowRank) else norm(update)
