"""The singular directions that several matrices have together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, sqrt
from typing import Any, cast

import torch
from torch import Tensor

from covmerge.base.types import Rounding
from covmerge.maths.linalg.auto import spectrum_choice
from covmerge.maths.linalg.lapack import eigh, norm, qr, svd
from covmerge.maths.linalg.spectral import RankRule, with_equals, without_order
from covmerge.maths.linalg.symmetric import add_gram_, mirror_

_linalg: Any = torch.linalg
# If the sizes of blocks differ by more than this ratio, rounding of a large block may hide a small one.
_APART = 50.0


@dataclass(frozen=True)
class JointDirections:
    """The left singular directions of matrices side by side, up to their numerical rank k."""

    left: Tensor  # U `(d, k)`, float64
    sigma: Tensor  # σ_1..σ_k, float64, descending

    @property
    def arbitrary(self) -> int:
        """The number of directions whose singular values equal another's: any rotation of them is valid."""
        return without_order(self.sigma)

    def first(self, k: int) -> JointDirections:
        """Return the k largest directions, and all whose singular values equal the k-th."""
        k = with_equals(self.sigma, k)
        return JointDirections(self.left[:, :k], self.sigma[:k])


def joint_directions(
    blocks: Sequence[Tensor], *, rtol: float, rounding: Sequence[Rounding] = ()
) -> JointDirections:
    """Return U and σ of [F_1 … F_n] = U diag(σ) Vᵀ for blocks F_t `(d, n_t)`.

    V is not formed: its rows are Σ⁻¹UᵀF_t. Float64 blocks are decomposed through the triangular factor of
    a QR, float32 blocks through the float64 eigenproblem of Σ F_tF_tᵀ (see
    `covmerge.maths.linalg.spectral`).

    If the sizes of the blocks are far apart, their span is computed from blocks scaled to one size. Scaling
    a block changes no span, and a small block keeps its directions in either dtype.

    Args:
        blocks: matrices of one dtype; at least one.
        rtol: directions at or below `rtol` times the largest singular value are dropped; if the sizes of
            the blocks are far apart, this applies to the scaled blocks.
        rounding: the rounding error of each block; directions that are no larger are dropped too.

    Example:
        >>> found = joint_directions([torch.tensor([[3.0], [0.0]]), torch.tensor([[4.0], [0.0]])],
        ...                          rtol=1e-6)
        >>> found.left.abs().tolist(), found.sigma.tolist()
        ([[1.0], [0.0]], [5.0])
    """
    sizes = [norm(block) for block in blocks]
    if far_apart(sizes):
        units = [block / size for block, size in zip(blocks, sizes, strict=True) if size > 0.0]
        errors = [e.times(1 / size) for e, size in zip(rounding, sizes, strict=False) if size > 0.0]
        return _within(joint_directions(units, rtol=rtol, rounding=errors).left, blocks)
    d, columns = blocks[0].shape
    if spectrum_choice(d, columns, d, blocks[0].dtype.itemsize).taken == "svd":
        left, sigma = _left_singular(torch.cat(tuple(blocks), 1))
    else:
        values, vectors = eigh(_float64_gram(blocks))
        left, sigma = vectors.flip(1), values.clamp_min(0.0).sqrt().flip(0)
    rule = RankRule(rtol, Rounding.together(rounding))
    k, _ = rule.rank(sigma, (d, columns * len(blocks)))
    # A copy, so that the memory of the dropped directions is freed.
    return JointDirections(left[:, :k].clone(), sigma[:k])


def far_apart(sizes: Sequence[float]) -> bool:
    """Return whether one of the sizes, zeros aside, is lost beside another in single precision.

    Example:
        >>> far_apart([1.0, 0.0, 0.1]), far_apart([1e3, 1e-6])
        (False, True)
    """
    changed = [size for size in sizes if size > 0.0]
    return bool(changed) and max(changed) > _APART * min(changed)


def _within(span: Tensor, blocks: Sequence[Tensor]) -> JointDirections:
    """Return U and σ of all blocks in an orthonormal basis `(d, k)` of their span, in float64."""
    coordinates = torch.cat([span.mT @ block.to(torch.float64) for block in blocks], 1)
    left, sigma = _left_singular(coordinates)
    k = int((sigma > 0.0).sum())
    return JointDirections(span @ left[:, :k], sigma[:k])


