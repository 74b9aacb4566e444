"""Singular directions of matrices of one shape along a leading axis; each keeps as many as it has.

As `covmerge.maths.linalg.spectral` finds them of one matrix: float64 by an SVD, float32 by the float64
eigenproblem of the smaller Gram matrix. Where one has fewer directions than another, the others are zeros,
not left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from covmerge.maths.linalg.auto import spectrum_choice
from covmerge.maths.linalg.lapack import eigh, eigvalsh, svd, svdvals

_BLOCK = 1024  # columns that are alive in float64 at once


@dataclass(frozen=True)
class Spectra:
    """F = U diag(σ) Vᵀ for F `(n, d_out, d_in)`, of which the shorter side's vectors are known.

    Attributes:
        sigma: all singular values `(n, s)`, float64, descending, s the shorter side.
        wide: F, or Fᵀ, so that its rows are the shorter side `(n, s, _)`.
        short: the vectors of that side, in columns `(n, s, s)`.
        long: those of the other, in rows; None: they follow, Σ⁻¹UᵀF.
        transposed: whether `wide` is Fᵀ.
    """

    sigma: Tensor
    wide: Tensor
    short: Tensor
    long: Tensor | None
    transposed: bool

    def isometries(self, counts: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return U_k V_kᵀ `(n, d_out, d_in)` of each with its own k, of F's dtype.

        Returns:
            These, and max |WᵀW − I| `(n,)` of W, the vectors of the longer side.

        Example:
            >>> found = spectra(torch.diag_embed(torch.tensor([[3.0, 2.0], [1.0, 0.0]])))
            >>> found.isometries([2, 1])[0].tolist()
            [[[1.0, 0.0], [0.0, 1.0]], [[1.0, 0.0], [0.0, 0.0]]]
        """
        kept, dtype = self._kept(counts), self.wide.dtype
        short, long = self._short_of(kept), self._long_of(kept)
        off = long @ long.mT
        off.diagonal(dim1=-2, dim2=-1).sub_(kept.to(dtype))
        found = short.to(dtype) @ long
        return found.mT if self.transposed else found, off.abs().flatten(1).amax(1)

    def left(self, counts: Sequence[int]) -> Tensor:
        """Return U_k `(n, d_out, k)` of each with its own k, of F's dtype: beyond it there are zeros.

        Example:
            >>> found = spectra(torch.diag_embed(torch.tensor([[3.0, 2.0], [1.0, 0.0]])))
            >>> found.left([2, 1]).abs().tolist()
            [[[1.0, 0.0], [0.0, 1.0]], [[1.0, 0.0], [0.0, 0.0]]]
        """
        kept = self._kept(counts)
        return (
            self._long_of(kept).mT if self.transposed else self._short_of(kept).to(self.wide.dtype)
        )

    def _kept(self, counts: Sequence[int]) -> Tensor:
        ks = torch.tensor(counts, device=self.wide.device)
        return torch.arange(max(counts), device=self.wide.device) < ks.unsqueeze(1)

    def _short_of(self, kept: Tensor) -> Tensor:
        return self.short[:, :, : kept.shape[1]] * kept.unsqueeze(1)

    def _long_of(self, kept: Tensor) -> Tensor:
        most = kept.shape[1]
        if self.long is not None:
            return self.long[:, :most] * kept.unsqueeze(2)
        whiten = torch.where(kept, 1.0 / self.sigma[:, :most], 0.0).unsqueeze(1)
        return self._following((self._short_of(kept) * whiten).mT)

    def _following(self, whitened: Tensor) -> Tensor:
        """Σ_k⁻¹U_kᵀF `(n, k, _)`, with some columns of F in float64 at a time."""
        long = self.wide.new_empty(*whitened.shape[:2], self.wide.shape[2])
        for start in range(0, self.wide.shape[2], _BLOCK):
            columns = slice(start, start + _BLOCK)
            block = self.wide[:, :, columns].to(torch.float64)
            long[:, :, columns] = (whitened @ block).to(long.dtype)
        return long


def spectra(matrices: Tensor) -> Spectra:
    """Decompose matrices `(n, d_out, d_in)`; they must be finite.

    Raises:
        LinAlgError: one of them has no decomposition that LAPACK finds; then none is returned.

    Example:
        >>> spectra(torch.diag_embed(torch.tensor([[3.0, 2.0], [1.0, 4.0]]))).sigma.tolist()
        [[3.0, 2.0], [4.0, 1.0]]
    """
    d_out, d_in = matrices.shape[1:]
    transposed = d_out > d_in
    wide = matrices.mT if transposed else matrices
    side = min(d_out, d_in)
    if spectrum_choice(d_out, d_in, side, matrices.dtype.itemsize).taken == "svd":
        short, sigma, long = svd(wide)
        return Spectra(sigma, wide, short, long, transposed)
    values, vectors = eigh(_gram(wide))
    return Spectra(values.clamp_min(0.0).sqrt().flip(1), wide, vectors.flip(2), None, transposed)


def nuclear_norms(matrices: Tensor) -> Tensor:
    """The sums `(n,)` of the singular values of matrices `(n, d_out, d_in)`, float64; they must be finite.

    Raises:
        LinAlgError: as `spectra`.

    Example:
        >>> nuclear_norms(torch.diag_embed(torch.tensor([[3.0, 2.0], [1.0, 4.0]]))).tolist()
        [5.0, 5.0]
    """
    if matrices.dtype == torch.float64:
        return svdvals(matrices).sum(1)
    wide = matrices.mT if matrices.shape[1] > matrices.shape[2] else matrices
    return eigvalsh(_gram(wide)).clamp_min(0.0).sqrt().sum(1)


def _gram(wide: Tensor) -> Tensor:
    """FFᵀ `(n, s, s)` in float64, without a float64 copy of F."""
    total = wide.new_zeros(len(wide), wide.shape[1], wide.shape[1], dtype=torch.float64)
    for start in range(0, wide.shape[2], _BLOCK):
        block = wide[:, :, start : start + _BLOCK].to(torch.float64)
        total.baddbmm_(block, block.mT)
    return total
