"""The leading singular directions of a matrix."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import sqrt

import torch
from torch import Tensor

from covmerge.base.types import Rounding
from covmerge.maths.linalg.auto import leading_choice, spectrum_choice
from covmerge.maths.linalg.cholesky import all_above
from covmerge.maths.linalg.lapack import eigh, eigvalsh, svd, svdvals
from covmerge.maths.linalg.refined import leading_pairs
from covmerge.maths.linalg.symmetric import add_gram_, gram, mirror_

EXACT = Rounding()
# Rounding errors add up to what they should within a few per cent; half as much again is something else.
_MOSTLY = 1.5
# (σ₁(E)/‖F‖_F)² up to which rounding E is that of float32: half precision gives 1e-4 and more.
_FINE = 1e-6
_BLOCK = 1024  # columns that are alive in float64 at once
# Singular values are one value that differ by less than so much of themselves, and by less than what
# rounding of float32 entries makes of equal ones, relative to the largest: float32 cannot tell their
# directions apart, and float64 goes by the same.
_ALIKE = 1e-5
_ROUNDED_APART = 4.0 * torch.finfo(torch.float32).eps
# Most that |WᵀW − I| may be of computed directions W. Those at the default numerical rank of
# float32 stay under a tenth of it.
ORTHONORMAL = 1e-3


@dataclass(frozen=True)
class TruncatedSvd:
    """The top-k part U_k diag(σ_1..σ_k) V_kᵀ of a matrix F `(d_out, d_in)`.

    Attributes:
        left: U_k `(d_out, k)`, of F's dtype.
        right: V_kᵀ `(k, d_in)`, of F's dtype.
        sigma: all singular values of F, float64, descending; of `leading_svd` perhaps no more than the
            leading ones.
        rank: numerical rank of F; of `leading_svd` perhaps no more than is known of it.
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
    def leading(self) -> Tensor:
        """σ_1..σ_k, float64."""
        return self.sigma[: len(self.right)]

    def product(self) -> Tensor:
        """Return U_k diag(σ_1..σ_k) V_kᵀ in float64: what is beyond the rank does not come back."""
        return (self.left.to(torch.float64) * self.leading) @ self.right.to(torch.float64)

    def first(self, k: int) -> TruncatedSvd:
        """Return the part of the k largest singular values, with those that equal the k-th."""
        k = with_equals(self.leading, k)
        return replace(self, left=self.left[:, :k], right=self.right[:k])


@dataclass(frozen=True)
class LeadingDirections:
    """The top-k part of F = U diag(σ) Vᵀ with its spectrum made flat.

    Attributes:
        isometry: U_k V_kᵀ, of F's shape and dtype; its residual has been checked.
        sigma: all singular values, float64, descending.
        k: directions kept: what was asked for and the equals of the last, at most the numerical rank.
        rank: numerical rank of F.
        leading: their singular values, float64.
        right: their right singular vectors `(k, d_in)`.
    """

    isometry: Tensor
    sigma: Tensor
    k: int
    rank: int
    leading: Tensor
    right: Tensor

    def within(self, errors: Tensor) -> int:
        """How many of them `errors` `(d_in,)` of the columns may have made: σ_i² ≤ Σ_j v_ij² errors_j²."""
        return int((self.leading.square() <= _made(self.right, errors)).sum())


def rank_tolerance(
    shape: Sequence[int],
    dtype: torch.dtype,
    given: float | None,
    roundings: Iterable[Rounding] = (),
) -> float:
    """Return where the numerical rank ends: `given`, or √max(d_out, d_in) · eps.

    eps is the larger one of the dtype that computes and of the arithmetic that made the matrices. A dtype
    that computes with more digits than a file was made with does not find more directions in it.

    Rounding errors of the entries are independent, so their matrix has a norm of order √d · eps.
    The customary d · eps is a worst case, and cuts real directions of updates whose spectrum is
    long: one of 64 changes a flat spectrum by an eighth.

    Example:
        >>> found = rank_tolerance((4, 4), torch.float64, None, [Rounding(eps=2.0**-23)])
        >>> found == rank_tolerance((4, 4), torch.float32, None)
        True
    """
    if given is not None:
        return given
    return sqrt(max(shape)) * max(torch.finfo(dtype).eps, Rounding.together(roundings).eps)


def with_equals(sigma: Tensor, k: int) -> int:
    """Return k, or as many more as singular values, descending, go on that equal the k-th.

    Those that equal zero are none of them: who asks for k beyond the rank gets k.

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
        rounding: what rounding gave to the matrix. The rank ends no lower than its floor. It ends at its
            edge where what is below is no more than rounding, which may be all of the matrix; a spectrum
            that goes on below is the matrix's own.

    Example:
        >>> sigma = torch.tensor([3.0, 1e-2, 1e-9])
        >>> numerical_rank(sigma, (3, 3), rtol=1e-6)[0]
        2
        >>> numerical_rank(sigma, (3, 3), rtol=1e-6, rounding=Rounding(edge=0.1, energy=1e-3))
        (1, 0.1)
        >>> numerical_rank(sigma, (3, 3), rtol=1e-6, rounding=Rounding(edge=0.1, energy=1e-6))[0]
        2
        >>> numerical_rank(sigma, (3, 3), rtol=1e-6, rounding=Rounding(floor=0.1))[0]
        1
    """
    if not sigma.numel():
        return 0, 0.0
    end = max(rtol * (float(sigma[0]) if scale is None else scale), rounding.floor)
    if end < rounding.edge and only_rounding(sigma, shape, rounding):
        end = rounding.edge
    return int((sigma > end).sum()), end


