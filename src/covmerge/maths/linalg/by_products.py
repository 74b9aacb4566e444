r"""Functions of symmetric matrices by matrix products and Cholesky factors, without an eigenproblem.

The polar factor of X is the limit of the scaled iteration of Newton and Schulz (Chen and Chow, A Stable
Scaling of Newton–Schulz for Improving the Sign Function Computation of a Hermitian Matrix, Argonne
preprint ANL/MCS-P5059-0114, 2014):

    X ← X (3I − ρ²XᵀX) ρ/2,  ρ² = 3/(1 + l + l²)

Each step maps singular values in [l, 1] to [l′, 1], l′ = ρl(3 − ρ²l²)/2: a small value grows by a factor
of 2.6, and a value near 1 doubles its correct digits. The polar factor of a symmetric matrix is its sign.
From it follow

    G^(−½) = W L⁻¹        G = LLᵀ, W the polar factor of L    (Higham, Functions of Matrices, 2008)
    P = (I + sign(A − cI))/2, the projector beyond a cut-off c (spectral divide and conquer)

The number of steps is fixed by l alone, and nothing waits for the host. No iteration decides a rank.
Cholesky factors in float64 (inertia) prove that no eigenvalue is below a bound, or how many eigenvalues
are on each side of a cut-off. Where they cannot prove it, the functions return None, and the caller
solves the eigenproblem.

On a CPU the eigenproblem is always cheaper; on a device where it takes the time of a hundred products,
the products are (`covmerge.maths.linalg.auto`).
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

# An inverse root starts from a proven lower bound of the singular values: one of these, or the caller's
# floor.
_LEAST = (1e-2, 1e-4)
# The smallest distance of an eigenvalue to a cut-off, in units of the largest eigenvalue, at which its side
# is found.
NEAREST = 1e-7
# The smallest cut, in the same units. A smaller cut-off is found from the projector's complement.
_COARSE = 10.0 * NEAREST
# The largest ‖S² − I‖_F that is accepted of a sign S.
_SIGN = 1e-8
_CONVERGED = 1e-8  # 1 − l, before the last step


def largest_bound(symmetric: Tensor) -> float:
    """Return an upper bound of the magnitudes of a symmetric matrix's eigenvalues.

    Example:
        >>> largest_bound(torch.diag(torch.tensor([3.0, -4.0])))
        4.0
    """
    return min(float(symmetric.abs().sum(0).max()), norm(symmetric))


def newton_schulz(x: Tensor, least: float) -> Tensor:
    """Return the polar factor of a square matrix X whose singular values are in [least, 1].

    Smaller singular values, zeros among them, become any number below 1. None may be above 1: such a value
    would come back with the wrong sign.

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
    """Yield ρ of each step, until l is 1 to rounding."""
    while True:
        rho = sqrt(3.0 / (1.0 + least + least * least))
        yield rho
        if 1.0 - least < _CONVERGED:
            return
        least = min(1.0, 0.5 * rho * least * (3.0 - (rho * least) ** 2))


def inverse_root(symmetric: Tensor, *, floor: float) -> Tensor | None:
    """Return G^(−½) of a symmetric G `(n, n)` in float64; None unless all eigenvalues are above `floor`.

    The error is eps times the condition number of G, which callers check.

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
    """The orthogonal projector onto the eigenvectors whose eigenvalues exceed a cut-off."""

    matrix: Tensor  # P `(n, n)`, float64
    rank: int  # the number of these eigenvectors
    bound: float  # an upper bound of the eigenvalues of the matrix

    def filled(self, symmetric: Tensor) -> Tensor:
        """Return A + s(I − P), s an upper bound of A's eigenvalues: it is invertible outside P's range too.

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

    Eigenvalues above `high` count, those below `low` do not, and none is above `bound`. Return None if an
    eigenvalue is too close to the cut-off, if the cut-off is below 1e-6 of the largest eigenvalue and
    eigenvalues lie between the two, if `low` is so small that rounding decides on which side of it an
    eigenvalue lies, or if the sign has not converged.

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
    # Inertia proves the rank: rank(P) eigenvalues are above `high`, and n − rank(P) are below `low`.
    if not all_above(found.filled(symmetric), high):
        return None
    beyond = torch.sub(2.0 * bound * matrix, symmetric)
    return found if all_above(beyond, -low) else None


def _sign_beyond(symmetric: Tensor, cut: float, bound: float) -> Tensor | None:
    """Return sign(A − cI) for a cut c and eigenvalues in [0, bound]; None if its square is not I."""
    sign = symmetric / bound
    sign.diagonal().sub_(cut / bound)
    sign = newton_schulz(sign, NEAREST)
    off = gram(sign)
    off.diagonal().sub_(1.0)
    if not norm(off) <= _SIGN:
        return None
    # One step more. An eigenvalue of P below 1 by δ would be filled with δ times the largest eigenvalue of
    # A, which has to be negligible beside the smallest eigenvalue that counts.
    step = off.mul_(-0.5)
    step.diagonal().add_(1.0)
    return sign @ step
