"""An orthonormal basis of what a few thin blocks span, without Householder's cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from covmerge.maths.linalg.lapack import eigh, qr

# λ_min/λ_max of the Gram matrix of unit columns from which its eigenvectors make a basis that is
# orthonormal to 1e-16/1e-8.
_WELL_POSED = 1e-8


@dataclass(frozen=True)
class Basis:
    """Q = columns · mix `(d, p)`, orthonormal, not formed.

    Attributes:
        columns: `(d, k)`.
        mix: `(k, p)`, float64.
        blocks: QᵀX `(p, n)` of every block that the basis was made of, float64.
    """

    columns: Tensor
    mix: Tensor
    blocks: tuple[Tensor, ...]

    def expand(self, coordinates: Tensor) -> Tensor:
        """Return Q · coordinates `(d, n)`, in the dtype of the columns."""
        return self.columns @ (self.mix @ coordinates).to(self.columns.dtype)

    def coordinates(self, vector: Tensor) -> Tensor:
        """Return Qᵀ · vector `(p,)`, float64."""
        along = self.columns.mT @ vector.to(self.columns.dtype)
        return self.mix.mT @ along.to(torch.float64)


def basis_of(blocks: Sequence[Tensor]) -> Basis:
    """Return a basis whose span holds the columns of all blocks `(d, n)`.

    From the eigenvectors of their small Gram matrix where the columns are far from dependent, which
    costs one product; by a QR factorisation where they are not.

    Example:
        >>> basis = basis_of([torch.tensor([[2.0], [0.0]]), torch.tensor([[1.0], [1.0]])])
        >>> [block.T.square().sum().round().item() for block in basis.blocks]
        [4.0, 2.0]
    """
    columns = torch.cat(tuple(blocks), dim=1)
    sizes = [block.shape[1] for block in blocks]
    exact = columns.to(torch.float64)
    gram = exact.mT @ exact
    # Unit columns: an adapter of small norm is not a nearly dependent one.
    units = gram.diagonal().sqrt()
    units = torch.where(units > 0.0, units, 1.0)
    values, vectors = eigh(gram / (units * units[:, None]))
    if len(values) <= len(columns) and bool(values[0] > _WELL_POSED * values[-1]):
        mix = (vectors / values.sqrt()) / units[:, None]
        found = mix.mT @ gram
    else:
        columns, found = qr(exact)
        mix = torch.eye(len(found), dtype=torch.float64, device=columns.device)
    return Basis(columns, mix, tuple(torch.split(found, sizes, dim=1)))
