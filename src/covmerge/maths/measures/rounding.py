r"""What rounding of stored weights gives to an update.

A weight w that is stored with its last place worth u is off by up to ±u/2, evenly spread and
independent of its neighbours: an error of variance u²/12, so that ‖E‖²_F = Σ u²/12. Of a matrix of such
errors the largest singular value is about the largest row norm plus the largest column norm of the
standard deviations (Bandeira and van Handel, Annals of Probability 2016, Theorem 1.1), which are at
most eps·|w|/√12:

    σ₁(E) ≈ eps/√12 · ( max_i ‖W_i:‖ + max_j ‖W_:j‖ )

A weight is the sum of a base's and of an update, W = W_0 + Δ, and Δ was rounded before. Factors BA in the
dtype of the file are rounded as a product and as they are scaled: two more errors, of variance
(eps δ)²/12 at most in each entry. A row of the error then has the squared norm (eps²/12)(‖w‖² + 2‖δ‖²),
where w = w_0 + δ. With ‖·‖ for the sum of the largest row and column norm

    σ₁(E) ≲ eps/√12 · √( (‖W_0‖ + ‖Δ‖)² + 2‖Δ‖² ),    ‖E‖²_F ≲ Σ u²/12 + eps²/6 ‖Δ‖²_F

The r terms of an entry of BA are summed in float32 at least. Each addition is off by eps/√12 of what is
summed by then, all r by √(r/2) · eps/√12 · |δ|. The largest singular value of these errors is at most
√(r/2) · eps/√12 · 2 σ₁(Δ) ≤ 0.41 √d eps σ₁(Δ), as r ≤ d: less than √d · eps of float32, the tolerance of a
computation in float32. `Rounding.eps` says that this tolerance holds in float64 too.

What is below this edge in an update W_t − W_0 may be the file's rounding and not the expert.

A weight that an update moves by less than u/2 stays where it was, and the update is lost there: ‖E‖² of a
whole update is estimated apart, by `lost_when_stored`.
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
# Looked at together: what is made of them meanwhile stays in the cache, and in no memory plan.
_PART_ELEMENTS = 2**18
_HALVINGS = 40
# How often an update is rounded before it is added to the base: as a product, and as it is scaled.
_BEFORE = 2
_SUMS = torch.finfo(torch.float32).eps  # products of half precision are summed in float32
_LAST_DIGITS = 2**16 - 1
_NEARLY_ALL = 0.99
# Dtypes that files may have been written from in a wider one; the coarsest first.
_ROUNDED = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class _Layout:
    """How a floating number lies in its bits: sign, exponent, digits.

    Attributes:
        bits: integers of its size.
        digits: how many digits are stored.
        exponents: how many there are.
        bias: of the exponent.
    """

    bits: torch.dtype
    digits: int
    exponents: int
    bias: int


_LAYOUTS = {
    torch.float32: _Layout(torch.int32, 23, 2**8, 127),
    torch.float64: _Layout(torch.int64, 52, 2**11, 1023),
}


@dataclass(frozen=True)
class Lost:
    """What an update lost; adds up over tensors.

    Attributes:
        energy: ‖E‖²_F.
        whole: ‖Δ‖²_F of the update that was.
    """

    energy: float = 0.0
    whole: float = 0.0

    def __add__(self, other: Lost) -> Lost:
        return Lost(self.energy + other.energy, self.whole + other.whole)

    @property
    def share(self) -> float:
        """‖E‖ / ‖Δ‖."""
        return sqrt(self.energy / self.whole) if self.whole else 0.0


def rounding_of(
    updates: Sequence[Tensor], stored: Sequence[torch.dtype | None], base: Tensor | None = None
) -> tuple[Rounding, ...]:
    """Return for each update what rounding gave to it.

    Args:
        updates: Δ_t `(d_out, d_in)`.
        stored: the dtype that W_0 + Δ_t was rounded to; None: it was not. Weights of more digits than the
            updates' dtype were rounded to this one as they were read.
        base: W_0 `(d_out, d_in)`; None: Δ_t itself was rounded.

    An entry that is 0 has no error of its own: it is stored as the base's. So the error of an update
    that changed a share of the entries is that much shorter.

    Example:
        >>> w = torch.ones(100, 100)
        >>> found = rounding_of([w, 0 * w, w], [torch.bfloat16] * 2 + [None])
        >>> [round(error.edge, 3) for error in found], round(found[0].energy, 4)
        ([0.045, 0.0, 0.0], 0.0509)
    """
    width = 0.0 if base is None else _width(base)
    return tuple(
        Rounding() if dtype is None else _rounding(u, _coarser(dtype, u.dtype), base, width)
        for u, dtype in zip(updates, stored, strict=True)
    )


def holds(dtype: torch.dtype, weights: Tensor) -> bool:
    """Whether all weights are numbers of a dtype.

    Example:
        >>> holds(torch.bfloat16, torch.tensor([[0.5, 1.0]])), holds(torch.bfloat16, torch.tensor([[0.1]]))
        (True, False)
    """
    return all(
        bool((part.to(dtype).to(part.dtype) == part).all())
        for part in (weights[rows] for rows in _parts(weights))
    )


def rounded_to(weights: Tensor) -> torch.dtype:
    """The dtype that stored weights `(d_out, d_in)` were rounded to: the coarsest that holds them all.

    A file in float32 may have been written from weights in bfloat16, and one in float64 from float32.

    Example:
        >>> rounded_to(torch.tensor([[0.1]]).bfloat16().double()), rounded_to(torch.tensor([[0.1]]))
        (torch.bfloat16, torch.float32)
    """
    finer = (dtype for dtype in _ROUNDED if dtype.itemsize < weights.dtype.itemsize)
    return next((dtype for dtype in finer if holds(dtype, weights)), weights.dtype)


def has_few_digits(update: Tensor) -> bool:
    """Whether an update in float64 was made of numbers of a narrower dtype.

    Of float32 numbers and of their differences the last 16 of 52 digits are 0, unless one number is 2¹³
    times shorter than the difference. Of numbers in float64 that is one entry in 2¹⁶.

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


