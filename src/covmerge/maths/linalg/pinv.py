"""X = B A† for a symmetric positive semi-definite A, with a given cut-off of eigenvalues."""

from __future__ import annotations

from dataclasses import replace
from math import inf, sqrt

import torch
from torch import Tensor

from covmerge.maths.linalg.auto import cut_off_choice
from covmerge.maths.linalg.by_products import Projector, largest_bound, projector
from covmerge.maths.linalg.cholesky import all_above, factorize_above, lower_factor
from covmerge.maths.linalg.lapack import eigh, norm
from covmerge.maths.linalg.spectral import RankRule, energy_of_rounding

# Factor beyond the cut-off, so that neither the estimate of the largest eigenvalue nor rounding decides
# whether the smallest eigenvalue is cut off.
_MARGIN = 1.1
# The least λ_min/λ_max for which a float32 solution agrees with float64's to about 1e-5
# (tests/linalg/test_routes.py).
_FLOAT32_RATIO = 1e-3
LANCZOS_STEPS = 16
_POWER_STEPS = 8
# Where the result depends on the largest eigenvalue: the number of steps, and factors by which the
# eigenvalue may exceed the estimate; they are tried in order.
_MORE_STEPS, _ABOVE = 64, (1e-8, 1e-4, 1e-1)


def solve_full_rank(system: Tensor, rows: Tensor, rule: RankRule) -> Tensor | None:
    """Return rows · A⁻¹ by Cholesky if no eigenvalue of A `(n, n)` is cut off; None if one may be.

    The rule is that of `pinv_right`. In float32 the result is also None if A is too badly conditioned;
    callers then use float64.

    Example:
        >>> solve_full_rank(torch.diag(torch.tensor([2.0, 1.0])), torch.ones(1, 2), RankRule(1e-6))
        tensor([[0.5000, 1.0000]])
        >>> solve_full_rank(torch.diag(torch.tensor([2.0, 0.0])), torch.ones(1, 2), RankRule(1e-6))
    """
    largest = largest_eigenvalue(system)
    floor = rule.rounding.edge**2
    least = least_of_full_rank(len(system), system.dtype, largest, rtol=rule.rtol, floor=floor)
    factor = factorize_above(system, floor=least) if largest > 0.0 else None
    return None if factor is None else factor.solve_right(rows)


def least_of_full_rank(
    n: int, dtype: torch.dtype, largest: float, *, rtol: float, floor: float
) -> float:
    """Return the bound that all eigenvalues of A `(n, n)` must exceed for `solve_full_rank`."""
    ratio = _MARGIN * rtol
    if dtype != torch.float64:
        ratio = max(ratio, _FLOAT32_RATIO)
    # At least the rounding of a factorisation, or a zero eigenvalue might pass the test.
    return max(max(ratio, n * torch.finfo(dtype).eps) * largest, _MARGIN * floor)


def pinv_right(system: Tensor, rows: Tensor, rule: RankRule) -> tuple[Tensor, int]:
    """Return rows · A† for a symmetric A `(n, n)` and rows `(m, n)`, and the rank that was kept.

    Eigenvalues at or below the rule's `rtol` times the largest count as zero. So do those of a Gram matrix
    A = DᵀD, D of the rule's shape, that are no larger than the rounding of D makes them. The eigenproblem
    is solved in float64 for any input, because the cut-off decides the result.

    Example:
        >>> x, rank = pinv_right(torch.diag(torch.tensor([2.0, 0.0])), torch.ones(1, 2), RankRule(1e-6))
        >>> x.tolist(), rank
        ([[0.5, 0.0]], 1)
    """
    values, vectors = kept_eigenpairs(system, rule)
    coordinates = rows.to(torch.float64) @ vectors
    return ((coordinates / values) @ vectors.mT).to(rows.dtype), len(values)


def cut_off_right(system: Tensor, rows: Tensor, rule: RankRule) -> tuple[Tensor, int, str]:
    """Return the result of `pinv_right` by the device's cheaper route, and the name of the route.

    The route is `projector64`, or `eigen64` if the cut-off is too close to an eigenvalue for a projector.
    """
    if cut_off_choice(len(system), len(rows), system.device.type).taken == "projector64":
        quick = pinv_by_projector(system, rows, rule)
        if quick is not None:
            return *quick, "projector64"
    return *pinv_right(system, rows, rule), "eigen64"


def pinv_by_projector(system: Tensor, rows: Tensor, rule: RankRule) -> tuple[Tensor, int] | None:
    """Return the result of `pinv_right` by products and Cholesky factors; None if they cannot decide.

    A† = P (A + s(I − P))⁻¹, P projecting onto the kept eigenvectors, s a bound of the largest eigenvalue.
    """
    exact = system.to(torch.float64)
    projection = kept_projector(exact, rule)
    lower = None if projection is None else lower_factor(projection.filled(exact))
    if projection is None or lower is None:
        return None
    within = rows.to(torch.float64) @ projection.matrix
    return torch.cholesky_solve(within.mT, lower).mT.to(rows.dtype), projection.rank