def _left_singular(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return U and σ of a matrix, by the triangular factor of its transpose."""
    triangle = cast("tuple[Tensor, Tensor]", _linalg.qr(matrix.mT, "r"))[1]
    left, sigma, _ = svd(triangle.mT)
    return left, sigma


def _float64_gram(blocks: Sequence[Tensor]) -> Tensor:
    """Return Σ F_tF_tᵀ in float64; only one block at a time is held in float64."""
    rows = len(blocks[0])
    gram = blocks[0].new_zeros(rows, rows, dtype=torch.float64)
    for block in blocks:
        add_gram_(gram, block.to(torch.float64).mT)
    return mirror_(gram)


# The iteration stops when the relative error ‖F − F̂‖/‖F‖ changes by less than this. These three numbers
# are those of Compress-then-Merge's code.
_SETTLED = 1e-6
_LEAST = 3
_MOST = 1000


@dataclass(frozen=True)
class Tucker2:
    """Orthonormal bases U and V of F_t ≈ U (UᵀF_tV) Vᵀ."""

    left: JointDirections  # U `(m, k)`, float64, with the singular values of [F_1V … F_nV]
    right: JointDirections  # V `(n, l)`, float64, with those of [F_1ᵀU … F_nᵀU]
    energy: float  # the share of Σ‖F_t‖² that the bases hold, from 0 to 1
    iterations: int  # how often both bases were recomputed


def tucker2(
    blocks: Sequence[Tensor], rank: int, *, rtol: float, rounding: Sequence[Rounding] = ()
) -> Tucker2:
    """Return the bases of `rank` directions each that hold the largest share of F_1 … F_n `(m, n)`.

    The start is the leading directions of the matrices side by side (HOSVD). Then each basis in turn is
    recomputed within the other, until the error settles (HOOI). The iteration runs on the matrices'
    coordinates in all their joint directions, which loses nothing.

    Directions whose singular values equal the last one's are kept too. The matrices are not all zero;
    `rtol` and `rounding` are as in `joint_directions`.

    Example:
        >>> found = tucker2([torch.diag(torch.tensor([3.0, 1.0])), torch.diag(torch.tensor([4.0, 0.0]))],
        ...                 1, rtol=1e-6)
        >>> found.left.left.abs().tolist(), round(found.energy, 4)
        ([[1.0], [0.0]], 0.9615)
    """
    outputs = joint_directions(blocks, rtol=rtol, rounding=rounding)
    inputs = joint_directions([block.mT for block in blocks], rtol=rtol, rounding=rounding)
    inner = [outputs.left.mT @ block.to(torch.float64) @ inputs.left for block in blocks]
    whole = sum(float(block.square().sum()) for block in inner)
    if not whole:  # no direction is more than rounding
        return Tucker2(outputs, inputs, 1.0, 0)

    def anew(along: Tensor) -> tuple[JointDirections, JointDirections]:
        left = joint_directions([block @ along for block in inner], rtol=rtol).first(rank)
        right = joint_directions([block.mT @ left.left for block in inner], rtol=rtol)
        return left, right.first(rank)

    first = len(inputs.first(rank).sigma)
    start = torch.eye(len(inputs.sigma), dtype=torch.float64, device=inputs.left.device)
    left, right = anew(start[:, :first])
    energy, change, iterations = float(right.sigma.square().sum()) / whole, inf, 1
    while iterations < _MOST and (iterations < _LEAST or change >= _SETTLED):
        left, right = anew(right.left)
        before, energy = energy, float(right.sigma.square().sum()) / whole
        change = abs(_error(before) - _error(energy))
        iterations += 1
    return Tucker2(
        JointDirections(outputs.left @ left.left, left.sigma),
        JointDirections(inputs.left @ right.left, right.sigma),
        energy,
        iterations,
    )


def _error(energy: float) -> float:
    return sqrt(max(0.0, 1.0 - energy))


# An orthonormal basis of the span of a few thin blocks, at less than the cost of Householder's QR.

# Least λ_min/λ_max of the Gram matrix of unit columns for which its eigenvectors give a basis that is
# orthonormal to 1e-16/1e-8.
_WELL_POSED = 1e-8


@dataclass(frozen=True)
class Basis:
    """An orthonormal basis Q = columns · mix `(d, p)`, not multiplied out."""

    columns: Tensor  # `(d, k)`
    mix: Tensor  # `(k, p)`, float64
    blocks: tuple[Tensor, ...]  # QᵀX `(p, n)` of every block X that the basis was made of, float64

    def expand(self, coordinates: Tensor) -> Tensor:
        """Return Q · coordinates `(d, n)`, in the dtype of the columns."""
        return self.columns @ (self.mix @ coordinates).to(self.columns.dtype)

    def coordinates(self, vector: Tensor) -> Tensor:
        """Return Qᵀ · vector `(p,)`, float64."""
        along = self.columns.mT @ vector.to(self.columns.dtype)
        return self.mix.mT @ along.to(torch.float64)


def basis_of(blocks: Sequence[Tensor]) -> Basis:
    """Return a basis whose span holds the columns of all blocks `(d, n)`.

    If the columns are far from dependent, it is made of the eigenvectors of their small Gram matrix, which
    costs one product; else it comes from a QR factorisation.

    Example:
        >>> basis = basis_of([torch.tensor([[2.0], [0.0]]), torch.tensor([[1.0], [1.0]])])
        >>> [block.T.square().sum().round().item() for block in basis.blocks]
        [4.0, 2.0]
    """
    columns = torch.cat(tuple(blocks), dim=1)
    sizes = [block.shape[1] for block in blocks]
    exact = columns.to(torch.float64)
    gram = exact.mT @ exact
    # Unit columns, so that an adapter of small norm does not look like a nearly dependent one.
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
