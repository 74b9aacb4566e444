"""The orthogonal polar factor, on the numerical range."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from covmerge.linalg.spectral import LeadingDirections, TruncatedSvd, leading_directions


def polar(matrix: Tensor, *, rtol: float, errors: Tensor | None = None) -> LeadingDirections:
    """Return A (AᵀA)^{†½}: the orthogonal polar factor of A within its numerical range.

    Of dependent columns the usual factor U Vᵀ makes orthonormal ones by adding directions that A
    does not have. With the pseudo-inverse they stay dependent: k copies of a unit vector become k
    copies of it divided by √k.

    Args:
        matrix: A, of any shape.
        rtol: singular values at or below `rtol` times the largest count as zero.
        errors: how far each column may be off; directions that these decide count as zero too.

    Example:
        >>> polar(torch.tensor([[2.0, 0.0], [0.0, 0.1]]), rtol=1e-6).isometry.tolist()
        [[1.0, 0.0], [0.0, 1.0]]
        >>> polar(torch.tensor([[2.0, 2.0]]), rtol=1e-6).isometry.mul(2**0.5).round().tolist()
        [[1.0, 1.0]]
    """
    return leading_directions(matrix, min(matrix.shape), rtol=rtol, errors=errors)


@dataclass(frozen=True)
class Orthogonalized:
    """Polar factors of singular vectors side by side.

    Attributes:
        left: of [U_1 … U_n] `(d_out, k)`.
        right: of [V_1 … V_n]ᵀ `(k, d_in)`.
        dependent: directions that the vectors lack, or that rounding decides, on the side with more.
    """

    left: Tensor
    right: Tensor
    dependent: int


def orthogonalized(parts: Sequence[TruncatedSvd], *, rtol: float) -> Orthogonalized:
    """Return the polar factors of [U_1 … U_n] and of [V_1 … V_n]ᵀ."""
    errors = torch.cat([part.errors for part in parts])
    left = polar(torch.cat([part.left for part in parts], dim=1), rtol=rtol, errors=errors)
    right = polar(torch.cat([part.right.mT for part in parts], dim=1), rtol=rtol, errors=errors)
    count = min(len(left.isometry), len(errors)), min(len(right.isometry), len(errors))
    dependent = max(count[0] - left.k, count[1] - right.k)
    return Orthogonalized(left.isometry, right.isometry.mT, dependent)
