"""The orthogonal polar factor of a matrix, within its numerical range."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from covmerge.maths.linalg.auto import polar_choice
from covmerge.maths.linalg.by_products import inverse_root, largest_bound
from covmerge.maths.linalg.cholesky import all_above
from covmerge.maths.linalg.lapack import norm
from covmerge.maths.linalg.pinv import kept_projector, least_of_full_rank
from covmerge.maths.linalg.spectral import (
    RankRule,
    TruncatedSvd,
    float64_blocks,
    float64_gram,
    leading_directions,
    wide_of,
)
from covmerge.maths.linalg.symmetric import add_gram_, mirror_

# The largest ‖WᵀW − P‖_F that is accepted of a polar factor W computed by products.
_OFF = {torch.float32: 1e-6, torch.float64: 1e-11}


@dataclass(frozen=True)
class Polar:
    """The orthogonal polar factor U Vᵀ of a matrix within its numerical rank."""

    isometry: Tensor  # U Vᵀ, of the matrix's shape and dtype; its residual has been checked
    k: int  # the number of its directions
    nuclear: float  # the sum of the singular values of these directions
    doubtful: int = 0  # how many of these directions errors of size `doubts` may have made


def polar(
    matrix: Tensor, *, rtol: float, errors: Tensor | None = None, doubts: Tensor | None = None
) -> Polar:
    """Return A (AᵀA)^{†½}: the orthogonal polar factor of A within its numerical range.

    For dependent columns the usual factor U Vᵀ makes orthonormal columns by adding directions that A
    does not have. With the pseudo-inverse they stay dependent: k copies of a unit vector become k
    copies of it divided by √k.

    Args:
        matrix: A, of any shape.
        rtol: singular values at or below `rtol` times the largest count as zero.
        errors: the error of each column; directions that such errors can make count as zero too.
        doubts: an upper bound of each column's error; directions that such errors can make are counted.

    Example:
        >>> polar(torch.tensor([[2.0, 0.0], [0.0, 0.1]]), rtol=1e-6).isometry.tolist()
        [[1.0, 0.0], [0.0, 1.0]]
        >>> polar(torch.tensor([[2.0, 2.0]]), rtol=1e-6).isometry.mul(2**0.5).round().tolist()
        [[1.0, 1.0]]
    """
    if goes_by_products(matrix):
        known = [float(e.max()) for e in (errors, doubts) if e is not None and e.numel()]
        quick = polar_by_products(matrix, RankRule(rtol), errors=max(known, default=0.0))
        if quick is not None:
            return quick
    found = leading_directions(matrix, min(matrix.shape), rtol=rtol, errors=errors)
    doubtful = 0 if doubts is None else found.within(doubts)
    return Polar(found.isometry, found.k, float(found.leading.sum()), doubtful)


def goes_by_products(matrix: Tensor) -> bool:
    """Return whether products are the cheaper way to this matrix's polar factor on its device."""
    d_out, d_in = matrix.shape
    choice = polar_choice(d_out, d_in, matrix.dtype.itemsize, matrix.device.type)
    return choice.taken == "products"


def polar_by_products(matrix: Tensor, rule: RankRule, *, errors: float = 0.0) -> Polar | None:
    """Return the polar factor A (AᵀA)^{†½} of a matrix by products alone; None if they cannot decide.

    It is None too if errors of columns, `errors` at most, can make a direction.

    Example:
        >>> polar_by_products(torch.tensor([[2.0, 0.0], [0.0, 0.1]]), RankRule(1e-6)).isometry.tolist()
        [[1.0, 0.0], [0.0, 1.0]]
    """
    wide = wide_of(matrix)
    if not wide.numel():
        return None
    # The rule for eigenvalues of the Gram matrix.
    squared = replace(rule, rtol=rule.rtol**2, shape=matrix.shape)
    found = _root(float64_gram(wide), squared, errors)
    if found is None:
        return None
    root, within, rank, nuclear = found
    isometry, off = torch.empty_like(wide), torch.zeros_like(root)
    for columns, block in float64_blocks(wide):
        turned = root @ block
        isometry[:, columns] = turned.to(wide.dtype)
        add_gram_(off, turned.mT)
    mirror_(off)
    if within is None:
        off.diagonal().sub_(1.0)
    else:
        off.sub_(within)
    if not norm(off) <= _OFF[wide.dtype]:
        return None
    return Polar(isometry if wide is matrix else isometry.mT, rank, nuclear)


def _root(
    gram: Tensor, rule: RankRule, errors: float
) -> tuple[Tensor, Tensor | None, int, float] | None:
    """Return G^{†½} of a Gram matrix, the projector onto its range, its rank, and Σσ = tr G^½.

    The projector is None if G has full rank. Tensors are float64.
    """
    rank = len(gram)
    least = partial(least_of_full_rank, rank, gram.dtype, largest_bound(gram), rtol=rule.rtol)
    known = max(rule.rounding.edge, rule.rounding.floor)
    floor, within = least(floor=max(known, errors) ** 2), None
    if not all_above(gram, floor):
        if errors > known and all_above(gram, least(floor=known**2)):
            return None  # full rank, but errors may have made one of the directions
        projection = kept_projector(gram, rule)
        if projection is None:
            return None
        gram, within, rank, floor = (
            projection.filled(gram),
            projection.matrix,
            projection.rank,
            least(floor=errors**2),
        )
    root = inverse_root(gram, floor=floor)
    if root is None:
        return None
    if within is not None:
        root = root @ within
    return root, within, rank, float((root * gram).sum())


# The edge of rounding is an upper estimate. A direction below this share of it is certainly rounding.
CERTAIN = 0.5


@dataclass(frozen=True)
class Orthogonalized:
    """The polar factors of several experts' singular vectors, side by side."""

    left: Tensor  # polar factor of [U_1 … U_n] `(d_out, k)`
    right: Tensor  # polar factor of [V_1 … V_n]ᵀ `(k, d_in)`
    # the number of nearly common directions of the vectors: those that rounding may have decided,
    # and those that it has decided, which are left out. It is that of the side with more.
    dependent: int


def orthogonalized(
    parts: Sequence[TruncatedSvd],
    *,
    rtol: float,
    apart: TruncatedSvd | None = None,
    frame: Tensor | None = None,
) -> Orthogonalized:
    """Return the polar factors of [U_1 … U_n] and of [V_1 … V_n]ᵀ.

    A singular vector of σ has an error of rounding over σ: at most the floor that ended its numerical rank,
    and for stored weights at least half of their edge, each over σ.

    Args:
        parts: U_i, V_i and their singular values; at least one part has directions.
        rtol: as in `polar`.
        apart: one more part, which comes last and whose U is orthogonal to that of the others. It is a
            block of its own in the polar factor on that side, so that only the others are decomposed.
        frame: orthonormal columns `(d_out, p)`, orthogonal to the U of `apart`. The U of `parts` are
            coordinates in it, so that rounding does not turn their weak directions out of the frame.
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
    """Return the polar factor of the parts' vectors side by side, and how many directions are dependent."""
    side = torch.cat(tuple(vectors), dim=1)
    most = torch.cat([part.floor / part.leading for part in parts])
    least = torch.cat([CERTAIN * part.edge / part.leading for part in parts])
    if not side.numel():
        return side, 0
    found = polar(side, rtol=rtol, errors=least, doubts=most)
    return found.isometry, min(len(side), len(most)) - found.k + found.doubtful
