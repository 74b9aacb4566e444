"""Cholesky factorisation of symmetric positive (semi-)definite matrices, and solves by it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite

import torch
from torch import Tensor

from covmerge.base.errors import TensorError
from covmerge.maths.linalg.lapack import (
    cholesky,
    divide_triangular,
    norm,
    solve_triangular,
    square_norm,
)

# Columns that LAPACK factorises at once. The rest of the work is products, which run faster than LAPACK's
# blocked factorisation; other devices than the CPU have a good blocked factorisation. A solve takes more
# columns at once, because LAPACK then works on many rows as well.
_BLOCK, _SOLVED = 256, 512
# Jitter, relative to the mean diagonal. The first step adds none.
_LADDER = (0.0, 1e-12, 1e-10, 1e-8, 1e-6, 1e-4)


@dataclass(frozen=True)
class Cholesky:
    """A + (ridge + jitter)·I = L Lᵀ."""

    # L `(n, n)`, with arbitrary values above the diagonal; float64 if the float32 factorisation broke down
    factor: Tensor
    jitter: float  # what was added to the diagonal beyond the requested ridge; normally 0
    # squared ratio of the smallest to the largest pivot, an upper bound on the reciprocal condition number
    rcond: float

    def solve_right(self, rows: Tensor) -> Tensor:
        """Return X with X (L Lᵀ) = rows, for rows `(m, n)`, in the dtype of the rows."""
        return self.solve_right_(rows.clone())

    def solve_right_(self, rows: Tensor) -> Tensor:
        """Return X as `solve_right` does, overwriting the rows if they have the dtype of L.

        The solve is done block by block, by products, because torch's solver copies the factor.
        """
        solved, factor = rows.to(self.factor.dtype), self.factor
        if factor.device.type != "cpu":
            return torch.cholesky_solve(solved.mT, factor).mT.to(rows.dtype)
        blocks = list(_blocks(factor, _SOLVED))
        for block in blocks:
            columns, known = solved[:, block], slice(block.start)
            if block.start:
                columns.addmm_(solved[:, known], factor[block, known].mT, alpha=-1.0)
            columns.copy_(solve_triangular(factor[block, block], columns.mT).mT)
        for block in reversed(blocks):
            columns, known = solved[:, block], slice(block.stop, None)
            if block.stop < len(factor):
                columns.addmm_(solved[:, known], factor[known, block], alpha=-1.0)
            columns.copy_(divide_triangular(columns, factor[block, block]))
        return solved.to(rows.dtype)

    def square_norm_of_inverse(self) -> float:
        """Return ‖(L Lᵀ)⁻¹‖²_F.

        Example:
            >>> factor = factorize(torch.diag(torch.tensor([2.0, 1.0])), ridge=0.0)
            >>> round(factor.square_norm_of_inverse(), 6)
            1.25
        """
        return square_norm(torch.cholesky_inverse(self.factor))


def factorize(system: Tensor, *, ridge: float) -> Cholesky:
    """Factorise A + ridge·I for a symmetric A `(n, n)`, which is overwritten by L.

    If float32 breaks down, the factorisation is repeated in float64. If the matrix is indefinite in float64
    as well, a growing jitter relative to the mean diagonal is added, and reported.

    Raises:
        TensorError: the matrix is indefinite even with the largest jitter (1e-4).
        OverflowError: the matrix holds NaN or Inf.
    """
    diagonal = system.diagonal().clone()
    mean_diagonal = float(diagonal.mean())
    if not isfinite(mean_diagonal):
        raise OverflowError("the sums of this layer overflow")
    factor = system
    for dtype in dict.fromkeys((system.dtype, torch.float64)):
        for step in _LADDER if dtype == torch.float64 else _LADDER[:1]:
            jitter = step * mean_diagonal
            factor.diagonal().copy_(diagonal).add_(ridge + jitter)
            if _factor_in_place(factor):
                return Cholesky(factor, jitter, _rcond(factor))
            # The lower triangle was overwritten, and the upper one is as it was.
            upper = system.triu(1).to(torch.float64)
            factor = upper.add_(upper.mT.clone())
    raise TensorError(
        f"the {list(system.shape)} system of this layer stays indefinite with a ridge of "
        f"{ridge:g} and a jitter of {_LADDER[-1]:g} of its mean diagonal; raise `eps`"
    )


def factorize_above(system: Tensor, *, floor: float) -> Cholesky | None:
    """Factorise A in its dtype if all its eigenvalues are above `floor`; else return None.

    They are if A − floor·I has a Cholesky factor. This test by inertia is exact to the rounding of the
    dtype, and costs a small part of what eigenvalues cost.

    Example:
        >>> a = torch.diag(torch.tensor([4.0, 1.0]))
        >>> factorize_above(a, floor=0.5).factor.diagonal().tolist(), factorize_above(a, floor=2.0)
        ([2.0, 1.0], None)
    """
    if not all_above(system, floor):
        return None
    factor = system.clone()
    return Cholesky(factor, 0.0, _rcond(factor)) if _factor_in_place(factor) else None


def all_above(system: Tensor, floor: float) -> bool:
    """Return whether all eigenvalues of a symmetric matrix are above `floor`; see `factorize_above`."""
    shifted = system.clone()
    shifted.diagonal().sub_(floor)
    return _factor_in_place(shifted)


def lower_factor(system: Tensor) -> Tensor | None:
    """Return the lower triangular L with L Lᵀ = A, or None if A is not positive definite.

    Example:
        >>> lower_factor(torch.tensor([[4.0, 2.0], [2.0, 2.0]])).tolist()
        [[2.0, 0.0], [1.0, 1.0]]
    """
    factor = system.clone()
    return factor.tril_() if _factor_in_place(factor) else None


def log_det(system: Tensor) -> float:
    """Return log det A of a symmetric matrix A `(n, n)` whose eigenvalues are at least 1.

    The result is computed in float64 if rounding in A's dtype hides the 1.

    Raises:
        OverflowError: A has no Cholesky factor in float64 either: it holds NaN or Inf.

    Example:
        >>> round(log_det(torch.tensor([[5.0, 2.0], [2.0, 2.0]])), 4)  # log 6
        1.7918
    """
    for dtype in dict.fromkeys((system.dtype, torch.float64)):
        factor = system.to(dtype, copy=True)
        if _factor_in_place(factor):
            return 2.0 * float(factor.diagonal().to(torch.float64).log().sum())
    raise OverflowError("the sums of this layer overflow")


def _factor_in_place(matrix: Tensor) -> bool:
    """Replace the lower triangle by L; return False if the matrix is not positive definite.

    The upper triangle is left as it is. Column blocks are done in order (left-looking): one product
    subtracts the contribution of all earlier blocks from a block.
    """
    for block in _blocks(matrix, _BLOCK):
        tile, below = matrix[block, block], slice(block.stop, None)
        known = matrix[block, : block.start]
        corner = cholesky(torch.addmm(tile, known, known.mT, alpha=-1.0) if block.start else tile)
        if corner is None:
            return False
        tile.copy_(tile.triu(1).add_(corner))
        if block.stop < len(matrix):
            rest = matrix[below, block]
            if block.start:
                rest.addmm_(matrix[below, : block.start], known.mT, alpha=-1.0)
            rest.copy_(solve_triangular(corner, rest.mT).mT)
    return True


def _blocks(matrix: Tensor, step: int) -> Iterator[slice]:
    """Yield blocks of columns; one block on other devices than the CPU."""
    n = len(matrix)
    step = step if matrix.device.type == "cpu" else max(1, n)
    for start in range(0, n, step):
        yield slice(start, min(start + step, n))


def _rcond(factor: Tensor) -> float:
    pivots = factor.diagonal()
    return float((pivots.min() / pivots.max()) ** 2)


STEPS = 6  # steps of inverse iteration


def condition_number(
    largest: float, factor: Cholesky, *, ridge: float, enough: float = 1.0
) -> float:
    """Return a lower bound of λ_max/λ_min of A + ridge·I, from `largest` = λ_max(A) and its `factor`.

    If the ridge alone keeps the ratio below `enough`, the ridge's bound is returned without a solve.

    The smallest eigenvalue comes from a few steps of inverse iteration, which are solves with one vector.
    If it is the ridge's alone, its eigenspace is so large that the first step finds it.

    Example:
        >>> from covmerge.maths.linalg.cholesky import factorize
        >>> factor = factorize(torch.diag(torch.tensor([3.0, 1.0, 0.0])), ridge=0.1)
        >>> round(condition_number(3.0, factor, ridge=0.1))
        31
    """
    largest += ridge
    if largest <= enough * ridge:
        return largest / ridge
    generator = torch.Generator().manual_seed(0)
    vector = torch.randn(1, len(factor.factor), generator=generator, dtype=torch.float64)
    vector = vector.to(factor.factor)
    growth = 0.0
    for _ in range(STEPS):
        vector = factor.solve_right(vector / norm(vector))
        growth = norm(vector)
    return largest * growth


def add_rank_one_(solved: Tensor, solved_row: Tensor, ones: Tensor | None = None) -> Tensor:
    r"""Turn X = N S⁻¹ into N (S + 𝟏cᵀ)⁻¹ in place, given wᵀ = cᵀS⁻¹.

    N (S + 𝟏cᵀ)⁻¹ = X − (X𝟏) wᵀ / (1 + wᵀ𝟏)        X `(m, n)`, w `(n,)`

    `ones` is 𝟏 `(n,)` in the coordinates of the columns; None: a vector of ones.
    """
    if ones is None:
        ones = torch.ones_like(solved_row)
    return solved.addr_((solved @ ones) / (1.0 + solved_row @ ones), solved_row, alpha=-1.0)
