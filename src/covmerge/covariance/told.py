"""How much updates tell of their layer's inputs."""

from __future__ import annotations

from math import isnan, log1p

from torch import Tensor

from covmerge.linalg.batched import log_dets, numbers
from covmerge.linalg.cholesky import log_det

# An eigenvalue that is so small beside their mean is of an input that is hardly used.
_UNUSED = 1e-4


def share_told(gram: Tensor, d_in: int) -> float:
    """Return ψ = log det(I + 10⁴Ĝ) / (d_in log(1 + 10⁴)), the share of the inputs that updates use.

    It is by volume: 1 where they use all alike, a third where their rows span a third of the space. Who
    learned from all inputs has directions for all of them; an adapter, whose ΔᵀΔ hardly tells of
    inputs, has those of a few random rows (docs/auto.md).

    Args:
        gram: Ĝ, what the updates tell of E[z zᵀ], of mean eigenvalue 1, in the layer's axes `(d_in, d_in)`
            or in others `(m, m)` that span all that is not zero.
        d_in: of the layer.

    Example:
        >>> import torch
        >>> [round(share_told(each, 4), 2) for each in (torch.eye(4), torch.tensor([[4.0]]))]
        [1.0, 0.29]
    """
    return _share(log_det(_beside_faint(gram)), d_in)


def shares_told(grams: Tensor, d_in: int) -> list[float]:
    """Return ψ of several Ĝ `(n, m, m)`; NaN where it takes the kernel's care.

    Example:
        >>> import torch
        >>> [round(own, 2) for own in shares_told(torch.eye(4).expand(2, 4, 4), 4)]
        [1.0, 1.0]
    """
    return [_share(own, d_in) for own in numbers(log_dets(_beside_faint(grams)))]


def _beside_faint(gram: Tensor) -> Tensor:
    """I + 10⁴Ĝ, of one or of several."""
    found = gram / _UNUSED
    found.diagonal(dim1=-2, dim2=-1).add_(1.0)
    return found


def _share(log_det_of: float, d_in: int) -> float:
    share = log_det_of / (d_in * log1p(1.0 / _UNUSED))
    return share if share < 1.0 or isnan(share) else 1.0
