r"""The two sums of the closed form, W̄ = (Σ_t R_t C_t)(Σ_t C_t + P)⁻¹.

With C_t = s_t R_tᵀR_t + ε_t I the sums are formed in the smaller of two coordinate systems:

primal  d_in axes:        gram = Σ s_t R_tᵀR_t  (d_in, d_in),   numerator = Σ R_t C_t  (d_out, d_in)
dual    row space of the  gram = D Dᵀ  (m, m),  D = [√s_t R_t]_t  (m, d_in),  m = Σ d_out
        updates:          numerator = [(s_t R_tR_tᵀ + ε_t I)/√s_t]_t  (d_out, m)

By the push-through identity D(DᵀD + eI)⁻¹ = (DDᵀ + eI)⁻¹D both systems give the same W̄. Solvers and
priors are therefore written once, for `gram + ridge·I` and rows in either coordinates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import sqrt

import torch
from torch import Tensor

from covmerge.maths.covariance.estimate import Covariance
from covmerge.maths.linalg.auto import cube_choice, system_choice
from covmerge.maths.linalg.symmetric import add_gram_, gram, mirror_


@dataclass(frozen=True)
class NormalEquations:
    """Σ R_t C_t and Σ C_t of one layer."""

    gram: Tensor  # Σ s_t R_tᵀR_t without the ridge, `(d_in, d_in)`, or `(m, m)` in the dual
    numerator: Tensor  # coordinates of Σ R_t C_t, `(d_out, d_in)`, or `(d_out, m)` in the dual
    ridge: float  # Σ ε_t
    basis: Tensor | None = None  # None in the primal; D `(m, d_in)` in the dual

    @property
    def route(self) -> str:
        """The name of the coordinates, for reports."""
        return "primal" if self.basis is None else "dual"

    def lift(self, rows: Tensor) -> Tensor:
        """Return rows in these coordinates as rows of the inputs, `(_, d_in)`."""
        return rows if self.basis is None else rows @ self.basis

    def with_prior(
        self, covariances: Sequence[Covariance], shares: Sequence[float], ridge: float
    ) -> NormalEquations:
        """Return Σ R_tC_t + Σ a_tR_t and Σ C_t + ρI: far from all updates the solution is Σ a_tR_t / ρ.

        The numerator is changed in place.
        """
        for place, (covariance, share) in enumerate(zip(covariances, shares, strict=True)):
            if self.basis is None:
                self.numerator.add_(covariance.root(), alpha=share)
            else:
                rows = len(covariance.update)
                block = self.numerator[:, place * rows : (place + 1) * rows]
                block.diagonal().add_(share / sqrt(covariance.scale))
        return replace(self, ridge=self.ridge + ridge)

    def within(self, values: Tensor, vectors: Tensor) -> NormalEquations:
        """Return the sums within some eigenvectors `(n, k)` of `gram` with their eigenvalues, float64.

        The result is in dual coordinates of k rows, whatever the coordinates were before.
        """
        numerator, basis = self.numerator.double() @ vectors, self.basis
        if basis is None:
            root = values.sqrt()
            return NormalEquations(
                torch.diag(values), numerator / root, self.ridge, root[:, None] * vectors.mT
            )
        return NormalEquations(
            torch.diag(values), numerator, self.ridge, vectors.mT @ basis.double()
        )

    def apply(self, left: Tensor) -> Tensor:
        """Return left · Σ C_t for left `(_, d_in)`."""
        return self.lift(self.image(left)).add_(left, alpha=self.ridge)

    def image(self, left: Tensor) -> Tensor:
        """Return left · Σ s_t R_tᵀR_t, without the ridge, in these coordinates, for left `(_, d_in)`."""
        return left @ (self.gram if self.basis is None else self.basis.mT)


def normal_equations(covariances: Sequence[Covariance]) -> NormalEquations:
    """Form Σ R_t C_t and Σ C_t for covariances of one shape and dtype."""
    d_out, d_in = covariances[0].update.shape
    itemsize = covariances[0].dtype.itemsize
    if system_choice(d_out, d_in, len(covariances), itemsize).taken == "dual":
        return _dual(covariances)
    return _primal(covariances)


def _primal(covariances: Sequence[Covariance]) -> NormalEquations:
    update, dtype = covariances[0].update, covariances[0].dtype
    d_out, d_in = update.shape
    total = update.new_zeros(d_in, d_in, dtype=dtype)
    numerator = update.new_zeros(d_out, d_in, dtype=dtype)
    # RᵀR is in the lower block triangle of the sum until all are added.
    outer = cube_choice(d_out, d_in, dtype.itemsize, update.device.type).taken == "outer"
    for covariance in covariances:
        root, scale = covariance.root(), covariance.scale
        if outer:
            add_gram_(total, root, scale)
            numerator.addmm_(gram(root.mT), root, alpha=scale)
        else:
            product = gram(root)
            total.add_(product, alpha=scale)
            numerator.addmm_(root, product, alpha=scale)
        if covariance.ridge:
            numerator.add_(root, alpha=covariance.ridge)
    return NormalEquations(mirror_(total), numerator, sum(c.ridge for c in covariances))


def _dual(covariances: Sequence[Covariance]) -> NormalEquations:
    update = covariances[0].update
    d_out, d_in = update.shape
    basis = update.new_empty(len(covariances) * d_out, d_in, dtype=covariances[0].dtype)
    blocks = [slice(t * d_out, (t + 1) * d_out) for t in range(len(covariances))]
    for block, covariance in zip(blocks, covariances, strict=True):
        torch.mul(covariance.root(), sqrt(covariance.scale), out=basis[block])
    total = gram(basis.mT)
    numerator = total.new_empty(d_out, len(basis))
    for block, covariance in zip(blocks, covariances, strict=True):
        factor = 1.0 / sqrt(covariance.scale)
        numerator[:, block] = total[block, block] * factor
        numerator[:, block].diagonal().add_(covariance.ridge * factor)
    return NormalEquations(total, numerator, sum(c.ridge for c in covariances), basis)


def collective_prior(
    normal: NormalEquations, d_in: int, *, energy: float = 1.0, ones: Tensor | None = None
) -> Tensor:
    """Return cᵀ of the collective structural prior C_agg = 𝟏cᵀ (ACE, Eqs. 11–13).

    cᵀ = (1/d_in) 𝟏ᵀ Σ_t Σ̃_t / energy, in the coordinates of `normal`; the ridge is left out. `energy` is
    τ̄ = mean ‖Δ_t‖²_F if the experts were trace-normalised (Eq. 12), else 1. `ones` is 𝟏 in the coordinates
    of the layer's inputs; None: a vector of ones.
    """
    rows = normal.gram if normal.basis is None else normal.basis
    return (rows.sum(1) if ones is None else rows @ ones) / (d_in * energy)
