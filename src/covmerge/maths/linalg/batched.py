r"""Symmetric systems of one size along a leading axis; one that fails shows, and stops no other.

What `cholesky`, `condition` and `pinv` do of one system, in the same steps, for A `(n, m, m)`. A number for
each system stays a tensor `(n,)` on their device: each that is read on the host waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import nan, sqrt
from typing import Any, cast

import torch
from torch import Tensor

from covmerge.base.types import Rounding
from covmerge.maths.linalg.condition import STEPS
from covmerge.maths.linalg.lapack import eigh, eigvalsh
from covmerge.maths.linalg.pinv import LANCZOS_STEPS, start_vector
from covmerge.maths.linalg.spectral import numerical_rank

_linalg: Any = torch.linalg


def per_member(values: Tensor | Sequence[float], like: Tensor, axes: int = 2) -> Tensor:
    """One number for each member, of the dtype and on the device of `like`, as `(n, 1, …)`.

    Example:
        >>> per_member([1.0, 2.0], torch.zeros(1)).shape
        torch.Size([2, 1, 1])
    """
    numbers = torch.as_tensor(values, dtype=like.dtype, device=like.device)
    return numbers.view(-1, *[1] * axes)


def numbers(values: Tensor) -> list[float]:
    """Read one number for each member from the device, all at once."""
    return [float(value) for value in values.cpu()]


def flags(values: Tensor) -> list[bool]:
    """Read one truth value for each member from the device, all at once."""
    return [bool(value) for value in values.cpu()]


def all_finite(members: Tensor) -> Tensor:
    """Whether no value of a member `(n, …)` is NaN or Inf, `(n,)`.

    Example:
        >>> all_finite(torch.tensor([[1.0, 2.0], [1.0, float("nan")]])).tolist()
        [True, False]
    """
    return torch.isfinite(members).flatten(1).all(1)


def norms(members: Tensor) -> Tensor:
    """Frobenius norms `(n,)` in float64 of tensors `(n, …)`; far from 1, squares may leave the dtype.

    Example:
        >>> norms(torch.tensor([[3.0, 4.0], [0.0, 1.0]])).tolist()
        [5.0, 1.0]
    """
    return cast("Tensor", _linalg.vector_norm(members.flatten(1), dim=1, dtype=torch.float64))


def factorize_all(systems: Tensor, shifts: Tensor) -> tuple[Tensor, Tensor]:
    """Factorise A + s·I = L Lᵀ for A `(n, m, m)` and s `(n,)`, with no jitter.

    Returns:
        L `(n, m, m)`, and whether there is one `(n,)`; where there is none L is arbitrary.

    Example:
        >>> systems = torch.stack([torch.eye(2), -torch.eye(2)])
        >>> factorize_all(systems, torch.zeros(2))[1].tolist()
        [True, False]
    """
    shifted = systems.clone()
    shifted.diagonal(dim1=-2, dim2=-1).add_(shifts.to(systems).unsqueeze(-1))
    factors, failed = cast("tuple[Tensor, Tensor]", _linalg.cholesky_ex(shifted))
    return factors, failed == 0


def solve_right_all(factors: Tensor, rows: Tensor) -> Tensor:
    """Return X with X (L Lᵀ) = rows, for rows `(n, k, m)`.

    Example:
        >>> solve_right_all(2.0 * torch.eye(2).expand(3, 2, 2), torch.ones(3, 1, 2))[0].tolist()
        [[0.25, 0.25]]
    """
    return torch.cholesky_solve(rows.mT, factors).mT


def log_dets(systems: Tensor) -> Tensor:
    """Return log det A `(n,)`, float64, of systems as `covmerge.maths.linalg.cholesky.log_det` takes one.

    NaN where one has no Cholesky factor in float64 either.

    Example:
        >>> log_dets(torch.stack([torch.eye(2), -torch.eye(2)])).tolist()
        [0.0, nan]
    """
    found = systems.new_full((len(systems),), nan, dtype=torch.float64)
    for dtype in dict.fromkeys((systems.dtype, torch.float64)):
        left = [member for member, own in enumerate(flags(found.isnan())) if own]
        if left:
            factors, solvable = factorize_all(systems[left].to(dtype), found.new_zeros(len(left)))
            logs = factors.diagonal(dim1=1, dim2=2).to(torch.float64).log().sum(1)
            found[left] = torch.where(solvable, 2.0 * logs, nan)
    return found


def kept_eigenpairs_all(
    systems: Tensor, *, rtols: Sequence[float], roundings: Sequence[Rounding], shape: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Eigenvalues `(n, m)`, ascending, vectors `(n, m, m)`, and which count; see `pinv.kept_eigenpairs`.

    Args:
        systems: finite, float64.
        rtols: where the spectrum of each ends,
        roundings: and this of each.
        shape: of D, where they are DᵀD.

    Example:
        >>> systems = torch.diag_embed(torch.tensor([[2.0, 0.0], [2.0, 1.0]]).double())
        >>> exact = [Rounding()] * 2
        >>> kept_eigenpairs_all(systems, rtols=[1e-6] * 2, roundings=exact, shape=(2, 2))[2].tolist()
        [[False, True], [True, True]]
    """
    values, vectors = eigh(systems)
    each = zip(values.cpu(), rtols, roundings, strict=True)
    ends = [
        numerical_rank(
            own.clamp_min(0.0).sqrt().flip(0), shape, rtol=sqrt(rtol), rounding=rounding
        )[1]
        for own, rtol, rounding in each
    ]
    floors = torch.tensor([end**2 for end in ends], dtype=values.dtype, device=values.device)
    return values, vectors, values > floors.unsqueeze(1)


