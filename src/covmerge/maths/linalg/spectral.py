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
# The energy of rounding is as expected to a few per cent; half as much again is more than rounding.
_MOSTLY = 1.5
# Largest (σ₁(E)/‖F‖_F)² of a rounding E in float32; half precision gives 1e-4 and more.
_FINE = 1e-6
_BLOCK = 1024  # columns that are held in float64 at once
# Singular values count as equal if they differ by less than _ALIKE of themselves, and by less than the
# difference that rounding to float32 makes between equal ones, relative to the largest. Float32 cannot tell
# their directions apart, and float64 follows the same rule.
_ALIKE = 1e-5
_ROUNDED_APART = 4.0 * torch.finfo(torch.float32).eps
# Largest accepted |WᵀW − I| of computed directions W. At the default numerical rank of float32 it stays
# below a tenth of this.
ORTHONORMAL = 1e-3


@dataclass(frozen=True)
class TruncatedSvd:
    """The top-k part U_k diag(σ_1..σ_k) V_kᵀ of a matrix F `(d_out, d_in)`."""

    left: Tensor  # U_k `(d_out, k)`, of F's dtype
    right: Tensor  # V_kᵀ `(k, d_in)`, of F's dtype
    # the singular values of F, float64, descending; from `leading_svd` possibly only the leading ones
    sigma: Tensor
    rank: int  # the numerical rank of F; from `leading_svd` possibly only a lower bound of it
    floor: float  # the cut-off below which singular values do not count
    edge: float = 0.0  # the edge of rounding of the stored weights if the rank ends there, else 0

    @property
    def leading(self) -> Tensor:
        """σ_1..σ_k, float64."""
        return self.sigma[: len(self.right)]

    def product(self) -> Tensor:
        """Return U_k diag(σ_1..σ_k) V_kᵀ in float64."""
        return (self.left.to(torch.float64) * self.leading) @ self.right.to(torch.float64)

    def first(self, k: int) -> TruncatedSvd:
        """Return the part of the k largest singular values, and of those that equal the k-th."""
        k = with_equals(self.leading, k)
        return replace(self, left=self.left[:, :k], right=self.right[:k])


@dataclass(frozen=True)
class LeadingDirections:
    """The top-k part of F = U diag(σ) Vᵀ with all its singular values replaced by 1."""

    isometry: Tensor  # U_k V_kᵀ, of F's shape and dtype; its residual has been checked
    sigma: Tensor  # all singular values, float64, descending
    # the number of kept directions: the requested number and those equal to the last, at most `rank`
    k: int
    rank: int  # the numerical rank of F
    leading: Tensor  # the singular values of the kept directions, float64
    right: Tensor  # the right singular vectors of the kept directions `(k, d_in)`

    def within(self, errors: Tensor) -> int:
        """Return how many directions `errors` `(d_in,)` may have made: σ_i² ≤ Σ_j v_ij² errors_j²."""
        made = self.right.double().square() @ errors.square()
        return int((self.leading.square() <= made).sum())


def rank_tolerance(
    shape: Sequence[int],
    dtype: torch.dtype,
    given: float | None,
    roundings: Iterable[Rounding] = (),
) -> float:
    """Return the relative cut-off of the numerical rank: `given`, or √max(d_out, d_in) · eps.

    eps is the larger of the computation's eps and that of the arithmetic that made the matrices. A dtype
    with more digits than a file was made with does not find more directions in the file.

    Rounding errors of the entries are independent, so their matrix has a norm of order √d · eps. The
    customary d · eps is a worst case, and cuts real directions of updates with a long spectrum: cutting one
    direction of 64 changes a flat spectrum by an eighth.

    Example:
        >>> found = rank_tolerance((4, 4), torch.float64, None, [Rounding(eps=2.0**-23)])
        >>> found == rank_tolerance((4, 4), torch.float32, None)
        True
    """
    if given is not None:
        return given
    return sqrt(max(shape)) * max(torch.finfo(dtype).eps, Rounding.together(roundings).eps)


