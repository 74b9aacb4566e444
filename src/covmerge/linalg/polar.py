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
    parts: Sequence[TruncatedSvd],
    *,
    rtol: float,
    apart: TruncatedSvd | None = None,
    frame: Tensor | None = None,
) -> Orthogonalized:
    """Return the polar factors of [U_1 … U_n] and of [V_1 … V_n]ᵀ.

    A singular vector of σ is off by rounding over σ: at most what its numerical rank was ended by, and
    of stored weights at least half of their edge.

    Args:
        parts: U_i, V_i and their singular values; at least one of them has directions.
        rtol: as in `polar`.
        apart: one more part, the last, whose U is orthogonal to the others': a block of its own in the
            polar factor on that side, so that only the others are decomposed.
        frame: orthonormal columns `(d_out, p)`, orthogonal to that U, that the others' are coordinates in.
            There rounding does not turn a weak direction of theirs out of the frame.
    """
    every = [*parts] if apart is None else [*parts, apart]
    left, off_left = _side([part.left for part in parts], parts, rtol)
    if frame is not None:
        left = frame @ left
    if apart is not None:
        if frame is None:
            left = torch.addmm(left, apart.left, apart.left.mT @ left, alpha=-1.0)
        left = torch.cat([left, apart.left], dim=1)
    right, off_right = _side([part.right.mT for part in every], every, rtol)
    return Orthogonalized(left, right.mT, max(off_left, off_right))


def _side(
    vectors: Sequence[Tensor], parts: Sequence[TruncatedSvd], rtol: float
) -> tuple[Tensor, int]:
    """The polar factor of the parts' vectors side by side, and how many directions are dependent."""
    side = torch.cat(tuple(vectors), dim=1)
    most = torch.cat([part.floor / part.kept for part in parts])
    least = torch.cat([CERTAIN * part.edge / part.kept for part in parts])
    if not side.numel():
        return side, 0
    found = polar(side, rtol=rtol, errors=least)
    return found.isometry, min(len(side), len(most)) - found.k + found.within(most)
