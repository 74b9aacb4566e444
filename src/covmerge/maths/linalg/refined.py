r"""The leading eigenpairs of a semi-definite matrix G `(n, n)`: float32's, refined to float64.

A full eigenproblem takes half the time in float32, and of the digits that are missing then, only those
of the k pairs that are asked for need be found:

    G ≈ QΛQᵀ in float32;  X: the first b = k + k/4 + 8 columns of Q, orthonormal in float64
    Rayleigh–Ritz:  XᵀGX = WΘWᵀ,  X ← XW,  R = GX − XΘ                          (float64)
    correction:     X ← X + Q⊥C,  c_ij = q_iᵀr_j / (θ_j − λ_i),  q_i of the rest   (float32)

until X is sharp. The correction is the first-order one of Ogita and Aishima (Iterative refinement for
symmetric eigenvalue decomposition, Japan Journal of Industrial and Applied Mathematics 35, 2018) for
b columns instead of n; what it is off by counts as a factor to an error, so that float32 will do.

How sharp, is read off the residuals (Davis and Kahan): with the gap g to what is outside X the
directions lie outside the true ones by at most e = max ‖r_j‖/g, and those before the cut mix with those
after it by e²θ_k/(θ_k − θ_{k+1}), which is of second order, X having been through Rayleigh–Ritz. That no
eigenvalue was missed follows from the float32 problem, which is solved for all n: its eigenvalues
are off by less than √n·eps·λ_1 (Weyl), so that no more than b are as large as g allows for. Where g
is not clearly larger than that, or equal eigenvalues go on beyond X, there is no answer, and
the caller solves the full problem in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import frexp, inf, sqrt

import torch
from torch import Tensor

from covmerge.maths.linalg.auto import beside
from covmerge.maths.linalg.lapack import cholesky, eigh, lengths, solve_triangular

# Of what directions are off by: most that they may mix within X before the last corrections, which leave
# that as it is; what is sought outside of it; and most of that, where corrections gain no more.
_MIXED, _ENOUGH, _SHARP = 5e-8, 1e-8, 3e-7
# Corrections of X that are tried; each takes off two digits or more.
_ROUNDS = 4
# The gap to what is outside, in units of what float32 may be off by, below which nothing is certain.
_CLEAR = 4.0
_EPS = torch.finfo(torch.float32).eps


@dataclass(frozen=True)
class LeadingPairs:
    """The leading eigenpairs of a matrix `(n, n)`, float64.

    Attributes:
        values: of the k vectors, descending, and after them some more, each at most that eigenvalue.
        vectors: `(n, k)`.
        least: no eigenvalue is below it.
    """

    values: Tensor
    vectors: Tensor
    least: float


def leading_pairs(
    gram: Tensor, k: int, cut: Callable[[Tensor], int] | None = None
) -> LeadingPairs | None:
    """Return the k leading eigenpairs of G, or None where float32 does not lead to them.

    Args:
        gram: G `(n, n)`, symmetric, semi-definite, float64.
        k: at most n/4 or so; beyond there is nothing to be gained.
        cut: how many of the eigenvalues, descending, are to be kept instead of k, by their values.

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
    # Ascending: the last b are the leading ones.
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
    """What lies outside X: eigenpairs in float32 `(n, n − b)`, ascending, those of unit · G."""

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
        """Q⊥C of a residual `(n, _)`. The last of X are not asked for, and no gap is promised there."""
        apart = (theta * self.unit - self.values[:, None]).clamp_min_(gap * self.unit)
        pull = self.vectors.mT @ (residual * self.unit).to(torch.float32)
        return (self.vectors @ pull.div_(apart)).to(torch.float64)


def _sharp(
    gram: Tensor, pairs: LeadingPairs, residual: Tensor, rest: _Rest, gap: float
) -> LeadingPairs | None:
    """Correct the pairs alone, which mix no further with others, as far as that goes."""
    count = pairs.vectors.shape[1]
    vectors, values, before = pairs.vectors, pairs.values[:count], inf
    while True:
        error = float(lengths(residual, axis=0).max()) / gap
        if error <= _ENOUGH or error > before / 4.0:
            break
        # Orthogonal to what they were, so that XᵀX and the values change by its square only.
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
    """An orthonormal basis of columns that nearly are one: X L⁻ᵀ with XᵀX = LLᵀ."""
    lower = cholesky(columns.mT @ columns)
    return None if lower is None else solve_triangular(lower, columns.mT).mT
