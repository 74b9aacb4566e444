"""The orthogonal polar factor, on the numerical range."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from covmerge.linalg.spectral import TruncatedSvd, leading_directions


def polar(matrix: Tensor, *, rtol: float) -> Tensor:
    """Return A (AᵀA)^{†½}: the orthogonal polar factor of A within its numerical range.

    Of dependent columns the usual factor U Vᵀ makes orthonormal ones by adding directions that A
    does not have. With the pseudo-inverse they stay dependent: k copies of a unit vector become k
    copies of it divided by √k.

    Args:
        matrix: A, of any shape.
        rtol: singular values at or below `rtol` times the largest count as zero.

    Example:
        >>> polar(torch.tensor([[2.0, 0.0], [0.0, 0.1]]), rtol=1e-6).tolist()
        [[1.0, 0.0], [0.0, 1.0]]
        >>> polar(torch.tensor([[2.0, 2.0]]), rtol=1e-6).mul(2**0.5).round().tolist()
        [[1.0, 1.0]]
    """
    return leading_directions(matrix, min(matrix.shape), rtol=rtol).isometry


def orthogonalized(parts: Sequence[TruncatedSvd], *, rtol: float) -> tuple[Tensor, Tensor]:
    """Return the polar factors of [U_1 … U_n] `(d_out, k)` and of [V_1 … V_n]ᵀ `(k, d_in)`."""
    left = polar(torch.cat([part.left for part in parts], dim=1), rtol=rtol)
    right = polar(torch.cat([part.right for part in parts], dim=0), rtol=rtol)
    return left, right
