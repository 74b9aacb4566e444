r"""What rounding of stored weights gives to an update.

A weight w that is stored with its last place worth u is off by up to ±u/2, evenly spread and
independent of its neighbours: an error of variance u²/12, so that ‖E‖²_F = Σ u²/12. Of a matrix of such
errors the largest singular value is about the largest row norm plus the largest column norm of the
standard deviations (Bandeira and van Handel, Annals of Probability 2016, Theorem 1.1), which are at
most eps·|w|/√12:

    σ₁(E) ≈ eps/√12 · ( max_i ‖W_i:‖ + max_j ‖W_:j‖ )

What is below this edge in an update W_t − W_0 may be the file's rounding and not the expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import Any, cast

import torch
from torch import Tensor

from covmerge.types import Rounding

_linalg: Any = torch.linalg
# Looked at together: what is made of them meanwhile stays in the cache, and in no memory plan.
_PART_ELEMENTS = 2**18


def rounding_of(
    updates: Sequence[Tensor], stored: Sequence[torch.dtype | None], base: Tensor | None = None
) -> tuple[Rounding, ...]:
    """Return for each update what rounding gave to it.

    Args:
        updates: Δ_t `(d_out, d_in)`.
        stored: the dtype that W_0 + Δ_t was rounded to; None: it was not.
        base: W_0 `(d_out, d_in)`; None: Δ_t itself was rounded.

    An entry that is 0 has no error of its own: it is stored as the base's. So the error of an update
    that changed a share of the entries is that much shorter.

    Example:
        >>> w = torch.ones(100, 100)
        >>> found = rounding_of([w, 0 * w, w], [torch.bfloat16] * 2 + [None])
        >>> [round(error.edge, 3) for error in found], round(found[0].energy, 4)
        ([0.045, 0.0, 0.0], 0.0509)
    """
    own = 0.0 if base is None else _width(base)
    return tuple(
        Rounding() if dtype is None else _rounding(update, dtype, base, own)
        for update, dtype in zip(updates, stored, strict=True)
    )


def _rounding(update: Tensor, dtype: torch.dtype, base: Tensor | None, own: float) -> Rounding:
    changed = float(update.count_nonzero()) / max(1, update.numel())
    eps = torch.finfo(dtype).eps
    edge = eps * sqrt(changed / 12.0) * (own + _width(update))
    return Rounding(edge, _energy(base, update, dtype))


def _energy(base: Tensor | None, update: Tensor, dtype: torch.dtype) -> float:
    """Σ u²/12 over the entries that changed, u what the last place of a stored weight is worth."""
    limits = torch.finfo(dtype)
    total = 0.0
    rows = max(1, _PART_ELEMENTS // max(1, update.shape[1]))
    for start in range(0, len(update), rows):
        part = update[start : start + rows]
        weights = part if base is None else base[start : start + rows] + part
        _, exponent = torch.frexp(weights)  # |w| = m · 2^e, m from a half to 1
        place = torch.ldexp(torch.full_like(weights, 0.5), exponent).clamp_min_(limits.tiny)
        total += float(_linalg.vector_norm(place.mul_(part != 0))) ** 2
    return limits.eps**2 * total / 12.0


def _width(matrix: Tensor) -> float:
    """max_i ‖M_i:‖ + max_j ‖M_:j‖: a norm, so that of W_0 + Δ it is at most the sum of both."""
    if not matrix.numel():
        return 0.0
    rows, columns = (cast("Tensor", _linalg.vector_norm(matrix, dim=axis)).max() for axis in (1, 0))
    return float(rows + columns)