def with_equals(sigma: Tensor, k: int) -> int:
    """Return k plus the number of following singular values, descending, that equal the k-th.

    Singular values that are zero to rounding are not extended: a k beyond the rank is returned as it is.

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
    """Return the sizes of the groups of equal singular values, which are descending.

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
    """Return how many singular values equal another one: any rotation of their directions is valid.

    Example:
        >>> without_order(torch.tensor([2.0, 1.0, 1.0, 0.5]))
        2
    """
    return sum(size for size in sizes_of_equals(sigma) if size > 1)


@dataclass(frozen=True)
class RankRule:
    """Where the numerical rank of a matrix ends.

    The rank ends no lower than the floor of its rounding. It ends at the edge if the singular values below
    are no more than rounding, which may be all of them; if they are more, the spectrum below the edge
    belongs to the matrix.
    """

    rtol: float  # the cut-off, in units of `scale`; in `linalg.pinv`, of eigenvalues
    rounding: Rounding = EXACT  # the rounding error of the matrix
    scale: float | None = None  # by default the largest singular value
    # shape of the matrix that has the rounding, if it is written in other coordinates
    shape: Sequence[int] | None = None

    def rank(self, sigma: Tensor, shape: Sequence[int]) -> tuple[int, float]:
        """Return the numerical rank, and the singular value at which it ends.

        The singular values are descending, and those of a matrix of this shape.

        Example:
            >>> sigma = torch.tensor([3.0, 1e-2, 1e-9])
            >>> RankRule(1e-6).rank(sigma, (3, 3))[0]
            2
            >>> RankRule(1e-6, Rounding(edge=0.1, energy=1e-3)).rank(sigma, (3, 3))
            (1, 0.1)
            >>> RankRule(1e-6, Rounding(edge=0.1, energy=1e-6)).rank(sigma, (3, 3))[0]
            2
            >>> RankRule(1e-6, Rounding(floor=0.1)).rank(sigma, (3, 3))[0]
            1
        """
        if not sigma.numel():
            return 0, 0.0
        end, edge = self.cut_off(sigma), self.rounding.edge
        if end < edge:
            below = sigma[sigma <= edge]
            energy, rank = float(below.square().sum()), len(sigma) - len(below)
            if energy_of_rounding(energy, rank, self.shape or shape, self.rounding):
                end = edge
        return int((sigma > end).sum()), end

    def cut_off(self, sigma: Tensor) -> float:
        """Return the singular value at which the rank ends if nothing more is rounding."""
        scale = float(sigma[0]) if self.scale is None else self.scale
        return max(self.rtol * scale, self.rounding.floor)


def energy_of_rounding(energy: float, rank: int, shape: Sequence[int], rounding: Rounding) -> bool:
    """Return whether the energy beyond `rank` directions of a matrix is no more than that of rounding.

    Errors in d_out × d_in entries leave the share (1 − r/d_out)(1 − r/d_in) of their energy beyond r
    directions.
    """
    share = max(0.0, 1.0 - rank / shape[0]) * max(0.0, 1.0 - rank / shape[1])
    return energy <= _MOSTLY * share * (rounding.energy + rounding.before)


def truncated_svd(matrix: Tensor, k: int, rule: RankRule, *, equals: bool = True) -> TruncatedSvd:
    """Return the `k` leading singular triplets of `matrix` `(d_out, d_in)`.

    Directions beyond the numerical rank are arbitrary and never kept. All singular values that equal the
    k-th are kept, because the order of their directions is arbitrary. With `equals=False`, k is an upper
    bound.

    Float64 is computed by an SVD. Float32 is computed by the float64 eigenproblem of the smaller Gram
    matrix, V_kᵀ = Σ_k⁻¹U_kᵀF, which resolves σ down to 1e-8 of the largest.

    Example:
        >>> top = truncated_svd(torch.diag(torch.tensor([3.0, 2.0, 0.0])), 3, RankRule(1e-6))
        >>> top.leading.tolist(), top.rank
        ([3.0, 2.0], 2)
    """
    d_out, d_in = matrix.shape
    if spectrum_choice(d_out, d_in, k, matrix.dtype.itemsize).taken != "svd":
        return _of_gram(matrix, float64_gram(wide_of(matrix)), k, rule, equals=equals)
    left, sigma, right = svd(matrix)
    rank, end = rule.rank(sigma, matrix.shape)
    k = _kept(sigma[:rank], k, equals)
    # Copies, so that the memory of the full factors is freed.
    return _ended(left[:, :k].clone(), right[:k].clone(), sigma, rank, end, rule)


