"""Solve with a symmetric positive (semi-)definite matrix by one Cholesky factorisation; its condition."""

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

# Columns that LAPACK factorises at once; the rest of the work is products, which run faster than
# its own blocked factorisation. Devices that are not the CPU have a good one.
# Those that are solved at once are more: there LAPACK has rows to work on as well.
_BLOCK, _SOLVED = 256, 512
# Jitter steps, relative to the mean diagonal; the first is "none".
_LADDER = (0.0, 1e-12, 1e-10, 1e-8, 1e-6, 1e-4)


@dataclass(frozen=True)
class Cholesky:
    """A + (ridge + jitter)·I = L Lᵀ.

    Attributes:
        factor: L `(n, n)`, above the diagonal arbitrary; float64 when the float32 factorisation broke
            down.
        jitter: what was added to the diagonal beyond the ridge asked for; 0 in the normal case.
        rcond: squared ratio of the smallest to the largest pivot, an upper bound on the reciprocal
            condition number.
    """

    factor: Tensor
    jitter: float
    rcond: float

    def solve_right(self, rows: Tensor) -> Tensor:
        """Return X with X (L Lᵀ) = rows, for rows `(m, n)`, in their dtype."""
        return self.solve_right_(rows.clone())

    def solve_right_(self, rows: Tensor) -> Tensor:
        """Return X as `solve_right`, in the place of the rows if they have the dtype of L.

        Block by block, by products: torch's solver copies the factor.
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
    """Factorise A + ridge·I for A `(n, n)` symmetric, which is used up: L takes its place.

    A float32 breakdown is repeated in float64; if the matrix is indefinite there as well, a jitter
    climbs a ladder relative to the mean diagonal and is reported, never hidden.

    Raises:
        TensorError: the matrix stays indefinite at the top of the ladder (1e-4).
        OverflowError: it holds NaN or Inf.
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
            factor = _from_above(system)
    raise TensorError(
        f"the {list(system.shape)} system of this layer stays indefinite with a ridge of "
        f"{ridge:g} and a jitter of {_LADDER[-1]:g} of its mean diagonal; raise `eps`"
    )


def _from_above(system: Tensor) -> Tensor:
    """A in float64, without its diagonal, by what is above it: below it was overwritten."""
    upper = system.triu(1).to(torch.float64)
    return upper.add_(upper.mT.clone())


def factorize_above(system: Tensor, *, floor: float) -> Cholesky | None:
    """Factorise A if all its eigenvalues are above `floor`, in its own dtype; None if they are not.

    They are if A − floor·I has a Cholesky factor: by inertia, to the rounding of the dtype, and
    at a small part of the price of the eigenvalues.

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
    """Whether all eigenvalues of a symmetric matrix are above `floor`; see `factorize_above`."""
    shifted = system.clone()
    shifted.diagonal().sub_(floor)
    return _factor_in_place(shifted)


def lower_factor(system: Tensor) -> Tensor | None:
    """L, lower triangular, with L Lᵀ = A, or None if A is not positive definite.

    Example:
        >>> lower_factor(torch.tensor([[4.0, 2.0], [2.0, 2.0]])).tolist()
        [[2.0, 0.0], [1.0, 1.0]]
    """
    factor = system.clone()
    return factor.tril_() if _factor_in_place(factor) else None


def log_det(system: Tensor) -> float:
    """Return log det A of a symmetric matrix A `(n, n)` whose eigenvalues are 1 and larger.

    In float64 where the rounding of its dtype hides the 1.

    Raises:
        OverflowError: it has no Cholesky factor in float64 either: it holds NaN or Inf.

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
    """Replace the lower triangle by L; False if the matrix is not positive definite.

    What is above the diagonal stays as it is. Column block by column block, left-looking: what the earlier
    blocks say of this one is taken off by one product.
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
    """Columns after columns; all at once on another device than the CPU."""
    n = len(matrix)
    step = step if matrix.device.type == "cpu" else max(1, n)
    for start in range(0, n, step):
        yield slice(start, min(start + step, n))


def _rcond(factor: Tensor) -> float:
    pivots = factor.diagonal()
    return float((pivots.min() / pivots.max()) ** 2)


STEPS = 6  # of inverse iteration


def condition_number(
    largest: float, factor: Cholesky, *, ridge: float, enough: float = 1.0
) -> float:
    """Return λ_max/λ_min of A + ridge·I from below, `largest` that of A and `factor` its factorisation.

    Where the ridge alone keeps it below `enough`, that bound is returned, and nothing solved for it.

    The smallest eigenvalue by a few steps of inverse iteration, solves with one vector. One that the ridge
    alone decides has so many directions that the first step finds it.

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
    r"""Turn X = N S⁻¹ in place into N (S + 𝟏cᵀ)⁻¹, given wᵀ = cᵀS⁻¹.

    N (S + 𝟏cᵀ)⁻¹ = X − (X𝟏) wᵀ / (1 + wᵀ𝟏)

    Args:
        solved: X `(m, n)`.
        solved_row: w `(n,)`.
        ones: 𝟏 `(n,)` in the coordinates of the columns; None where it is literally that.
    """
    if ones is None:
        ones = torch.ones_like(solved_row)
    return solved.addr_((solved @ ones) / (1.0 + solved_row @ ones), solved_row, alpha=-1.0)
