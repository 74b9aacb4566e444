r"""Expert statistics collected from data: input Gram matrices and diagonal Fisher information.

The estimates of `covmerge.maths.covariance.estimate` come from an update and are stored as its root. A
measured covariance G = E[z zᵀ] is a dense `(d_in, d_in)` matrix instead. The sums of the closed form

    Σ w_t Δ_t G̃_t        Σ w_t G̃_t        G̃ = a·G + (1 − a)·diag G

are formed in d_in axes, without computing any G̃_t.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from covmerge.maths.covariance.normal import NormalEquations
from covmerge.maths.linalg.auto import Cost


def measured_equations(
    updates: Sequence[Tensor],
    grams: Iterable[Tensor],
    weights: Sequence[float],
    *,
    off_diagonal: float = 1.0,
    ridge: float = 0.0,
    lengths: Sequence[float] | None = None,
    dtype: torch.dtype | None = None,
) -> NormalEquations:
    """Form Σ w_t l_tΔ_t G̃_t and Σ w_t G̃_t, reading the G_t one at a time.

    `off_diagonal` is a. The ridge is in units of the mean diagonal entry of Σ w_t G̃_t. By default all l_t
    are 1, and the dtype of the sums is that of the updates.
    """
    numerator = torch.zeros_like(updates[0], dtype=dtype)
    gram = numerator.new_zeros(numerator.shape[1], numerator.shape[1])
    times = [1.0] * len(updates) if lengths is None else lengths
    for update, measured, weight, length in zip(updates, grams, weights, times, strict=True):
        update, measured = update.to(numerator.dtype), measured.to(gram.dtype)
        gram.add_(measured, alpha=weight * off_diagonal)
        numerator.addmm_(update, measured, alpha=length * weight * off_diagonal)
        rest = measured.diagonal() * (weight * (1.0 - off_diagonal))
        gram.diagonal().add_(rest)
        numerator.addcmul_(update, rest, value=length)
    return NormalEquations(gram, numerator, ridge * float(gram.diagonal().mean()))


def measured_equations_cost(d_out: int, d_in: int, count: int, itemsize: int) -> Cost:
    """Return the cost of forming the sums in another dtype than that of updates and Gram matrices."""
    pair = (d_in * d_in + d_out * d_in) * itemsize
    return Cost(2.0 * count * (d_out + 1) * d_in * d_in, 2 * pair)