def _coarser(one: torch.dtype, other: torch.dtype) -> torch.dtype:
    return max(one, other, key=lambda dtype: torch.finfo(dtype).eps)


def _rounding(update: Tensor, dtype: torch.dtype, base: Tensor | None, of_base: float) -> Rounding:
    changed = float(update.count_nonzero()) / max(1, update.numel())
    eps, before, width = torch.finfo(dtype).eps, 0 if base is None else _BEFORE, _width(update)
    edge = eps * sqrt(changed / 12.0) * hypot(of_base + width, sqrt(before) * width)
    earlier = before * eps**2 / 12.0 * square_norm(update)
    return Rounding(edge, _energy(base, update, dtype), earlier, min(eps, _SUMS))


def lost_when_stored(update: Tensor, base: Tensor, dtype: torch.dtype) -> Lost:
    """Estimate what an update lost when W_0 + Δ was rounded to a dtype that W_0 has too.

    A weight differs from the base's if it was moved by more than u/2. If moves are normal, all of one
    deviation s, so many differ as Σ erfc(u / 2√2 s), which gives s; and each lost u²/12, or all it had, s².
    Rows without a change were not trained, and lost nothing. The update that was is what is left, or s² of
    every weight where that is more. Where few weights were trained, or each in proportion to itself, more
    was lost than this says.

    Args:
        update: Δ of the stored weights, of any shape, or some of its rows; float32 or float64.
        base: W_0 of the same shape.
        dtype: of the stored weights.

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
        # s tells little where nearly all were moved; then what is left is what was.
        whole=max(left, sum(count * min(u * u, most) for u, count in counts.items())),
    )


def _deviation(last: Mapping[float, int], moved: int) -> float:
    """Return s of normal moves, so many of which are longer than u/2; of counts by u."""
    if moved == sum(last.values()):
        return inf
    if not moved:
        return 0.0
    # None is longer than 32 s, and hardly one is shorter than s/128.
    low, high = min(last) / 64.0, 64.0 * max(last)
    for _ in range(_HALVINGS):
        middle = sqrt(low * high)
        expected = sum(c * erfc(u / (2.0 * sqrt(2.0) * middle)) for u, c in last.items())
        low, high = (middle, high) if expected < moved else (low, middle)
    return sqrt(low * high)


def _energy(base: Tensor | None, update: Tensor, dtype: torch.dtype) -> float:
    """Σ u²/12 over the entries that changed, u what the last place of a stored weight is worth."""
    last = _by_last_place(update, base, dtype)
    return sum(went * u * u for u, (_, went) in last.items() if went) / 12.0


def _by_last_place(
    update: Tensor, base: Tensor | None, dtype: torch.dtype, *, whole: bool = True
) -> dict[float, tuple[int, int]]:
    """How many weights stayed and how many changed, by u; 0 is stored as it is, and not among them.

    Args:
        update: Δ `(d_out, d_in)`.
        base: W_0 of the same shape; None: Δ itself was rounded.
        dtype: of the stored weights.
        whole: count rows without a change too.
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
    """Some rows at a time."""
    rows = max(1, _PART_ELEMENTS // max(1, matrix.shape[1]))
    for start in range(0, len(matrix), rows):
        yield slice(start, start + rows)


def _width(matrix: Tensor) -> float:
    """max_i ‖M_i:‖ + max_j ‖M_:j‖: a norm, so that of W_0 + Δ it is at most the sum of both."""
    if not matrix.numel():
        return 0.0
    rows, columns = (cast("Tensor", _linalg.vector_norm(matrix, dim=axis)).max() for axis in (1, 0))
    return float(rows + columns)