def only_rounding(sigma: Tensor, shape: Sequence[int], rounding: Rounding) -> bool:
    """Whether singular values below the edge of rounding are no more than rounding.

    Of the energy of errors in d_out × d_in entries, r directions that are something else leave the
    share (1 − r/d_out)(1 − r/d_in).
    """
    below = sigma[sigma <= rounding.edge]
    return energy_of_rounding(float(below.square().sum()), len(sigma) - len(below), shape, rounding)


def energy_of_rounding(energy: float, rank: int, shape: Sequence[int], rounding: Rounding) -> bool:
    """Whether so much energy beyond `rank` directions of a matrix is no more than rounding's."""
    share = max(0.0, 1.0 - rank / shape[0]) * max(0.0, 1.0 - rank / shape[1])
    return energy <= _MOSTLY * share * (rounding.energy + rounding.before)


@dataclass(frozen=True)
class _Wanted:
    """The k leading triplets of a matrix, and where its numerical rank ends."""

    k: int
    rtol: float
    scale: float | None
    rounding: Rounding
    shape: Sequence[int]
    equals: bool = True

    def of(self, sigma: Tensor) -> tuple[int, int, float]:
        """How many of all singular values are kept, the numerical rank, and where it ends."""
        rank, end = numerical_rank(
            sigma, self.shape, rtol=self.rtol, scale=self.scale, rounding=self.rounding
        )
        k = min(self.k, rank)
        return with_equals(sigma[:rank], k) if self.equals else k, rank, end

    def edge(self, end: float) -> float:
        """That of rounding, if the rank ends there."""
        return end if end == self.rounding.edge else 0.0


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
        >>> top.leading.tolist(), top.rank
        ([3.0, 2.0], 2)
    """
    return _truncated(matrix, _Wanted(k, rtol, scale, rounding, matrix.shape, equals))


def leading_svd(
    matrix: Tensor,
    k: int,
    *,
    rtol: float,
    scale: float | None = None,
    rounding: Rounding = EXACT,
    shape: Sequence[int] | None = None,
) -> TruncatedSvd:
    """Return the triplets that `truncated_svd` returns, where of the others nothing is asked.

    `sigma` may end soon after those that are kept, and `rank` is then no more than what is known: it is at
    least as large. In return a float32 matrix of some size takes little more than an eigenproblem in
    float32, whose leading pairs are refined (`covmerge.maths.linalg.refined`); where the spectrum does
    not let it, or its end may be rounding, all is computed as there.

    Args:
        matrix: F `(d_out, d_in)`.
        k: how many, but for equals of the last.
        rtol: as in `truncated_svd`,
        scale: and this,
        rounding: and this.
        shape: of the matrix that `rounding` is of, where F is that in the coordinates of some directions.

    Example:
        >>> top = leading_svd(torch.diag(torch.tensor([3.0, 2.0, 0.0])), 1, rtol=1e-6)
        >>> top.leading.tolist(), top.left.abs().mT.tolist()
        ([3.0], [[1.0, 0.0, 0.0]])
    """
    wanted = _Wanted(k, rtol, scale, rounding, matrix.shape if shape is None else shape)
    d_out, d_in = matrix.shape
    choice = leading_choice(d_out, d_in, k, matrix.dtype.itemsize, matrix.device.type)
    if choice.taken != "refined":
        return _truncated(matrix, wanted)
    gram = float64_gram(wide_of(matrix))
    top = _refined(matrix, gram, wanted)
    return _of_gram(matrix, gram, wanted) if top is None else top


def _truncated(matrix: Tensor, wanted: _Wanted) -> TruncatedSvd:
    d_out, d_in = matrix.shape
    if spectrum_choice(d_out, d_in, wanted.k, matrix.dtype.itemsize).taken != "svd":
        return _of_gram(matrix, float64_gram(wide_of(matrix)), wanted)
    left, sigma, right = svd(matrix)
    k, rank, end = wanted.of(sigma)
    # Copies, so that the full factors are gone.
    left, right = left[:, :k].clone(), right[:k].clone()
    return TruncatedSvd(left, right, sigma, rank, end, wanted.edge(end))


def _of_gram(matrix: Tensor, gram: Tensor, wanted: _Wanted) -> TruncatedSvd:
    """By all eigenpairs of the smaller Gram matrix."""
    values, vectors = eigh(gram)
    sigma = values.clamp_min(0.0).sqrt().flip(0)
    k, rank, end = wanted.of(sigma)
    left, right = _sides(matrix, vectors.flip(1)[:, :k], sigma)
    return TruncatedSvd(left, right, sigma, rank, end, wanted.edge(end))


def _refined(matrix: Tensor, gram: Tensor, wanted: _Wanted) -> TruncatedSvd | None:
    """By the leading eigenpairs of the smaller Gram matrix; None where all values decide."""
    noise = wanted.rounding.edge**2
    # Weights that were stored in half precision: much of the spectrum is below the edge.
    if noise > _FINE * float(gram.diagonal().sum()):
        return None

    def cut(values: Tensor) -> int:
        return with_equals(values.clamp_min(0.0).sqrt(), wanted.k)

    pairs = leading_pairs(gram, wanted.k, cut)
    if pairs is None:
        return None
    sigma = pairs.values.clamp_min(0.0).sqrt()
    whole = float(sigma[0]) if wanted.scale is None else wanted.scale
    end = max(wanted.rtol * whole, wanted.rounding.floor)
    if end < wanted.rounding.edge:
        # As in `numerical_rank` where nothing is below the edge; else it takes all values to tell.
        if pairs.least <= noise and not all_above(gram, noise):
            return None
        end = wanted.rounding.edge
    if float(sigma[-1]) <= end:
        return None
    left, right = _sides(matrix, pairs.vectors, sigma)
    return TruncatedSvd(left, right, sigma, len(sigma), end, wanted.edge(end))


def _sides(matrix: Tensor, short: Tensor, sigma: Tensor) -> tuple[Tensor, Tensor]:
    """U_k and V_kᵀ = Σ_k⁻¹U_kᵀF, or the other way round, of those of the shorter side in float64."""
    wide, k = wide_of(matrix), short.shape[1]
    whiten = (short / sigma[:k]).mT
    long = matrix.new_empty(k, wide.shape[1])
    for columns, block in float64_blocks(wide):
        long[:, columns] = (whiten @ block).to(matrix.dtype)
    short = short.to(matrix.dtype)
    return (short, long) if wide is matrix else (long.mT, short.mT)


def wide_of(matrix: Tensor) -> Tensor:
    """The matrix or its transpose, oriented so that the small side is the rows."""
    return matrix if matrix.shape[0] <= matrix.shape[1] else matrix.mT


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
    if not residual(top) <= ORTHONORMAL:  # NaN is not
        top = truncated_svd(matrix.double(), k, rtol=rtol)
    left, right, sigma, rank = top.left, top.right, top.leading, top.rank
    if errors is not None:
        known = sigma.square() > _made(right, errors)
        left, right, sigma = left[:, known], right[known], sigma[known]
        rank -= int((~known).sum())
    isometry = (left @ right).to(matrix.dtype)
    return LeadingDirections(isometry, top.sigma, len(right), rank, sigma, right)


def _made(right: Tensor, errors: Tensor) -> Tensor:
    """Σ_j v_ij² errors_j², float64."""
    return right.double().square() @ errors.square()


def nuclear_norm(matrix: Tensor) -> float:
    """Return the sum of the singular values of a matrix `(d_out, d_in)`.

    Example:
        >>> nuclear_norm(torch.diag(torch.tensor([3.0, 2.0, 0.0])))
        5.0
    """
    return float(singular_values(matrix).sum())


def singular_values(matrix: Tensor) -> Tensor:
    """Return the singular values of a matrix `(d_out, d_in)` in float64, in no order that is promised.

    Those of a float32 matrix are resolved down to 1e-8 of the largest.

    Example:
        >>> singular_values(torch.diag(torch.tensor([3.0, 2.0, 0.0]))).tolist()
        [0.0, 2.0, 3.0]
    """
    if matrix.dtype == torch.float64:
        return svdvals(matrix)
    return eigvalsh(float64_gram(wide_of(matrix))).clamp_min(0.0).sqrt()


def has_above(matrix: Tensor, count: int, floor: float) -> bool:
    """Whether so many singular values of a matrix `(d_out, d_in)` are above `floor`.

    It has them if so many of its rows, or columns of a high one, have: theirs are no larger than its own.
    Where a Cholesky factor shows that, no spectrum is asked for.

    Example:
        >>> diagonal = torch.diag(torch.tensor([3.0, 2.0, 0.0]))
        >>> has_above(diagonal, 2, 1.0), has_above(diagonal, 3, 1.0)
        (True, False)
    """
    if matrix.dtype == torch.float64:
        return int((svdvals(matrix) > floor).sum()) >= count
    wide = wide_of(matrix)
    if count <= len(wide) and all_above(float64_gram(wide[:count]), floor**2):
        return True
    return int((eigvalsh(float64_gram(wide)) > floor**2).sum()) >= count


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
    for _, block in float64_blocks(wide):
        add_gram_(total, block.mT)
    return mirror_(total)


def float64_blocks(wide: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Some columns after the other, in float64, and which they are."""
    for start in range(0, wide.shape[1], _BLOCK):
        columns = slice(start, start + _BLOCK)
        yield columns, wide[:, columns].to(torch.float64)
