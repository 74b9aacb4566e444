r"""Functions of symmetric matrices by matrix products and Cholesky factors, without an eigenproblem.

A polar factor is what the scaled iteration of Newton and Schulz comes to (Chen and Chow, A Stable
Scaling of Newton–Schulz for Improving the Sign Function Computation of a Hermitian Matrix, Argonne
preprint ANL/MCS-P5059-0114, 2014):

    X ← X (3I − ρ²XᵀX) ρ/2,  ρ² = 3/(1 + l + l²)

Each step takes singular values of [l, 1] to [l′, 1], l′ = ρl(3 − ρ²l²)/2: a small one to 2.6 times as
much, one near 1 to as many digits again. Of a symmetric matrix the polar factor is its sign. From it follow

    G^(−½) = W L⁻¹        G = LLᵀ, W the polar factor of L    (Higham, Functions of Matrices, 2008)
    P = (I + sign(A − cI))/2, the projector beyond a cut-off c (spectral divide and conquer)

The steps are fixed by l alone and wait for nothing on the host. No iteration decides a rank: that no
eigenvalue is below a number, or that so many are on each side of a cut-off, is shown by Cholesky factors
(inertia), in float64. Whoever asks gets None where they do not show it, and solves the eigenproblem.

On a CPU that is always the cheaper way; on a device where an eigenproblem takes the time of a hundred
products it is not (`covmerge.maths.linalg.auto`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor

from covmerge.maths.linalg.cholesky import all_above, lower_factor
from covmerge.maths.linalg.lapack import divide_triangular, norm
from covmerge.maths.linalg.symmetric import gram

# Singular values that a root starts from are shown to be above one of these, or above what is asked for.
_LEAST = (1e-2, 1e-4)
# Distance of the nearest eigenvalue to a cut-off, in units of the largest, down to which its side is found.
NEAREST = 1e-7
# No cut is made closer to zero than this, in the same units: one far below it is found by what is left out.
_COARSE = 10.0 * NEAREST
# Most that ‖S² − I‖_F may be of a sign S.
_SIGN = 1e-8
_CONVERGED = 1e-8  # 1 − l, before the last step


def largest_bound(symmetric: Tensor) -> float:
    """Return a number that no eigenvalue of a symmetric matrix exceeds in magnitude.

    Example:
        >>> largest_bound(torch.diag(torch.tensor([3.0, -4.0])))
        4.0
    """
    return min(float(symmetric.abs().sum(0).max()), norm(symmetric))


def newton_schulz(x: Tensor, least: float) -> Tensor:
    """Return the polar factor of a square matrix X whose singular values are in [least, 1].

    Smaller ones, zeros among them, come out anywhere below 1. None may be above 1: it would come back
    with the wrong sign.

    Example:
        >>> newton_schulz(torch.tensor([[0.0, 0.5], [1.0, 0.0]]).double(), 0.5).round(decimals=9).tolist()
        [[0.0, 1.0], [1.0, 0.0]]
    """
    for rho in _scales(least):
        step = gram(x).mul_(-0.5 * rho**3)
        step.diagonal().add_(1.5 * rho)
        x = x @ step
    return x


def _scales(least: float) -> Iterator[float]:
    """ρ of each step, until [l, 1] is nothing but 1."""
    while True:
        rho = sqrt(3.0 / (1.0 + least + least * least))
        yield rho
        if 1.0 - least < _CONVERGED:
            return
        least = min(1.0, 0.5 * rho * least * (3.0 - (rho * least) ** 2))


def inverse_root(symmetric: Tensor, *, floor: float) -> Tensor | None:
    """Return G^(−½) of a symmetric G `(n, n)` in float64; None unless all eigenvalues are above `floor`.

    It is off by eps times the condition number of G, which its callers check.

    Example:
        >>> root = inverse_root(torch.diag(torch.tensor([4.0, 1.0])).double(), floor=0.5)
        >>> root.round(decimals=9).tolist()
        [[0.5, 0.0], [0.0, 1.0]]
        >>> inverse_root(torch.diag(torch.tensor([4.0, 1.0])).double(), floor=2.0)
    """
    largest = largest_bound(symmetric)
    if not 0.0 < floor < largest:
        return None
    floors = [max(floor, largest * least**2) for least in _LEAST]
    shown = next((bound for bound in [*floors, floor] if all_above(symmetric, bound)), None)
    lower = None if shown is None else lower_factor(symmetric)
    if shown is None or lower is None:
        return None
    turned = newton_schulz(lower / sqrt(largest), sqrt(shown / largest))
    root = divide_triangular(turned, lower)
    return root.add_(root.mT.clone()).div_(2.0)


@dataclass(frozen=True)
class Projector:
    """The orthogonal projector onto the eigenvectors beyond a cut-off.

    Attributes:
        matrix: P `(n, n)`, float64.
        rank: how many they are.
        bound: no eigenvalue of the matrix is larger.
    """

    matrix: Tensor
    rank: int
    bound: float

    def filled(self, symmetric: Tensor) -> Tensor:
        """A + s(I − P), s as large as any eigenvalue: what was left out does no harm to an inverse.

        Example:
            >>> a = torch.diag(torch.tensor([3.0, 0.0])).double()
            >>> projector(a, low=1.0, high=1.0, bound=3.0).filled(a).diagonal().tolist()
            [3.0, 3.0]
        """
        found = torch.add(symmetric, self.matrix, alpha=-self.bound)
        found.diagonal().add_(self.bound)
        return found


def projector(symmetric: Tensor, *, low: float, high: float, bound: float) -> Projector | None:
    """Return P of a semi-definite matrix `(n, n)` in float64, whose cut-off is between `low` and `high`.

    Eigenvalues above `high` count, those below `low` do not, and none is above `bound`. None where one is
    too close to say, where a cut-off below 1e-6 of the largest has eigenvalues between them, where `low` is
    so small that rounding decides on which side of it one is, and where the sign has not converged.

    Example:
        >>> a = torch.diag(torch.tensor([3.0, 1.0, 0.0])).double()
        >>> found = projector(a, low=0.4, high=0.5, bound=3.0)
        >>> found.matrix.diagonal().tolist(), found.rank
        ([1.0, 1.0, 0.0], 2)
        >>> projector(a, low=0.9, high=1.1, bound=3.0)
    """
    if all_above(symmetric, high):
        n = len(symmetric)
        whole = torch.eye(n, dtype=symmetric.dtype, device=symmetric.device)
        return Projector(whole, n, bound)
    if low < len(symmetric) * torch.finfo(symmetric.dtype).eps * bound:
        return None
    high = max(high, _COARSE * bound)
    sign = _sign_beyond(symmetric, (max(low, _COARSE * bound) + high) / 2.0, bound)
    if sign is None:
        return None
    matrix = sign.add(sign.mT).div_(4.0)
    matrix.diagonal().add_(0.5)
    found = Projector(matrix, round(float(matrix.diagonal().sum())), bound)
    # As many as P has are above, and as many as it has not are below.
    if not all_above(found.filled(symmetric), high):
        return None
    beyond = torch.sub(2.0 * bound * matrix, symmetric)
    return found if all_above(beyond, -low) else None


def _sign_beyond(symmetric: Tensor, cut: float, bound: float) -> Tensor | None:
    """sign(A − cI), of eigenvalues from 0 to the bound, as c; None where its square is not I."""
    sign = symmetric / bound
    sign.diagonal().sub_(cut / bound)
    sign = newton_schulz(sign, NEAREST)
    off = gram(sign)
    off.diagonal().sub_(1.0)
    if not norm(off) <= _SIGN:
        return None
    # One step more: what an eigenvalue of P lacks of 1 is filled up by as much of the largest of A, which
    # is to be nothing beside the smallest that is kept.
    step = off.mul_(-0.5)
    step.diagonal().add_(1.0)
    return sign @ step
