r"""The error that rounding of stored weights adds to an update.

A weight w whose last place is worth u has an error of up to ±u/2, evenly distributed and independent of
its neighbours. The error has variance u²/12, so ‖E‖²_F = Σ u²/12. The largest singular value of a matrix
of such errors is about the largest row norm plus the largest column norm of the standard deviations
(Bandeira and van Handel, Annals of Probability 2016, Theorem 1.1), which are at most eps·|w|/√12:

    σ₁(E) ≈ eps/√12 · ( max_i ‖W_i:‖ + max_j ‖W_:j‖ )

A weight is the sum of the base's and an update, W = W_0 + Δ, and Δ itself was rounded before. Factors BA
in the file's dtype are rounded when they are multiplied and when they are scaled: two more errors, each of
variance at most (eps δ)²/12 per entry. A row of the error then has the squared norm
(eps²/12)(‖w‖² + 2‖δ‖²), where w = w_0 + δ. With ‖·‖ for the sum of the largest row and column norm

    σ₁(E) ≲ eps/√12 · √( (‖W_0‖ + ‖Δ‖)² + 2‖Δ‖² ),    ‖E‖²_F ≲ Σ u²/12 + eps²/6 ‖Δ‖²_F

The r terms of an entry of BA are summed in float32 at least. Each addition has an error of eps/√12 of the
sum so far, all r together √(r/2) · eps/√12 · |δ|. The largest singular value of these errors is at most
√(r/2) · eps/√12 · 2 σ₁(Δ) ≤ 0.41 √d eps σ₁(Δ), as r ≤ d. That is less than √d · eps of float32, the
tolerance of a computation in float32. `Rounding.eps` says that this tolerance holds in float64 too.

Below this edge, the content of an update W_t − W_0 may be the file's rounding and not the expert.

A weight that an update moves by less than u/2 stays as it was, and the update is lost there.
`lost_when_stored` estimates the ‖E‖² of a whole update separately.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import erfc, hypot, inf, sqrt
from typing import Any, cast

import torch
from torch import Tensor

from covmerge.base.types import Rounding
from covmerge.maths.linalg.lapack import square_norm
from covmerge.maths.measures.sums import numbers

_linalg: Any = torch.linalg
# Elements that are read at once: temporaries stay in the cache, and memory plans need not count them.
_PART_ELEMENTS = 2**18
_HALVINGS = 40
# How often an update is rounded before it is added to the base: when multiplied and when scaled.
_BEFORE = 2
_SUMS = torch.finfo(torch.float32).eps  # eps of sums: half-precision products are summed in float32
_LAST_DIGITS = 2**16 - 1
_NEARLY_ALL = 0.99
# Dtypes, coarsest first, to which weights may have been rounded before they were stored in a wider one.
_ROUNDED = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class _Layout:
    """The bit layout of a floating-point number: sign, exponent, digits."""

    bits: torch.dtype  # the integer dtype of the same size
    digits: int  # the number of stored digits
    exponents: int  # the number of possible exponents
    bias: int  # the exponent's bias


_LAYOUTS = {
    torch.float32: _Layout(torch.int32, 23, 2**8, 127),
    torch.float64: _Layout(torch.int64, 52, 2**11, 1023),
}


@dataclass(frozen=True)
class Lost:
    """The part of an update that rounding lost. It adds up over tensors."""

    energy: float = 0.0  # ‖E‖²_F of the loss
    whole: float = 0.0  # ‖Δ‖²_F of the update before rounding

    def __add__(self, other: Lost) -> Lost:
        return Lost(self.energy + other.energy, self.whole + other.whole)

    @property
    def share(self) -> float:
        """‖E‖ / ‖Δ‖."""
        return sqrt(self.energy / self.whole) if self.whole else 0.0


def rounding_of(
    updates: Sequence[Tensor], stored: Sequence[torch.dtype | None], base: Tensor | None = None
) -> tuple[Rounding, ...]:
    """Return the rounding error in each update.

    Args:
        updates: Δ_t `(d_out, d_in)`.
        stored: the dtype that W_0 + Δ_t was rounded to; None: it was not rounded. Weights with more digits
            than the updates' dtype were rounded to the latter when read.
        base: W_0 `(d_out, d_in)`; None: Δ_t itself was rounded.

    An entry that is 0 has no error of its own, because it is stored as the base's. The error of an update
    that changed only a share of the entries is smaller accordingly.

    Example:
        >>> w = torch.ones(100, 100)
        >>> found = rounding_of([w, 0 * w, w], [torch.bfloat16] * 2 + [None])
        >>> [round(error.edge, 3) for error in found], round(found[0].energy, 4)
        ([0.045, 0.0, 0.0], 0.0509)
    """
    width = 0.0 if base is None else _width(base)
    return tuple(
        Rounding() if dtype is None else _rounding(update, dtype, base, width)
        for update, dtype in zip(updates, stored, strict=True)
    )


def holds(dtype: torch.dtype, weights: Tensor) -> bool:
    """Return whether a dtype represents all weights exactly.

    Example:
        >>> holds(torch.bfloat16, torch.tensor([[0.5, 1.0]])), holds(torch.bfloat16, torch.tensor([[0.1]]))
        (True, False)
    """
    return all(
        bool((part.to(dtype).to(part.dtype) == part).all())
        for part in (weights[rows] for rows in _parts(weights))
    )


def rounded_to(weights: Tensor) -> torch.dtype:
    """Return the dtype that weights `(d_out, d_in)` were rounded to: the coarsest that represents them.

    A float32 file may hold weights that were bfloat16 before, and a float64 file float32 weights.

    Example:
        >>> rounded_to(torch.tensor([[0.1]]).bfloat16().double()), rounded_to(torch.tensor([[0.1]]))
        (torch.bfloat16, torch.float32)
    """
    finer = (dtype for dtype in _ROUNDED if dtype.itemsize < weights.dtype.itemsize)
    return next((dtype for dtype in finer if holds(dtype, weights)), weights.dtype)


def has_few_digits(update: Tensor) -> bool:
    """Return whether an update in float64 was made of numbers of a narrower dtype.

    The last 16 of 52 digits are 0 for float32 numbers and their differences, unless one number is 2¹³
    times smaller than the difference. For float64 numbers this holds for one entry in 2¹⁶.

    Example:
        >>> a, b = (torch.randn(9, 9, generator=torch.Generator().manual_seed(s)).double() for s in (0, 1))
        >>> has_few_digits(a - b), has_few_digits(a / b)
        (True, False)
    """
    counts = [
        int((part.contiguous().view(torch.int64).bitwise_and_(_LAST_DIGITS) == 0).sum())
        for part in (update[rows].clone() for rows in _parts(update))
    ]
    return sum(counts) >= _NEARLY_ALL * update.numel()


def _rounding(update: Tensor, stored: torch.dtype, base: Tensor | None, of_base: float) -> Rounding:
    dtype = max(stored, update.dtype, key=lambda each: torch.finfo(each).eps)
    changed = float(update.count_nonzero()) / max(1, update.numel())
    eps, before, width = torch.finfo(dtype).eps, 0 if base is None else _BEFORE, _width(update)
    edge = eps * sqrt(changed / 12.0) * hypot(of_base + width, sqrt(before) * width)
    earlier = before * eps**2 / 12.0 * square_norm(update)
    last = _by_last_place(update, base, dtype)
    energy = sum(went * u * u for u, (_, went) in last.items() if went) / 12.0
    return Rounding(edge, energy, earlier, min(eps, _SUMS))


def lost_when_stored(update: Tensor, base: Tensor, dtype: torch.dtype) -> Lost:
    """Estimate what an update lost when W_0 + Δ was rounded to the base's dtype.

    A weight differs from the base's if it was moved by more than u/2. If moves are normal with one
    standard deviation s, the expected number of changed weights is Σ erfc(u / 2√2 s), which gives s. Each
    weight then lost u²/12, or s² where that is less. Rows without a change were not trained, and lost
    nothing. The update before rounding is the stored one, or has s² per weight if that is more. The loss
    is underestimated if few weights were trained, or if each moved in proportion to itself.

    Δ and W_0 are of any shape, or some of their rows, in float32 or float64.

    Example:
        >>> w, d = (torch.randn(200, 200, generator=torch.Generator().manual_seed(s)) for s in (0, 1))
        >>> base, d = w.bfloat16().float(), 1e-3 * d
        >>> stored = (base + d).bfloat16().float() - base
        >>> found = lost_when_stored(stored, base, torch.bfloat16)
        >>> round(found.share, 2), round(float((stored - d).norm() / d.norm()), 2)
        (0.87, 0.8)
    """
    if not update.numel():
        return Lost()
    whole = update.dim() < 2
    flat = update.reshape(1 if whole else len(update), -1)
    last = _by_last_place(flat, base.reshape(flat.shape), dtype, whole=whole)
    counts = {u: stayed + went for u, (stayed, went) in last.items()}
    most = _deviation(counts, sum(went for _, went in last.values())) ** 2
    left = float(_linalg.vector_norm(flat, dtype=torch.float64)) ** 2
    return Lost(
        energy=sum(count * min(u * u / 12.0, most) for u, count in counts.items()),
        # s is unreliable if nearly all weights moved; then the stored update is used.
        whole=max(left, sum(count * min(u * u, most) for u, count in counts.items())),
    )


def _deviation(last: Mapping[float, int], moved: int) -> float:
    """Return s for normal moves of which `moved` exceed u/2; `last` has the number of weights by u."""
    if moved == sum(last.values()):
        return inf
    if not moved:
        return 0.0
    # s is searched between least u / 64 and 64 times the largest u.
    low, high = min(last) / 64.0, 64.0 * max(last)
    for _ in range(_HALVINGS):
        middle = sqrt(low * high)
        expected = sum(c * erfc(u / (2.0 * sqrt(2.0) * middle)) for u, c in last.items())
        low, high = (middle, high) if expected < moved else (low, middle)
    return sqrt(low * high)


def _by_last_place(
    update: Tensor, base: Tensor | None, dtype: torch.dtype, *, whole: bool = True
) -> dict[float, tuple[int, int]]:
    """Return how many weights stayed and how many changed, by u, the worth of a weight's last place.

    Zeros, which are exact, are left out. Without a base, Δ `(d_out, d_in)` itself was rounded. `whole`:
    rows without a change count too.
    """
    layout = _LAYOUTS[update.dtype]
    size = 2 * layout.exponents
    counts = torch.zeros(size, dtype=torch.int64, device=update.device)
    for rows in _parts(update):
        part = update[rows]
        changed = part != 0
        weights = part.clone() if base is None else base[rows].to(part.dtype) + part
        if not whole and not (trained := changed.any(1)).all():
            changed, weights = changed[trained], weights[trained]
        exponents = weights.view(layout.bits).bitwise_right_shift_(layout.digits)
        codes = exponents.bitwise_and_(layout.exponents - 1).mul_(2).add_(changed)
        counts += torch.bincount(codes.flatten(), minlength=size)
    limits, found = torch.finfo(dtype), dict[float, tuple[int, int]]()
    each: list[list[int]] = numbers(counts.reshape(-1, 2))
    for exponent, (stayed, went) in enumerate(each[1:], start=1):
        if stayed + went:
            u = limits.eps * max(2.0 ** min(exponent - layout.bias, layout.bias), limits.tiny)
            known = found.get(u, (0, 0))
            found[u] = known[0] + stayed, known[1] + went
    return found


def _parts(matrix: Tensor) -> Iterator[slice]:
    """Yield slices of rows, each of about `_PART_ELEMENTS` elements."""
    rows = max(1, _PART_ELEMENTS // max(1, matrix.shape[1]))
    for start in range(0, len(matrix), rows):
        yield slice(start, start + rows)


def _width(matrix: Tensor) -> float:
    """Return max_i ‖M_i:‖ + max_j ‖M_:j‖. It is a norm: that of W_0 + Δ is at most the sum of both."""
    if not matrix.numel():
        return 0.0
    rows, columns = (cast("Tensor", _linalg.vector_norm(matrix, dim=axis)).max() for axis in (1, 0))
    return float(rows + columns)
