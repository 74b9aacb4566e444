r"""The leading eigenpairs of a semi-definite matrix G `(n, n)`, found in float32 and refined to float64.

A full eigenproblem takes half the time in float32. The digits that float32 lacks are then computed for
the k wanted pairs only:

    G ≈ QΛQᵀ in float32;  X: the first b = k + k/4 + 8 columns of Q, orthonormal in float64
    Rayleigh–Ritz:  XᵀGX = WΘWᵀ,  X ← XW,  R = GX − XΘ                          (float64)
    correction:     X ← X + Q⊥C,  c_ij = q_iᵀr_j / (θ_j − λ_i),  q_i of the rest   (float32)

repeated until X is accurate. The correction is the first-order one of Ogita and Aishima (Iterative
refinement for symmetric eigenvalue decomposition, Japan Journal of Industrial and Applied Mathematics 35,
2018) for b columns instead of n. Its relative error multiplies an error, so float32 suffices.

The accuracy follows from the residuals (Davis and Kahan). With the gap g to the spectrum outside X, the
directions deviate from the true ones by at most e = max ‖r_j‖/g. Those before the cut mix with those
after it by e²θ_k/(θ_k − θ_{k+1}), which is of second order because of Rayleigh–Ritz. That no eigenvalue
was missed follows from the float32 problem, which is solved for all n: its eigenvalues are off by less
than √n·eps·λ_1 (Weyl), so no more than b eigenvalues are as large as g allows. If g is not clearly larger
than that, or if equal eigenvalues continue beyond X, the result is None, and the caller solves the full
problem in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import frexp, inf, sqrt

import torch
from torch import Tensor

from covmerge.maths.linalg.auto import beside
from covmerge.maths.linalg.lapack import cholesky, eigh, lengths, solve_triangular

# Limits of the directions' errors: the mixing within X before the last corrections, which do not change it;
# the error outside of X at which corrections stop; and the largest such error that is accepted where
# corrections gain no more.
_MIXED, _ENOUGH, _SHARP = 5e-8, 1e-8, 3e-7
# Most corrections of X that are tried; each gains two digits or more.
_ROUNDS = 4
# The smallest accepted gap to the spectrum outside X, in units of the largest error of float32.
_CLEAR = 4.0
_EPS = torch.finfo(torch.float32).eps


@dataclass(frozen=True)
class LeadingPairs:
    """The leading eigenpairs of a matrix `(n, n)`, float64."""

    # the k eigenvalues, descending, followed by some more, each no larger than the true eigenvalue
    values: Tensor
    vectors: Tensor  # `(n, k)`
    least: float  # a lower bound of all eigenvalues


def leading_pairs(
    gram: Tensor, k: int, cut: Callable[[Tensor], int] | None = None
) -> LeadingPairs | None:
    """Return the k leading eigenpairs of G `(n, n)`, float64, or None if float32 does not lead to them.

    Nothing is gained for k beyond about n/4. `cut` returns how many pairs to keep instead of k, from the
    descending eigenvalues.

    Example:
        >>> pairs = leading_pairs(torch.diag(torch.arange(40.0, 0.0, -1.0)).double(), 2)
        >>> pairs.values[:2].tolist(), pairs.vectors.abs().round()[:2].tolist()
        ([40.0, 39.0], [[1.0, 0.0], [0.0, 1.0]])
    """
    n, b = len(gram), k + beside(k)
    largest = float(gram.diagonal().sum())
    if b >= n or not largest > 0.0:
        return None
    unit = 2.0 ** -frexp(largest)[1]
    # eigh sorts ascending: the last b are the leading ones.
    values, vectors = eigh((gram * unit).to(torch.float32))
    values = values.to(torch.float64)
    rest = _Rest(vectors[:, :-b], values[:-b], unit)
    off = sqrt(n) * _EPS * float(values[-1]) / unit
    span = vectors[:, -b:].to(torch.float64)
    for _ in range(_ROUNDS):
        span = _orthonormal(span)
        if span is None:
            return None
        image = gram @ span
        theta, turn = (found.flip(-1) for found in eigh(span.mT @ image))
        count = k if cut is None else cut(theta)
        if not 0 < count < b:
            return None
        last = float(theta[count - 1])
        gap, step = last - rest.largest - off, last - float(theta[count])
        if gap < _CLEAR * off or not step > 0.0:
            return None
        span, image = span @ turn, image @ turn
        residual = image.sub_(span * theta)
        error = float(lengths(residual[:, :count], axis=0).max()) / gap
        if error**2 * last <= _MIXED * step:
            pairs = LeadingPairs(theta, span[:, :count], rest.least - off)
            return _sharp(gram, pairs, residual[:, :count], rest, gap)
        span += rest.correction(residual, theta, gap)
    return None


@dataclass(frozen=True)
class _Rest:
    """Eigenpairs outside X, of unit · G in float32: vectors `(n, n − b)` and ascending values."""

    vectors: Tensor
    values: Tensor
    unit: float

    @property
    def largest(self) -> float:
        return float(self.values[-1]) / self.unit

    @property
    def least(self) -> float:
        return float(self.values[0]) / self.unit

    def correction(self, residual: Tensor, theta: Tensor, gap: float) -> Tensor:
        """Return Q⊥C for a residual `(n, _)`. The gap need not hold for X's last columns."""
        apart = (theta * self.unit - self.values[:, None]).clamp_min_(gap * self.unit)
        pull = self.vectors.mT @ (residual * self.unit).to(torch.float32)
        return (self.vectors @ pull.div_(apart)).to(torch.float64)


def _sharp(
    gram: Tensor, pairs: LeadingPairs, residual: Tensor, rest: _Rest, gap: float
) -> LeadingPairs | None:
    """Correct the kept pairs alone, without mixing them further, until corrections gain no more."""
    count = pairs.vectors.shape[1]
    vectors, values, before = pairs.vectors, pairs.values[:count], inf
    while True:
        error = float(lengths(residual, axis=0).max()) / gap
        if error <= _ENOUGH or error > before / 4.0:
            break
        # The correction is orthogonal to the vectors, so XᵀX and the values change only by its square.
        vectors = vectors + rest.correction(residual, values, gap)
        vectors /= lengths(vectors, axis=0)
        residual = gram @ vectors
        values = (vectors * residual).sum(0)
        residual.sub_(vectors * values)
        before = error
    if not error <= _SHARP:
        return None
    return replace(pairs, vectors=vectors, values=torch.cat([values, pairs.values[count:]]))


def _orthonormal(columns: Tensor) -> Tensor | None:
    """Return an orthonormal basis of nearly orthonormal columns: X L⁻ᵀ with XᵀX = LLᵀ."""
    lower = cholesky(columns.mT @ columns)
    return None if lower is None else solve_triangular(lower, columns.mT).mT