def leading_svd(matrix: Tensor, k: int, rule: RankRule) -> TruncatedSvd:
    """Return the triplets that `truncated_svd` returns, for callers that need no other singular values.

    `sigma` may end soon after the kept values; `rank` is then only a lower bound. In return, a large
    float32 matrix costs little more than an eigenproblem in float32, whose leading pairs are refined
    (`covmerge.maths.linalg.refined`). If the spectrum does not allow that, or if its end may be rounding,
    everything is computed as in `truncated_svd`.

    Example:
        >>> top = leading_svd(torch.diag(torch.tensor([3.0, 2.0, 0.0])), 1, RankRule(1e-6))
        >>> top.leading.tolist(), top.left.abs().mT.tolist()
        ([3.0], [[1.0, 0.0, 0.0]])
    """
    d_out, d_in = matrix.shape
    choice = leading_choice(d_out, d_in, k, matrix.dtype.itemsize, matrix.device.type)
    if choice.taken != "refined":
        return truncated_svd(matrix, k, rule)
    gram = float64_gram(wide_of(matrix))
    top = _refined(matrix, gram, k, rule)
    return _of_gram(matrix, gram, k, rule) if top is None else top


def _of_gram(
    matrix: Tensor, gram: Tensor, k: int, rule: RankRule, *, equals: bool = True
) -> TruncatedSvd:
    """Compute the triplets from all eigenpairs of the smaller Gram matrix."""
    values, vectors = eigh(gram)
    sigma = values.clamp_min(0.0).sqrt().flip(0)
    rank, end = rule.rank(sigma, matrix.shape)
    left, right = _sides(matrix, vectors.flip(1)[:, : _kept(sigma[:rank], k, equals)], sigma)
    return _ended(left, right, sigma, rank, end, rule)


def _refined(matrix: Tensor, gram: Tensor, k: int, rule: RankRule) -> TruncatedSvd | None:
    """Compute the triplets from the Gram matrix's leading eigenpairs; None if all values are needed."""
    noise = rule.rounding.edge**2
    # For weights stored in half precision, much of the spectrum lies below the edge.
    if noise > _FINE * float(gram.diagonal().sum()):
        return None

    def cut(values: Tensor) -> int:
        return with_equals(values.clamp_min(0.0).sqrt(), k)

    pairs = leading_pairs(gram, k, cut)
    if pairs is None:
        return None
    sigma = pairs.values.clamp_min(0.0).sqrt()
    end = rule.cut_off(sigma)
    if end < rule.rounding.edge:
        # As the rule decides if nothing lies below the edge; else all values are needed.
        if pairs.least <= noise and not all_above(gram, noise):
            return None
        end = rule.rounding.edge
    if float(sigma[-1]) <= end:
        return None
    return _ended(*_sides(matrix, pairs.vectors, sigma), sigma, len(sigma), end, rule)


def _kept(sigma: Tensor, k: int, equals: bool) -> int:
    """Return how many of the singular values within the rank are kept."""
    return with_equals(sigma, min(k, len(sigma))) if equals else min(k, len(sigma))


def _ended(
    left: Tensor, right: Tensor, sigma: Tensor, rank: int, end: float, rule: RankRule
) -> TruncatedSvd:
    edge = end if end == rule.rounding.edge else 0.0
    return TruncatedSvd(left, right, sigma, rank, end, edge)


