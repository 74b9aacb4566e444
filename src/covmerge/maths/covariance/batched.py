r"""The two sums of the closed form for layers of one shape at once, along a leading axis.

As `covariance.normal` forms them of one layer, in the same coordinates: what decides these is the
shape, which all have in common.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from covmerge.maths.covariance.estimate import Covariance
from covmerge.maths.covariance.normal import Coordinates
from covmerge.maths.linalg.auto import cube_choice, system_choice
from covmerge.maths.linalg.batched import per_member

# Of each layer, the covariances of its experts.
Layers = Sequence[Sequence[Covariance]]


@dataclass(frozen=True)
class BatchedEquations(Coordinates):
    """Σ R_t C_t and Σ C_t of n layers.

    Attributes:
        gram: Σ s_t R_tᵀR_t without the ridge, `(n, d_in, d_in)` or dual `(n, m, m)`.
        numerator: coordinates of Σ R_t C_t, `(n, d_out, d_in)` or dual `(n, d_out, m)`.
        ridges: Σ ε_t `(n,)`.
        basis: None in the primal; D `(n, m, d_in)` in the dual.
    """

    gram: Tensor
    numerator: Tensor
    ridges: Tensor
    basis: Tensor | None = None

    def row_sums(self) -> Tensor:
        """Coordinates of 𝟏ᵀ Σ s_t R_tᵀR_t, `(n, _)`."""
        return (self.gram if self.basis is None else self.basis).sum(-1)

    def apply(self, left: Tensor) -> Tensor:
        """Return left · Σ C_t for left `(n, _, d_in)`."""
        image = left @ (self.gram if self.basis is None else self.basis.mT)
        return torch.addcmul(self.lift(image), left, per_member(self.ridges, left))

    def only(self, kept: Sequence[int]) -> BatchedEquations:
        """Return those of some layers."""
        basis = None if self.basis is None else self.basis[kept]
        return BatchedEquations(self.gram[kept], self.numerator[kept], self.ridges[kept], basis)


def batched_equations(layers: Layers) -> BatchedEquations:
    """Form Σ R_t C_t and Σ C_t of layers of one shape, dtype and number of experts.

    Example:
        >>> layers = [[Covariance(torch.eye(2))], [Covariance(2 * torch.eye(2), ridge=0.5)]]
        >>> found = batched_equations(layers)
        >>> found.gram.diagonal(dim1=1, dim2=2).tolist(), found.ridges.tolist()
        ([[1.0, 1.0], [4.0, 4.0]], [0.0, 0.5])
    """
    first = layers[0][0]
    d_out, d_in = first.update.shape
    choice = system_choice(d_out, d_in, len(layers[0]), first.dtype.itemsize)
    return _dual(layers) if choice.taken == "dual" else _primal(layers)


def roots(layers: Layers, expert: int) -> Tensor:
    """R_t of one expert in all layers, `(n, d_out, d_in)`: made when asked for, as `Covariance.root`."""
    own = [layer[expert] for layer in layers]
    stacked = torch.stack([covariance.update for covariance in own]).to(own[0].dtype)
    means = [covariance.mean for covariance in own if covariance.mean is not None]
    if not means:
        return stacked
    return stacked.sub_(torch.stack(means).to(stacked).unsqueeze(1))


def _primal(layers: Layers) -> BatchedEquations:
    first = layers[0][0]
    d_out, d_in = first.update.shape
    gram = first.update.new_zeros(len(layers), d_in, d_in, dtype=first.dtype)
    numerator = gram.new_zeros(len(layers), d_out, d_in)
    outer = (
        cube_choice(d_out, d_in, first.dtype.itemsize, first.update.device.type).taken == "outer"
    )
    for expert in range(len(layers[0])):
        root = roots(layers, expert)
        scaled = root * per_member([layer[expert].scale for layer in layers], root)
        lengths = per_member([layer[expert].length for layer in layers], root)
        if outer:
            gram.baddbmm_(scaled.mT, root)
            numerator.baddbmm_(root @ root.mT, scaled.mul_(lengths))
        else:
            own = scaled.mT @ root
            gram.add_(own)
            numerator.baddbmm_(root, own.mul_(lengths))
        ridges = [layer[expert].ridge * layer[expert].length for layer in layers]
        numerator.addcmul_(root, per_member(ridges, root))
    return BatchedEquations(gram, numerator, _ridges(layers, gram))


def _dual(layers: Layers) -> BatchedEquations:
    first = layers[0][0]
    d_out, d_in = first.update.shape
    count = len(layers[0])
    basis = first.update.new_empty(len(layers), count * d_out, d_in, dtype=first.dtype)
    blocks = [slice(t * d_out, (t + 1) * d_out) for t in range(count)]
    for expert, block in enumerate(blocks):
        root = roots(layers, expert)
        lengths = per_member([layer[expert].scale ** 0.5 for layer in layers], root)
        torch.mul(root, lengths, out=basis[:, block])
    gram = basis @ basis.mT
    numerator = gram.new_empty(len(layers), d_out, count * d_out)
    for expert, block in enumerate(blocks):
        factors = [layer[expert].length * layer[expert].scale ** -0.5 for layer in layers]
        ridges = [layer[expert].ridge * f for layer, f in zip(layers, factors, strict=True)]
        numerator[:, :, block] = gram[:, block, block] * per_member(factors, gram)
        numerator[:, :, block].diagonal(dim1=1, dim2=2).add_(per_member(ridges, gram, axes=1))
    return BatchedEquations(gram, numerator, _ridges(layers, gram), basis)


def _ridges(layers: Layers, like: Tensor) -> Tensor:
    """In float64, as numbers of Python are."""
    sums = [sum(covariance.ridge for covariance in layer) for layer in layers]
    return torch.tensor(sums, dtype=torch.float64, device=like.device)
