"""Symmetric products at the cost of one triangle."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from covmerge.maths.linalg.auto import triangle_block


def add_gram_(lower: Tensor, rows: Tensor, alpha: float = 1.0) -> Tensor:
    """Add alpha · RᵀR to the lower block triangle of a matrix `(n, n)`; the rest stays undefined.

    torch has no symmetric product. One product per strip of rows, up to the strip's diagonal block, takes
    (1 + 1/blocks)/2 of the full product's work, and runs wherever torch does. `mirror_` fills the upper
    part once everything is added.

    Example:
        >>> rows = torch.tensor([[1.0, 2.0], [0.0, 1.0]])
        >>> mirror_(add_gram_(torch.zeros(2, 2), rows)).tolist()
        [[1.0, 2.0], [2.0, 5.0]]
    """
    for strip in _strips(lower):
        columns = rows[:, strip]
        lower[strip, : strip.stop].addmm_(columns.mT, rows[:, : strip.stop], alpha=alpha)
    return lower


def mirror_(lower: Tensor) -> Tensor:
    """Copy the lower block triangle of `(n, n)` to the part above the diagonal."""
    for strip in _strips(lower):
        lower[: strip.start, strip] = lower[strip, : strip.start].mT
    return lower


def gram(rows: Tensor) -> Tensor:
    """Return RᵀR `(n, n)` of R `(m, n)`."""
    n = rows.shape[1]
    return mirror_(add_gram_(rows.new_zeros(n, n), rows))


def half(symmetric: Tensor) -> Tensor:
    """Return H, lower triangular, with H + Hᵀ = C `(n, n)`.

    Example:
        >>> half(torch.tensor([[2.0, 1.0], [1.0, 4.0]])).tolist()
        [[1.0, 0.0], [1.0, 2.0]]
    """
    lower = symmetric.tril()
    lower.diagonal().div_(2.0)
    return lower


def times_lower(rows: Tensor, lower: Tensor) -> Tensor:
    """Return R · L `(m, n)` for R `(m, n)` and a lower triangular L, at little more than half the work.

    Example:
        >>> times_lower(torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, 0.0], [1.0, 2.0]])).tolist()
        [[3.0, 4.0]]
    """
    found = torch.empty_like(rows)
    for strip in _strips(lower):
        torch.mm(rows[:, strip.start :], lower[strip.start :, strip], out=found[:, strip])
    return found


def _strips(matrix: Tensor) -> Iterator[slice]:
    n = len(matrix)
    step = triangle_block(n, matrix.device.type)
    for start in range(0, n, step):
        yield slice(start, min(start + step, n))
