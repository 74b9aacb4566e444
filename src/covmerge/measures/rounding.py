r"""What rounding of stored weights gives to an update.

A weight w stored with p bits is off by up to half a unit in its last place, ±eps·|w|/2, evenly spread
and independent of its neighbours: an error of variance at most (eps·w)²/12. Of a matrix E of such
errors the largest singular value is about the largest row norm plus the largest column norm of the
standard deviations (Bandeira and van Handel, Annals of Probability 2016, Theorem 1.1):

    σ₁(E) ≈ eps/√12 · ( max_i ‖W_i:‖ + max_j ‖W_:j‖ )

What is below this floor in an update W_t − W_0 may be the file's rounding and not the expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import Any, cast

import torch
from torch import Tensor

_linalg: Any = torch.linalg


def rounding_floors(
    updates: Sequence[Tensor], stored: Sequence[torch.dtype | None], base: Tensor | None = None
) -> tuple[float, ...]:
    """Return for each update the largest singular value that rounding gives to it.

    Args:
        updates: Δ_t `(d_out, d_in)`.
        stored: the dtype that W_0 + Δ_t was rounded to; None: it was not, and its floor is 0.
        base: W_0 `(d_out, d_in)`; None: Δ_t itself was rounded.

    An entry that is 0 has no error of its own: it is stored as the base's. So the error of an update
    that changed a share of the entries is that much shorter.

    Example:
        >>> w = torch.ones(100, 100)
        >>> [round(floor, 3) for floor in rounding_floors([w, 0 * w, w], [torch.bfloat16] * 2 + [None])]
        [0.045, 0.0, 0.0]
    """
    own = 0.0 if base is None else _width(base)
    return tuple(
        0.0
        if dtype is None
        else torch.finfo(dtype).eps
        * sqrt(float(update.count_nonzero()) / max(1, update.numel()) / 12.0)
        * (own + _width(update))
        for update, dtype in zip(updates, stored, strict=True)
    )


def _width(matrix: Tensor) -> float:
    """max_i ‖M_i:‖ + max_j ‖M_:j‖: a norm, so that of W_0 + Δ it is at most the sum of both."""
    if not matrix.numel():
        return 0.0
    rows, columns = (cast("Tensor", _linalg.vector_norm(matrix, dim=axis)).max() for axis in (1, 0))
    return float(rows + columns)