def kept_projector(system: Tensor, rule: RankRule) -> Projector | None:
    """Return P onto the eigenvectors that `kept_eigenpairs` keeps; None if products cannot decide."""
    if not 0.0 < largest_bound(system) < inf:
        return None
    least = largest_eigenvalue(system, _MORE_STEPS)
    above = next((off for off in _ABOVE if all_above(-system, -least * (1.0 + off))), None)
    if above is None:
        return None
    most = least * (1.0 + above)
    floor, noise = rule.rounding.floor**2, rule.rounding.edge**2
    low, high = max(rule.rtol * least, floor) * (1.0 - _ABOVE[0]), max(rule.rtol * most, floor)
    if high >= least:
        return None
    if high < noise < least:
        found = projector(system, low=noise * (1.0 - _ABOVE[0]), high=noise, bound=most)
        if found is None:
            return None
        energy = float(system.diagonal().sum()) - float((system * found.matrix).sum())
        if energy_of_rounding(energy, found.rank, rule.shape or system.shape, rule.rounding):
            return found
    elif low < noise:
        return None  # it is not known which of the two cut-offs ends the rank
    return projector(system, low=low, high=high, bound=most)


def kept_eigenpairs(system: Tensor, rule: RankRule) -> tuple[Tensor, Tensor]:
    """Return the eigenvalues of A that count in `pinv_right`, ascending, and their vectors `(n, _)`.

    Example:
        >>> values, vectors = kept_eigenpairs(torch.diag(torch.tensor([2.0, 0.0, 1.0])), RankRule(1e-6))
        >>> values.tolist(), vectors.shape
        ([1.0, 2.0], torch.Size([3, 2]))
    """
    values, vectors = eigh(system.to(torch.float64))
    sigma = values.clamp_min(0.0).sqrt().flip(0)
    _, end = replace(rule, rtol=sqrt(rule.rtol)).rank(sigma, system.shape)
    above = values > end**2
    return values[above], vectors[:, above]


def largest_eigenvalue(symmetric: Tensor, steps: int = LANCZOS_STEPS) -> float:
    """Return a lower bound of the largest eigenvalue of a symmetric matrix `(n, n)`, to a few per cent.

    Lanczos' iteration starts from a fixed random vector and takes one product with a vector per step.

    Example:
        >>> round(largest_eigenvalue(torch.diag(torch.tensor([3.0, 1.0, 0.0]))), 4)
        3.0
    """
    n = len(symmetric)
    vector: Tensor = start_vector(n).to(symmetric.device, symmetric.dtype)
    previous, beta = torch.zeros_like(vector), 0.0
    diagonal: list[float] = []
    beside: list[float] = []
    for _ in range(min(n, steps)):
        image = torch.mv(symmetric, vector).sub_(previous, alpha=beta)
        diagonal.append(float(torch.dot(image, vector)))
        image.sub_(vector, alpha=diagonal[-1])
        beta = norm(image)
        if beta <= torch.finfo(symmetric.dtype).eps * abs(diagonal[0]):
            break  # the vectors so far span an invariant subspace
        beside.append(beta)
        previous, vector = vector, image / beta
    off = torch.tensor(beside[: len(diagonal) - 1], dtype=torch.float64)
    tridiagonal = torch.diag(torch.tensor(diagonal, dtype=torch.float64))
    tridiagonal += torch.diag(off, 1) + torch.diag(off, -1)
    return float(eigh(tridiagonal)[0][-1])


def largest_singular_values(matrices: Tensor) -> Tensor:
    """Return lower bounds of σ₁ of matrices `(…, m, n)` as `(…)`, in their dtype, to about a tenth.

    They come from power iteration from a fixed random vector. Rounding errors are proportional to σ₁.

    Example:
        >>> largest_singular_values(torch.diag(torch.tensor([3.0, 1.0, 0.0])))
        tensor(3.)
    """
    vector = start_vector(matrices.shape[-1]).to(matrices.device, matrices.dtype).unsqueeze(1)
    least = torch.finfo(matrices.dtype).tiny
    image = matrices @ vector
    for _ in range(_POWER_STEPS):
        vector = matrices.mT @ (image / _lengths(image).clamp_min(least))
        image = matrices @ (vector / _lengths(vector).clamp_min(least))
    return _lengths(image)[..., 0, 0]


def _lengths(columns: Tensor) -> Tensor:
    """Return the norms of columns without reading values, for which the host would have to wait."""
    return columns.square().sum(-2, keepdim=True).sqrt()


def start_vector(n: int) -> Tensor:
    """Return the fixed start vector `(n,)` of Lanczos' iteration, float64, of norm 1."""
    start = torch.randn(n, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return start / norm(start)
