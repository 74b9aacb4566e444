"""The leading singular directions of a matrix."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import sqrt

import torch
from torch import Tensor

from covmerge.linalg.auto import spectrum_choice
from covmerge.linalg.lapack import eigh, eigvalsh, svd, svdvals
from covmerge.linalg.symmetric import add_gram_, gram, mirror_
from covmerge.types import Rounding

EXACT = Rounding()
# Rounding errors add up to what they should within a few per cent; half as much again is something else.
_MOSTLY = 1.5
_BLOCK = 1024  # columns that are alive in float64 at once
# Singular values are one value that differ by less than so much of themselves, and by less than what
# rounding of float32 entries makes of equal ones, relative to the largest: float32 cannot tell their
# directions apart, and float64 goes by the same.
_ALIKE = 1e-5
_ROUNDED_APART = 4.0 * torch.finfo(torch.float32).eps
# Most that |WᵀW − I| may be of computed directions W. Those at the default numerical rank of
# float32 stay under a tenth of it.
_ORTHONORMAL = 1e-3


@dataclass(frozen=True)
class TruncatedSvd:
    """The top-k part U_k diag(σ_1..σ_k) V_kᵀ of a matrix F `(d_out, d_in)`.

    Attributes:
        left: U_k `(d_out, k)`, of F's dtype.
        right: V_kᵀ `(k, d_in)`, of F's dtype.
        sigma: all singular values of F, float64, descending.
        rank: numerical rank of F.
        floor: the singular value where it ends.
        edge: that of rounding of the stored weights, if it ends there.
    """

    left: Tensor
    right: Tensor
    sigma: Tensor
    rank: int
    floor: float
    edge: float = 0.0

    @property
    def kept(self) -> Tensor:
        """σ_1..σ_k, float64."""
        return self.sigma[: len(self.right)]

    def product(self) -> Tensor:
        """Return U_k diag(σ_1..σ_k) V_kᵀ in float64: what is beyond the rank does not come back."""
        return (self.left.to(torch.float64) * self.kept) @ self.right.to(torch.float64)

    def first(self, k: int) -> TruncatedSvd:
        """Return the part of the k largest singular values, with those that equal the k-th."""
        k = with_equals(self.kept, k)
        return replace(self, left=self.left[:, :k], right=self.right[:k])


@dataclass(frozen=True)
class LeadingDirections:
    """The top-k part of F = U diag(σ) Vᵀ with its spectrum made flat.

    Attributes:
        isometry: U_k V_kᵀ, of F's shape and dtype; its residual has been checked.
        sigma: all singular values, float64, descending.
        k: directions kept: what was asked for and the equals of the last, at most the numerical rank.
        rank: numerical rank of F.
        kept: their singular values, float64.
        right: their right singular vectors `(k, d_in)`.
    """

    isometry: Tensor
    sigma: Tensor
    k: int
    rank: int
    kept: Tensor
    right: Tensor

    def within(self, errors: Tensor) -> int:
        """How many of them `errors` `(d_in,)` of the columns may have made: σ_i² ≤ Σ_j v_ij² errors_j²."""
        return int((self.kept.square() <= _made(self.right, errors)).sum())


def rank_tolerance(shape: Sequence[int], dtype: torch.dtype, given: float | None) -> float:
    """Return where the numerical rank ends: `given`, or √max(d_out, d_in) · eps of the dtype.

    Rounding errors of the entries are independent, so their matrix has a norm of order √d · eps.
    The customary d · eps is a worst case, and cuts real directions of updates whose spectrum is
    long: one of 64 changes a flat spectrum by an eighth.
    """
    if given is not None:
        return given
    return sqrt(max(shape)) * torch.finfo(dtype).eps


def with_equals(sigma: Tensor, k: int) -> int:
    """Return k, or as many more as singular values, descending, go on that equal the k-th.

    Those that equal zero are none of them: whoever asks for k beyond the rank gets k.

    Example:
        >>> with_equals(torch.tensor([2.0, 1.0, 1.0, 0.5]), 2)
        3
    """
    if not 0 < k < len(sigma):
        return k
    rounding = _ROUNDED_APART * float(sigma[0])
    if float(sigma[k - 1]) <= rounding:
        return k
    step = min(rounding, _ALIKE * float(sigma[k - 1]))
    apart = (sigma[k - 1 : -1] - sigma[k:] > step).nonzero()
    return k + int(apart[0]) if len(apart) else len(sigma)


def sizes_of_equals(sigma: Tensor) -> list[int]:
    """Return how many singular values, descending, are one value, one value after the other.

    Example:
        >>> sizes_of_equals(torch.tensor([2.0, 1.0, 1.0, 0.5]))
        [1, 2, 1]
    """
    k, sizes = 0, list[int]()
    while k < len(sigma):
        end = with_equals(sigma, k + 1)
        sizes.append(end - k)
        k = end
    return sizes


def without_order(sigma: Tensor) -> int:
    """How many singular values, descending, equal another: their directions may turn into each other.

    Example:
        >>> without_order(torch.tensor([2.0, 1.0, 1.0, 0.5]))
        2
    """
    return sum(size for size in sizes_of_equals(sigma) if size > 1)


def numerical_rank(
    sigma: Tensor,
    shape: Sequence[int],
    *,
    rtol: float,
    scale: float | None = None,
    rounding: Rounding = EXACT,
) -> tuple[int, float]:
    """Return the numerical rank, and the singular value where it ends.

    Args:
        sigma: singular values, descending.
        shape: `(d_out, d_in)` of the matrix.
        rtol: where it ends, in units of `scale`,
        scale: by default the largest of them.
        rounding: what rounding gave to the matrix. The rank ends at its edge where what is below is no
            more than rounding; a spectrum that goes on below is the matrix's own.

    Example:
        >>> sigma = torch.tensor([3.0, 1e-2, 1e-9])
        >>> numerical_rank(sigma, (3, 3), rtol=1e-6)[0]
        2
        >>> numerical_rank(sigma, (3, 3), rtol=1e-6, rounding=Rounding(edge=0.1, energy=1e-3))
        (1, 0.1)
        >>> numerical_rank(sigma, (3, 3), rtol=1e-6, rounding=Rounding(edge=0.1, energy=1e-6))[0]
        2
    """
    if not sigma.numel():
        return 0, 0.0
    whole = float(sigma[0]) if scale is None else scale
    end = rtol * whole
    if end < rounding.edge < whole and only_rounding(sigma, shape, rounding):
        end = rounding.edge
    return int((sigma > end).sum()), end


def only_rounding(sigma: Tensor, shape: Sequence[int], rounding: Rounding) -> bool:
    """Whether singular values below the edge of rounding are no more than rounding.

    Of the energy of errors in d_out × d_in entries, r directions that are something else leave the
    share (1 − r/d_out)(1 − r/d_in).
    """
    below = sigma[sigma <= rounding.edge]
    r = len(sigma) - len(below)
    share = max(0.0, 1.0 - r / shape[0]) * max(0.0, 1.0 - r / shape[1])
    return float(below.square().sum()) <= _MOSTLY * share * rounding.energy


def truncated_svd(
    matrix: Tensor,
    k: int,
    *,
    rtol: float,
    scale: float | None = None,
    rounding: Rounding = EXACT,
    equals: bool = True,
) -> TruncatedSvd:
    """Return the `k` leading singular triplets of `matrix` `(d_out, d_in)`.

    Directions whose singular value is at or below `rtol` times `scale`, by default the largest
    singular value, or that are no more than `rounding`, are beyond the numerical rank
    (`numerical_rank`); they are arbitrary and never kept. Of singular
    values that equal the k-th all are kept: which of their directions come first would be arbitrary.
    Without `equals` k is a bound.

    Float64 goes through an SVD. Float32 goes through the float64 eigenproblem of the smaller Gram
    matrix, V_kᵀ = Σ_k⁻¹U_kᵀF, which resolves σ down to 1e-8 of the largest.

    Example:
        >>> top = truncated_svd(torch.diag(torch.tensor([3.0, 2.0, 0.0])), 3, rtol=1e-6)
        >>> top.kept.tolist(), top.rank
        ([3.0, 2.0], 2)
    """
    d_out, d_in = matrix.shape
    if spectrum_choice(d_out, d_in, k, matrix.dtype.itemsize).taken == "svd":
        left, sigma, right = svd(matrix)
        rank, end = numerical_rank(sigma, matrix.shape, rtol=rtol, scale=scale, rounding=rounding)
        edge = end if end == rounding.edge else 0.0
        k = min(k, rank)
        k = with_equals(sigma[:rank], k) if equals else k
        # Copies, so that the full factors are gone.
        return TruncatedSvd(left[:, :k].clone(), right[:k].clone(), sigma, rank, end, edge)

    # Oriented so that the small side is the rows.
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.mT
    values, vectors = eigh(float64_gram(wide))
    sigma = values.clamp_min(0.0).sqrt().flip(0)
    rank, end = numerical_rank(sigma, matrix.shape, rtol=rtol, scale=scale, rounding=rounding)
    edge = end if end == rounding.edge else 0.0
    k = min(k, rank)
    k = with_equals(sigma[:rank], k) if equals else k
    short = vectors.flip(1)[:, :k]
    whiten = (short / sigma[:k]).mT
    long = matrix.new_empty(k, wide.shape[1])
    for columns, block in _float64_blocks(wide):
        long[:, columns] = (whiten @ block).to(matrix.dtype)
    short = short.to(matrix.dtype)
    left, right = (short, long) if wide is matrix else (long.mT, short.mT)
    return TruncatedSvd(left, right, sigma, rank, end, edge)


def leading_directions(
    matrix: Tensor, k: int, *, rtol: float, errors: Tensor | None = None
) -> LeadingDirections:
    """Return U_k V_kᵀ of `matrix` `(d_out, d_in)`; `k` and `rtol` as in `truncated_svd`.

    With `errors` `(d_in,)`, how far each column is off, directions that these have made are beyond the
    numerical rank too (`LeadingDirections.within`).

    Each direction counts alike here, the weakest as much as the first. Where an eigenproblem has
    not resolved them all (an `rtol` far below the dtype's rounding), an SVD in float64 does, at
    several times the cost.
    """
    top = truncated_svd(matrix, k, rtol=rtol)
    if not residual(top) <= _ORTHONORMAL:  # NaN is not
        top = truncated_svd(matrix.double(), k, rtol=rtol)
    left, right, kept, rank = top.left, top.right, top.kept, top.rank
    if errors is not None:
        known = kept.square() > _made(right, errors)
        left, right, kept = left[:, known], right[known], kept[known]
        rank -= int((~known).sum())
    isometry = (left @ right).to(matrix.dtype)
    return LeadingDirections(isometry, top.sigma, len(right), rank, kept, right)


def _made(right: Tensor, errors: Tensor) -> Tensor:
    """Σ_j v_ij² errors_j², float64."""
    return right.double().square() @ errors.square()


def nuclear_norm(matrix: Tensor) -> float:
    """Return the sum of the singular values of a matrix `(d_out, d_in)`.

    Example:
        >>> nuclear_norm(torch.diag(torch.tensor([3.0, 2.0, 0.0])))
        5.0
    """
    if matrix.dtype == torch.float64:
        return float(svdvals(matrix).sum())
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.mT
    return float(eigvalsh(float64_gram(wide)).clamp_min(0.0).sqrt().sum())


def residual(top: TruncatedSvd) -> float:
    """Return max |WᵀW − I|, W `(max(d_out, d_in), k)` the singular vectors that follow from the others.

    Example:
        >>> residual(truncated_svd(torch.diag(torch.tensor([3.0, 2.0])), 2, rtol=1e-6))
        0.0
    """
    directions = top.left if len(top.left) > top.right.shape[1] else top.right.mT
    if not directions.shape[1]:
        return 0.0
    off = gram(directions)
    off.diagonal().sub_(1.0)
    return float(off.abs_().max())


def float64_gram(wide: Tensor) -> Tensor:
    """FFᵀ in float64, without a float64 copy of F."""
    total = wide.new_zeros(len(wide), len(wide), dtype=torch.float64)
    for _, block in _float64_blocks(wide):
        add_gram_(total, block.mT)
    return mirror_(total)


def _float64_blocks(wide: Tensor) -> Iterator[tuple[slice, Tensor]]:
    for start in range(0, wide.shape[1], _BLOCK):
        columns = slice(start, start + _BLOCK)
        yield columns, wide[:, columns].to(torch.float64)
