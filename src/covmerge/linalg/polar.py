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


def orthogonalized(
    parts: Sequence[TruncatedSvd], *, rtol: float, apart: TruncatedSvd | None = None
) -> Orthogonalized:
    """Return the polar factors of [U_1 … U_n] and of [V_1 … V_n]ᵀ.

    A singular vector of σ is off by rounding over σ: at most what its numerical rank was ended by, and
    of stored weights at least half of their edge.

    Args:
        parts: U_i, V_i and their singular values; at least one of them has directions.
        rtol: as in `polar`.
        apart: one more part, the last, whose U is orthogonal to the others': it is its own block of the
            polar factor on that side, which only the others are decomposed for.
    """
    every = [*parts] if apart is None else [*parts, apart]
    most, least = _errors(every)
    if apart is None:
        left, off = _side([part.left for part in parts], least, most, rtol)
    else:
        others_most, others_least = _errors(parts)
        left, off = _side([part.left for part in parts], others_least, others_most, rtol)
        left = torch.cat([left, apart.left], dim=1)
    right, off_right = _side([part.right.mT for part in every], least, most, rtol)
    return Orthogonalized(left, right.mT, max(off, off_right))


def _errors(parts: Sequence[TruncatedSvd]) -> tuple[Tensor, Tensor]:
    """What singular vectors are off by: at most, and at least."""
    most = torch.cat([part.floor / part.kept for part in parts])
    return most, torch.cat([CERTAIN * part.edge / part.kept for part in parts])


def _side(
    vectors: Sequence[Tensor], least: Tensor, most: Tensor, rtol: float
) -> tuple[Tensor, int]:
    """The polar factor of vectors side by side, and how many of its directions are dependent."""
    side = torch.cat(tuple(vectors), dim=1)
    if not side.numel():
        return side, 0
    found = polar(side, rtol=rtol, errors=least)
    return found.isometry, min(len(side), len(most)) - found.k + found.within(most)