def _sides(matrix: Tensor, short: Tensor, sigma: Tensor) -> tuple[Tensor, Tensor]:
    """Return U_k and V_kᵀ = Σ_k⁻¹U_kᵀF, or vice versa, from the shorter side's vectors in float64."""
    wide, k = wide_of(matrix), short.shape[1]
    whiten = (short / sigma[:k]).mT
    long = matrix.new_empty(k, wide.shape[1])
    for columns, block in float64_blocks(wide):
        long[:, columns] = (whiten @ block).to(matrix.dtype)
    short = short.to(matrix.dtype)
    return (short, long) if wide is matrix else (long.mT, short.mT)


def wide_of(matrix: Tensor) -> Tensor:
    """Return the matrix or its transpose, so that it has no more rows than columns."""
    return matrix if matrix.shape[0] <= matrix.shape[1] else matrix.mT


def leading_directions(
    matrix: Tensor, k: int, *, rtol: float, errors: Tensor | None = None
) -> LeadingDirections:
    """Return U_k V_kᵀ of `matrix` `(d_out, d_in)`; `k` and `rtol` are as in `truncated_svd`.

    `errors` `(d_in,)` are the errors of the columns. Directions that such errors can make are beyond the
    numerical rank too (`LeadingDirections.within`).

    All directions count alike here, the weakest as much as the first. If an eigenproblem has not resolved
    all of them (an `rtol` far below the dtype's rounding), a float64 SVD does, at several times the cost.
    """
    top = truncated_svd(matrix, k, RankRule(rtol))
    if not residual(top) <= ORTHONORMAL:  # NaN fails this comparison too
        top = truncated_svd(matrix.double(), k, RankRule(rtol))
    left, right, sigma, rank = top.left, top.right, top.leading, top.rank
    if errors is not None:
        known = sigma.square() > right.double().square() @ errors.square()
        left, right, sigma = left[:, known], right[known], sigma[known]
        rank -= int((~known).sum())
    isometry = (left @ right).to(matrix.dtype)
    return LeadingDirections(isometry, top.sigma, len(right), rank, sigma, right)


def singular_values(matrix: Tensor) -> Tensor:
    """Return the singular values of a matrix `(d_out, d_in)` in float64, in no particular order.

    Those of a float32 matrix are resolved down to 1e-8 of the largest.

    Example:
        >>> singular_values(torch.diag(torch.tensor([3.0, 2.0, 0.0]))).tolist()
        [0.0, 2.0, 3.0]
    """
    if matrix.dtype == torch.float64:
        return svdvals(matrix)
    return eigvalsh(float64_gram(wide_of(matrix))).clamp_min(0.0).sqrt()


def has_above(matrix: Tensor, count: int, floor: float) -> bool:
    """Return whether `count` singular values of a matrix `(d_out, d_in)` are above `floor`.

    They are if `count` singular values of its first rows (or columns of a high matrix) are, because these
    are no larger than the matrix's. If a Cholesky factor shows that, no spectrum is computed.

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
    """Return max |WᵀW − I|, W `(max(d_out, d_in), k)` the singular vectors computed from the other side's.

    Example:
        >>> residual(truncated_svd(torch.diag(torch.tensor([3.0, 2.0])), 2, RankRule(1e-6)))
        0.0
    """
    directions = top.left if len(top.left) > top.right.shape[1] else top.right.mT
    if not directions.shape[1]:
        return 0.0
    off = gram(directions)
    off.diagonal().sub_(1.0)
    return float(off.abs_().max())


def float64_gram(wide: Tensor) -> Tensor:
    """Return FFᵀ in float64, without a float64 copy of F."""
    total = wide.new_zeros(len(wide), len(wide), dtype=torch.float64)
    for _, block in float64_blocks(wide):
        add_gram_(total, block.mT)
    return mirror_(total)


def float64_blocks(wide: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield blocks of columns in float64, each with its slice."""
    for start in range(0, wide.shape[1], _BLOCK):
        columns = slice(start, start + _BLOCK)
        yield columns, wide[:, columns].to(torch.float64)
