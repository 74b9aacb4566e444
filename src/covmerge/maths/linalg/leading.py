"""The inputs that have most of the energy of several matrices, by block power iteration."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

import torch
from torch import Tensor

from covmerge.maths.linalg.lapack import eigh, qr

# So many are looked for at once, by so many products; the first few tell whether there are any.
_PROBES, _BLOCK, _POWERS = 8, 16, 2


def leading_inputs(
    matrices: Sequence[Tensor], scales: Sequence[float], *, above: float, most: int
) -> Tensor | None:
    """Return V `(d_in, k)`, near the eigenvectors of Σ s_tR_tᵀR_t of eigenvalues above a number.

    Orthonormal in float64. The iteration starts from fixed random vectors and goes on, block after block,
    until one has found a smaller one; of what it has found, eigenvalues down to a quarter of the number
    are taken too. That nothing is missing is likely and not certain.

    Args:
        matrices: R_t `(d_out, d_in)`.
        scales: s_t.
        above: the number.
        most: there are no more blocks once so many are found.

    Returns:
        V, or None where sums leave their dtype.

    Example:
        >>> matrix = torch.diag(torch.tensor([5.0, 1.0, 1.0, 0.5]))
        >>> leading_inputs([matrix], [2.0], above=10.0, most=4).abs().round().mT.tolist()
        [[1.0, 0.0, 0.0, 0.0]]
    """
    search = _Search(matrices, scales)
    d_in = matrices[0].shape[1]
    found = matrices[0].new_zeros(d_in, 0)
    vectors = search.basis(search.image(search.basis(search.random(_PROBES), found)), found)
    pairs = search.ritz(vectors)
    # Two products show the largest to within a factor of two, if that.
    if pairs is not None and float(pairs[0][-1]) < above / 2.0:
        return found.to(torch.float64)
    vectors = search.basis(torch.cat([vectors, search.random(_BLOCK - _PROBES)], 1), found)
    while pairs is not None and found.shape[1] < most:
        for _ in range(_POWERS):
            vectors = search.basis(search.image(vectors), found)
        pairs = search.ritz(vectors)
        if pairs is None:
            break
        found = torch.cat([found, pairs[1][:, pairs[0] > above / 4.0]], 1)
        if float(pairs[0][0]) <= above:
            break
        vectors = search.basis(search.random(_BLOCK), found)
    return None if pairs is None else qr(found.to(torch.float64))[0]


class _Search:
    def __init__(self, matrices: Sequence[Tensor], scales: Sequence[float]) -> None:
        self._terms = list(zip(matrices, scales, strict=True))
        self._draw = torch.Generator().manual_seed(0)

    def random(self, count: int) -> Tensor:
        """Vectors `(d_in, count)`."""
        first = self._terms[0][0]
        return torch.randn(first.shape[1], count, generator=self._draw).to(
            first.device, first.dtype
        )

    def basis(self, vectors: Tensor, beside: Tensor) -> Tensor:
        """An orthonormal basis of what they have beside others."""
        return qr(vectors - beside @ (beside.mT @ vectors))[0]

    def image(self, vectors: Tensor) -> Tensor:
        """Σ s_tR_tᵀR_t of them."""
        total = torch.zeros_like(vectors)
        for matrix, scale in self._terms:
            total.addmm_(matrix.mT, matrix @ vectors, alpha=scale)
        return total

    def ritz(self, vectors: Tensor) -> tuple[Tensor, Tensor] | None:
        """Eigenvalues, ascending, within what they span, and their vectors; None: they leave the dtype."""
        total = vectors.new_zeros(vectors.shape[1], vectors.shape[1])
        for matrix, scale in self._terms:
            seen = matrix @ vectors
            total.addmm_(seen.mT, seen, alpha=scale)
        if not isfinite(float(total.sum())):
            return None
        values, turn = eigh(total)
        return values, vectors @ turn
