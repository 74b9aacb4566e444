r"""How near is ΔᵀΔ to the covariance of a layer's inputs, and does ACTMat's Theorem 3.1 explain it?

With inputs z and output gradients g of a layer at step k, and sums over the steps of a training,

    G = Σ E[g zᵀ],   S = Σ E[z zᵀ ‖g‖²],   S̃ = Σ E[z zᵀ] E‖g‖²,   C = E[z zᵀ] at the final weights,

    ∠(ΔᵀΔ, C)  ≤  ∠(ΔᵀΔ, GᵀG) + ∠(GᵀG, S) + ∠(S, S̃) + ∠(S̃, C),

the angle being the arccos of the Frobenius cosine. The theorem has the last three terms, for which
Δ ∝ G; the first is what an optimiser other than plain SGD adds.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import acos, atan2, degrees

import torch
from torch import Tensor

from covmerge.maths.linalg.lapack import norm

_ROUNDING = 1e-6  # degrees that sums of exact angles may miss the triangle inequality by


@dataclass(frozen=True)
class Angles:
    """What was found of one layer, in degrees.

    Attributes:
        optimiser: between ΔᵀΔ and GᵀG.
        cross: between GᵀG and S.
        corr: between S and S̃.
        drift: between S̃ and C.
        true: between ΔᵀΔ and C.
        centred: the same of the updates without their mean row and the inputs without their mean.
        identity: between I and C.
        rotated: between ΔᵀΔ turned at random and C, mean cosine over all rotations.
    """

    optimiser: float
    cross: float
    corr: float
    drift: float
    true: float
    centred: float
    identity: float
    rotated: float

    @property
    def bound(self) -> float:
        """The right side of the theorem."""
        return self.optimiser + self.cross + self.corr + self.drift

    @property
    def slack(self) -> float:
        """What the bound leaves."""
        return self.bound - self.true


class StepSums:
    """G, S and S̃ of one layer.

    Rows' gradients of a mean loss are 1/n of their own, so that E[g zᵀ] over n rows is the gradient.

    Example:
        >>> sums = StepSums(2, 2)
        >>> sums.add(torch.eye(2), torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
        >>> sums.gradient.tolist(), sums.weighted.tolist(), sums.separate.tolist()
        ([[1.0, 0.0], [0.0, 1.0]], [[2.0, 0.0], [0.0, 2.0]], [[2.0, 0.0], [0.0, 2.0]])
    """

    def __init__(self, d_out: int, d_in: int) -> None:
        self.gradient = torch.zeros(d_out, d_in)
        self.weighted = torch.zeros(d_in, d_in)
        self.separate = torch.zeros(d_in, d_in)

    def add(self, inputs: Tensor, gradients: Tensor) -> None:
        """Add a step of n rows: z `(n, d_in)`, and gradients of the mean loss `(n, d_out)`."""
        rows = len(inputs)
        energy = (rows * gradients).square().sum(1)
        self.gradient.addmm_(gradients.mT, inputs)
        self.weighted.addmm_(inputs.mT, inputs * energy[:, None], alpha=1 / rows)
        self.separate.addmm_(inputs.mT, inputs, alpha=float(energy.mean()) / rows)


class InputSums:
    """E[z zᵀ] and E[z] of one layer."""

    def __init__(self, d_in: int) -> None:
        self._gram = torch.zeros(d_in, d_in, dtype=torch.float64)
        self._sum = torch.zeros(d_in, dtype=torch.float64)
        self._rows = 0

    def add(self, inputs: Tensor) -> None:
        """Add rows `(n, d_in)`."""
        self._gram += inputs.mT @ inputs
        self._sum += inputs.sum(0)
        self._rows += len(inputs)

    @property
    def covariance(self) -> Tensor:
        """E[z zᵀ]."""
        return self._gram / self._rows

    @property
    def mean(self) -> Tensor:
        """E[z]."""
        return self._sum / self._rows


def angle(one: Tensor, other: Tensor) -> float:
    """Return the angle between two matrices in degrees; 90 where one is zero.

    Example:
        >>> round(angle(torch.eye(2), torch.ones(2, 2)), 6)
        45.0
    """
    one, other = one.double(), other.double()
    sizes = norm(one), norm(other)
    if not all(sizes):
        return 90.0
    one, other = one / sizes[0], other / sizes[1]
    # Kahan's form: the arccos of a cosine near 1 loses half of the digits.
    return degrees(2 * atan2(norm(one - other), norm(one + other)))


def angles(update: Tensor, steps: StepSums, inputs: InputSums) -> Angles:
    """Return every angle of a layer.

    Args:
        update: Δ `(d_out, d_in)`.
        steps: sums over its training.
        inputs: of the final weights.

    Raises:
        AssertionError: the bound does not hold: angles are a metric, so a sum is wrong.
    """
    own, of_gradients = _gram(update), _gram(steps.gradient)
    weighted, separate = steps.weighted.double(), steps.separate.double()
    covariance, mean = inputs.covariance, inputs.mean
    identity = torch.eye(len(covariance), dtype=torch.float64)
    found = Angles(
        optimiser=angle(own, of_gradients),
        cross=angle(of_gradients, weighted),
        corr=angle(weighted, separate),
        drift=angle(separate, covariance),
        true=angle(own, covariance),
        centred=angle(_gram(update - update.mean(0)), covariance - torch.outer(mean, mean)),
        identity=angle(identity, covariance),
        rotated=_rotated(own, covariance),
    )
    assert found.slack > -_ROUNDING, f"{found} breaks the triangle inequality"
    return found


def _gram(matrix: Tensor) -> Tensor:
    exact = matrix.double()
    return exact.mT @ exact


def _rotated(turned: Tensor, covariance: Tensor) -> float:
    """Return the angle of the mean cosine of QAQᵀ and C over all rotations Q, Tr A Tr C / d."""
    sizes = norm(turned) * norm(covariance) * len(covariance)
    cosine = float(turned.trace() * covariance.trace()) / sizes if sizes else 0.0
    return degrees(acos(min(1.0, cosine)))
