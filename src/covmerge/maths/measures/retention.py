"""The share of each expert that a merged update keeps, predicted without data.

On its own inputs z an expert adds Δ_t z to its layer's output, and the merged model adds W̄ z. With the
covariance estimate from the update itself, Ĉ_t = Δ_tᵀΔ_t ∝ E[z zᵀ] (ACTMat, Theorem 3.1; ACE, Theorem
1), the kept share of the expert's contribution is

    1 − Tr[(W̄ − Δ_t) Ĉ_t (W̄ − Δ_t)ᵀ] / Tr[Δ_t Ĉ_t Δ_tᵀ]
      = 1 − ‖(W̄ − Δ_t) Δ_tᵀ‖²_F / ‖Δ_t Δ_tᵀ‖²_F

1 means all of it. 0 means an error as large as that of the base alone; below 0, the error is larger.
"""

from __future__ import annotations

from collections.abc import Iterable
from statistics import fmean

from torch import Tensor

from covmerge.maths.linalg.lapack import norm

# A merged update that is longer than all experts' updates together.

_ROUNDING = 1e-3  # relative rounding error of norms, which are rounded with the weights


def times_as_long(merged: float, experts: Iterable[float]) -> float:
    """Return ‖W̄ − W_0‖ / Σ ‖Δ_t‖ if it is above 1 by more than rounding, and else 1.

    It is never above 1 for means and sums of updates; another method has then amplified something.

    Example:
        >>> times_as_long(3.0, [1.0, 0.5]), times_as_long(1.0, [1.0, 0.5])
        (2.0, 1.0)
    """
    together = sum(experts)
    return merged / together if merged > (1.0 + _ROUNDING) * together > 0.0 else 1.0


# The share of an expert that a merged update keeps along the expert's own update, predicted from weights
# alone.
#
# Only the part of W̄ − W_0 in the direction of Δ_t counts:
#
#     1 − (1 − ⟨W̄ − W_0, Δ_t⟩ / ‖Δ_t‖²)²
#
# 1: the update is there at its full length. 0: it is missing, or there at twice its length. Other
# experts' updates in other directions do not count: there are d_out · d_in directions, and a network
# bears a change in directions that are not its own better than an update that is too short. `retention`
# counts them, on the inputs that the update reveals. `covmerge study retention` measures how well both
# agree with accuracy.


def along(share: float) -> float:
    """Return the kept share along the expert's own update, at most 1, of ⟨W̄ − W_0, Δ_t⟩ / ‖Δ_t‖².

    docs/auto-log.md, experiment 13, says how it was found.

    Example:
        >>> along(1.0), along(0.5), along(0.0), along(2.0)
        (1.0, 0.75, 0.0, 0.0)
    """
    return 1.0 - (1.0 - share) ** 2


def energy_gram(update: Tensor) -> Tensor:
    """Return the smaller of ΔΔᵀ and ΔᵀΔ for an update `(d_out, d_in)` scaled to norm 1.

    `retention` needs it for an expert, whatever the merged update is.
    """
    unit = _unit(update)
    return unit @ unit.mT if _wide(update) else unit.mT @ unit


def retention(merged: Tensor, update: Tensor, gram: Tensor | None = None) -> float | None:
    """Return the share of Δ_t that W̄ − W_0 keeps, at most 1; None for an update of zeros.

    `gram` is `energy_gram(update)`, if it is known already.

    Example:
        >>> import torch
        >>> d = torch.tensor([[1.0, 2.0], [0.0, 1.0]])
        >>> retention(d, d), retention(0 * d, d), round(retention(d / 2, d), 3), retention(d, 0 * d)
        (1.0, 0.0, 0.75, None)
    """
    size = norm(update)
    if size == 0.0:
        return None
    gram = energy_gram(update) if gram is None else gram
    whole = norm(gram) ** 2
    # Scaled to norm 1, because products of four small numbers would underflow float32.
    if _wide(update):
        lost = norm((merged / size) @ _unit(update).mT - gram) ** 2
    else:
        error = (merged - update) / size
        lost = float(((error @ gram) * error).sum())
    return 1.0 - lost / whole


def overall(layers: Iterable[float | None]) -> float | None:
    """Return the mean over the layers that an expert changed; a negative share counts as 0.

    Example:
        >>> overall([0.5, -7.0, None, 1.0]), overall([None])
        (0.5, None)
    """
    values = [max(0.0, value) for value in layers if value is not None]
    return fmean(values) if values else None


def _unit(update: Tensor) -> Tensor:
    return update / (norm(update) or 1.0)


def _wide(update: Tensor) -> bool:
    return update.shape[0] <= update.shape[1]
