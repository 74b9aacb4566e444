"""The rules of all methods for numerical ranks and for equal singular values, written once.

Singular values at or below √max(d_out, d_in) · eps of the largest are rounding of the arithmetic. eps is
the larger of the computation's and of that of the arithmetic that made the file. For stored weights,
singular values below the edge of the rounding do not count either, if all of them together are no more
than rounding. A `rank_rtol` given by the user replaces both rules. Equal singular values are never
separated by a cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from covmerge.base.types import LinearGroup, Rounding
from covmerge.maths.reference.algebra import length, svd


@dataclass(frozen=True)
class Spectrum:
    """U diag(σ) Vᵀ within the numerical rank; `end`: its cut-off; `edge`: the same, if rounding set it."""

    U: Tensor
    S: Tensor
    Vh: Tensor
    end: float
    edge: float

    def first(self, k: int) -> Spectrum:
        """The part of the k largest singular values, and of those that equal the k-th."""
        k = with_equals(self.S, k)
        return Spectrum(self.U[:, :k], self.S[:k], self.Vh[:k], self.end, self.edge)


def tolerance(group: LinearGroup, given: float | None) -> float:
    """The cut-off of the rank for the computation and for the arithmetic that made the file.

    It is relative to the largest singular value.
    """
    if given is not None:
        return given
    eps = [torch.finfo(group.updates[0].dtype).eps, *(error.eps for error in group.rounding)]
    return max(group.shape) ** 0.5 * max(eps)


def roundings(group: LinearGroup, given: float | None) -> tuple[Rounding, ...]:
    """The rounding error of each update, from its stored weights."""
    known = given is None and group.rounding
    return group.rounding if known else (Rounding(),) * len(group.updates)


def of_sum(group: LinearGroup, given: float | None, rtol: float) -> Rounding:
    """The rounding error of Σ w_t Δ_t: of the weights, and of the arithmetic relative to the terms."""
    rtol *= max(1.0, (256 / max(group.shape)) ** 0.5)  # a core is the product of larger matrices
    floors = [0.0 if given is not None else rtol * size_of(d) for d in group.updates]
    each = zip(roundings(group, given), floors, group.weights, strict=True)
    errors = [replace(e, floor=floor).times(w) for e, floor, w in each]
    return of_terms([d.double() for d in group.updates], roundings(group, given), errors)


def of_terms(
    D: Sequence[Tensor], errors: Sequence[Rounding], weighted: Sequence[Rounding]
) -> Rounding:
    """The rounding of Σ w_t Δ_t. Errors that two updates share, as copies do, add up linearly.

    Independent errors would make the updates differ by ‖E_s‖² + ‖E_t‖² at least.
    """
    whole = Rounding.together(weighted)
    energy = 0.0
    for d, e, we in zip(D, errors, weighted, strict=True):
        for b, f, wf in zip(D, errors, weighted, strict=True):
            apart = e.energy + f.energy
            rho = (
                max(0.0, 1 - length(d - b) ** 2 / apart) if apart and d is not b else float(d is b)
            )
            energy += rho * (we.energy * wf.energy) ** 0.5
    more = energy / whole.energy if whole.energy else 1.0
    return replace(
        whole, edge=more**0.5 * whole.edge, energy=more * whole.energy, before=more * whole.before
    )


def size_of(d: Tensor) -> float:
    """σ₁."""
    return float(svd(d.double())[1].max()) if d.numel() else 0.0


def end_of_rank(
    S: Tensor,
    shape: Sequence[int],
    rtol: float,
    rounding: Rounding,
    largest: float | None = None,
) -> float:
    """The cut-off of the rank of a matrix of this shape: only larger singular values count."""
    if not len(S):
        return 0.0
    largest = float(S[0]) if largest is None else largest
    end = max(rtol * largest, rounding.floor)
    if end >= rounding.edge:
        return end
    below = S[S <= rounding.edge]
    r = len(S) - len(below)
    # The share of an error's energy that r directions, which are no error, leave to it.
    share = (1 - r / shape[0]) * (1 - r / shape[1])
    return (
        rounding.edge
        if float((below**2).sum()) <= 1.5 * share * (rounding.energy + rounding.before)
        else end
    )


def leading(
    A: Tensor,
    rtol: float,
    rounding: Rounding | None = None,
    largest: float | None = None,
    shape: Sequence[int] | None = None,
) -> Spectrum:
    """The singular value decomposition within the numerical rank."""
    rounding = Rounding() if rounding is None else rounding
    U, S, Vh = svd(A)
    end = end_of_rank(S, A.shape if shape is None else shape, rtol, rounding, largest)
    r = int((S > end).sum())
    return Spectrum(U[:, :r], S[:r], Vh[:r], end, end if end == rounding.edge else 0.0)


def with_equals(S: Tensor, k: int) -> int:
    """K plus the number of following singular values that equal the k-th; zeros equal none.

    Two are equal if they differ by less than 1e-5 of themselves, and by less than 4 eps of the largest,
    which rounding to float32 may make of equal ones.
    """
    noise = 4 * torch.finfo(torch.float32).eps * float(S[0]) if len(S) else 0.0
    if k == 0 or k >= len(S) or float(S[k - 1]) <= noise:
        return k
    step = min(noise, 1e-5 * float(S[k - 1]))
    while k < len(S) and float(S[k - 1] - S[k]) <= step:
        k += 1
    return k


def far_apart(sizes: Sequence[float]) -> bool:
    """Whether norms, zeros aside, differ by more than 50-fold."""
    changed = [size for size in sizes if size > 0]
    return bool(changed) and max(changed) > 50 * min(changed)


def together(
    blocks: Sequence[Tensor], rtol: float, roundings: Sequence[Rounding] = ()
) -> tuple[Tensor, Tensor]:
    """U and σ of [F_1 … F_n], within the span of the blocks after scaling them to one size."""
    errors = roundings or (Rounding(),) * len(blocks)
    sizes = [length(block) for block in blocks]
    shape = (len(blocks[0]), len(blocks) * blocks[0].shape[1])
    if not far_apart(sizes):
        found = leading(torch.hstack(list(blocks)), rtol, Rounding.together(errors), shape=shape)
        return found.U, found.S
    unit = [(b / s, e.times(1 / s)) for b, s, e in zip(blocks, sizes, errors, strict=True) if s > 0]
    units, off = zip(*unit, strict=True)
    span, _ = together(units, rtol, off)
    found = leading(span.T @ torch.hstack(list(blocks)), 0.0)
    return span @ found.U, found.S


def polar(A: Tensor, rtol: float, errors: Tensor) -> Tensor:
    """A (AᵀA)^{†½}, without directions that errors of the columns may have made."""
    found = leading(A, rtol)
    known = found.S**2 > (found.Vh**2) @ errors**2
    return found.U[:, known] @ found.Vh[known]


def orthogonalized(parts: Sequence[Spectrum], rtol: float) -> tuple[Tensor, Tensor]:
    """The polar factors of [U_1 … U_n] and [V_1 … V_n]ᵀ.

    If rounding ended the rank, a singular vector of σ is off by at least half of the edge over σ.
    """
    errors = torch.cat([0.5 * part.edge / part.S for part in parts])
    left = polar(torch.hstack([part.U for part in parts]), rtol, errors)
    right = polar(torch.hstack([part.Vh.T for part in parts]), rtol, errors)
    return left, right.T


def gram_inverse(D: Tensor, rtol: float, rounding: Rounding) -> Tensor:
    """(DᵀD)†, where eigenvalues at or below `rtol` times the largest, or of D's rounding, count as zero."""
    found = leading(D, rtol**0.5, rounding)
    return found.Vh.T @ torch.diag(1 / found.S**2) @ found.Vh