def largest_eigenvalues(symmetric: Tensor) -> Tensor:
    """Largest eigenvalues `(n,)`, float64, from below; see `covmerge.maths.linalg.pinv.largest_eigenvalue`.

    Infinite where a matrix holds what is not finite.

    Example:
        >>> largest_eigenvalues(torch.diag_embed(torch.tensor([[3.0, 1.0], [2.0, 5.0]]))).round().tolist()
        [3.0, 5.0]
    """
    n, m = symmetric.shape[:2]
    vector = start_vector(m).to(symmetric).expand(n, m)
    previous, beta = torch.zeros_like(vector), symmetric.new_zeros(n)
    going = torch.ones(n, dtype=torch.bool, device=symmetric.device)
    smallest, nothing = beta, beta
    diagonal: list[Tensor] = []
    beside: list[Tensor] = []
    for _ in range(min(m, LANCZOS_STEPS)):
        image = _times(symmetric, vector) - beta.unsqueeze(1) * previous
        # Zero once a member's vectors span all that it does to the first: nothing is larger for it.
        diagonal.append(torch.where(going, (image * vector).sum(1), nothing))
        image = image - diagonal[-1].unsqueeze(1) * vector
        beta = cast("Tensor", _linalg.vector_norm(image, dim=1))
        if len(diagonal) == 1:
            smallest = torch.finfo(symmetric.dtype).eps * diagonal[0].abs()
        going = going & (beta > smallest)
        beta = torch.where(going, beta, nothing)
        beside.append(beta)
        previous, vector = vector, image / torch.where(going, beta, 1.0).unsqueeze(1)
    tridiagonal = torch.diag_embed(torch.stack(diagonal, 1).double())
    off = torch.stack(beside, 1).double()[:, :-1]
    tridiagonal += torch.diag_embed(off, 1) + torch.diag_embed(off, -1)
    finite = all_finite(tridiagonal)
    # An eigenproblem that fails would take the others with it.
    values = eigvalsh(torch.where(finite.view(-1, 1, 1), tridiagonal, 0.0))[:, -1]
    return torch.where(finite, values, torch.inf)


def condition_numbers(
    systems: Tensor, factors: Tensor, *, ridges: Tensor, enough: float = 1.0
) -> Tensor:
    """λ_max/λ_min `(n,)` of A + ridge·I, float64; see `covmerge.maths.linalg.condition.condition_number`.

    Example:
        >>> systems = torch.diag(torch.tensor([3.0, 1.0, 0.0])).expand(2, 3, 3)
        >>> ridges = torch.full((2,), 0.1)
        >>> factors, _ = factorize_all(systems, ridges)
        >>> condition_numbers(systems, factors, ridges=ridges).round().tolist()
        [31.0, 31.0]
    """
    ridges = ridges.to(systems.device, torch.float64)
    largest = largest_eigenvalues(systems) + ridges
    draw = torch.Generator().manual_seed(0)
    vector = torch.randn(1, systems.shape[-1], generator=draw, dtype=torch.float64)
    vector = vector.to(factors).expand(len(systems), 1, -1)
    growth = largest
    for _ in range(STEPS):
        vector = vector / norms(vector).to(vector).view(-1, 1, 1)
        vector = solve_right_all(factors, vector)
        growth = norms(vector)
    return torch.where(largest <= enough * ridges, largest / ridges, largest * growth)


def _times(matrices: Tensor, vectors: Tensor) -> Tensor:
    return (matrices @ vectors.unsqueeze(-1)).squeeze(-1)
