"""The share of a layer's inputs, or of its directions, that updates use."""

from __future__ import annotations

from math import isnan, log1p, sqrt

import torch
from torch import Tensor

from covmerge.maths.linalg.cholesky import log_det
from covmerge.maths.linalg.spectral import float64_gram, wide_of
from covmerge.maths.linalg.symmetric import gram

# An input whose eigenvalue is this small relative to the mean eigenvalue is hardly used.
HARDLY_USED = 1e-4
# Largest error of rounding that the 1 in I + 10⁴Ĝ may have.
_OFF = 0.25


def share_of_inputs(gram: Tensor, d_in: int) -> float:
    """Return ψ = log det(I + 10⁴Ĝ) / (d_in log(1 + 10⁴)), the share of the inputs that updates use.

    The share is one of volume: 1 where the updates use all inputs alike, a third where their rows span a
    third of the space. An update that was trained on all inputs has directions for all of them. The ΔᵀΔ of
    an adapter hardly depends on its inputs: it has the directions of a few random rows (docs/auto.md).

    Args:
        gram: Ĝ, the updates' estimate of E[z zᵀ], of mean eigenvalue 1, in the layer's axes `(d_in, d_in)`
            or in other axes `(m, m)` that span the range of Ĝ.
        d_in: number of the layer's inputs.

    Example:
        >>> import torch
        >>> [round(share_of_inputs(each, 4), 2) for each in (torch.eye(4), torch.tensor([[4.0]]))]
        [1.0, 0.29]
    """
    found = gram / HARDLY_USED
    found.diagonal().add_(1.0)
    share = log_det(found) / (d_in * log1p(1.0 / HARDLY_USED))
    return share if share < 1.0 or isnan(share) else 1.0


def share_used(update: Tensor, size: float, directions: int) -> float:
    """Return ω = log det(I + 10⁴ m ΔᵀΔ/‖Δ‖²) / (m log(1 + 10⁴)), the share of a layer's directions in use.

    This is `share_of_inputs` for a single update, over the directions of the smaller side. One update may
    have all of its energy in a few directions, where float32 does not resolve the 1; then the Gram matrix
    is computed in float64.

    Args:
        update: Δ `(d_out, d_in)`, or Δ in axes that span its range.
        size: ‖Δ‖; it must not be 0.
        directions: m = min(d_out, d_in) of the layer.

    Raises:
        OverflowError: Δ holds NaN or Inf.

    Example:
        >>> import torch
        >>> [round(share_used(each, 2.0, 4), 2) for each in (torch.eye(4), 2 * torch.eye(4)[:1])]
        [1.0, 0.29]
    """
    wide = wide_of(update) * (sqrt(directions) / size)
    found = gram(wide.mT)
    return share_of_inputs(found if _resolved(found) else float64_gram(wide), directions)


def _resolved(gram: Tensor) -> bool:
    """Return whether rounding leaves the 1 in I + 10⁴Ĝ.

    An entry has an error of ½ε √(g_ii g_jj), and a matrix of such errors has norm ε √(max g_ii Σ g_jj).
    """
    energies = gram.diagonal()
    off = torch.finfo(gram.dtype).eps * float((energies.max() * energies.sum()).sqrt())
    return off < _OFF * HARDLY_USED
