"""Tucker-2: the two bases of few directions each that hold most of several matrices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, sqrt

import torch
from torch import Tensor

from covmerge.base.types import Rounding
from covmerge.maths.linalg.joint import JointDirections, joint_directions

# The iteration stops when the relative error ‖F − F̂‖/‖F‖ changes by less than this; these three are
# those of Compress-then-Merge's code.
_SETTLED = 1e-6
_LEAST = 3
_MOST = 1000


@dataclass(frozen=True)
class Tucker2:
    """Orthonormal bases U and V of F_t ≈ U (UᵀF_tV) Vᵀ.

    Attributes:
        left: U `(m, k)`, float64, with the singular values of [F_1V … F_nV].
        right: V `(n, l)`, float64, with those of [F_1ᵀU … F_nᵀU].
        energy: what they hold of Σ‖F_t‖², a share of 1.
        iterations: how often both bases were found anew.
    """

    left: JointDirections
    right: JointDirections
    energy: float
    iterations: int


def tucker2(
    blocks: Sequence[Tensor], rank: int, *, rtol: float, rounding: Sequence[Rounding] = ()
) -> Tucker2:
    """Return the bases of `rank` directions each that hold the most of F_1 … F_n `(m, n)`.

    The leading directions of the matrices side by side come first (HOSVD); then each basis is found
    anew within what the other holds, in turn, until the error settles (HOOI). That is done on the
    matrices' coordinates in all directions that they have together, which loses nothing.

    Args:
        blocks: at least one, not all zero, of one dtype.
        rank: of directions whose singular values equal the last, all are kept.
        rtol: where the numerical rank ends, as in `joint_directions`.
        rounding: what rounding gave to each matrix, likewise.

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
