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
        errors: how far each column is off; directions that these have made count as zero too.

    Example:
        >>> polar(torch.tensor([[2.0, 0.0], [0.0, 0.1]]), rtol=1e-6).isometry.tolist()
        [[1.0, 0.0], [0.0, 1.0]]
        >>> polar(torch.tensor([[2.0, 2.0]]), rtol=1e-6).isometry.mul(2**0.5).round().tolist()
        [[1.0, 1.0]]
    """
    return leading_directions(matrix, min(matrix.shape), rtol=rtol, errors=errors)


# Of the edge of rounding, which is reckoned from above: below this share of it there is nothing else.
CERTAIN = 0.5


@dataclass(frozen=True)
class Orthogonalized:
    """Polar factors of singular vectors side by side.

    Attributes:
        left: of [U_1 … U_n] `(d_out, k)`.
        right: of [V_1 … V_n]ᵀ `(k, d_in)`.
        dependent: directions that the vectors have nearly in common, so that rounding may have decided
            them, and those that it has, which are left out; on the side that has more.
    """

    left: Tensor
    right: Tensor
    dependent: int


def orthogonalized(parts: Sequence[TruncatedSvd], *, rtol: float) -> Orthogonalized:
    """Return the polar factors of [U_1 … U_n] and of [V_1 … V_n]ᵀ.

    A singular vector of σ is off by rounding over σ: at most what its numerical rank was ended by, and
    of stored weights at least half of their edge.
    """
    most = torch.cat([part.floor / part.kept for part in parts])
    least = torch.cat([CERTAIN * part.edge / part.kept for part in parts])
    sides = [
        torch.cat(stack, dim=1)
        for stack in ([part.left for part in parts], [part.right.mT for part in parts])
    ]
    left, right = (polar(side, rtol=rtol, errors=least) for side in sides)
    dependent = max(
        min(len(side), len(most)) - found.k + found.within(most)
        for side, found in zip(sides, (left, right), strict=True)
    )
    return Orthogonalized(left.isometry, right.isometry.mT, dependent)
