r"""W̄ = (Σ R_tC_t)(Σ C_t)⁻¹ of float32 updates, by products in float32, as float64 has it to 2e-5.

What float32 loses is in proportion to the largest eigenvalue of Σ s_tR_tᵀR_t, and a few directions of the
inputs may have most of its energy. These, V `(d_in, k)`, are kept apart: with Y_t = R_tV and
E_t = R_t − Y_tVᵀ, so that EV = 0,

    Σ sRᵀR  = V (ΣsYᵀY) Vᵀ + V (ΣsYᵀE) + (ΣsEᵀY) Vᵀ + ΣsEᵀE
    Σ sRRᵀR = (ΣsYYᵀY + ΣsEEᵀY) Vᵀ + ΣsYYᵀE + ΣsEEᵀE

where all that has Y is thin and made in float64, and ΣsEᵀE and ΣsEEᵀE are large, well conditioned and made
in float32. The system is solved by blocks, V first. No bound is believed: how far the answer is off is
measured along one vector in float64, and where that is too much, or where float32 cannot tell an
eigenvalue from zero, there is no answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isfinite, sqrt

import torch
from torch import Tensor
from typing_extensions import Self

from covmerge.maths.covariance.estimate import Covariance
from covmerge.maths.covariance.normal import add_own_
from covmerge.maths.linalg.auto import precision_choice
from covmerge.maths.linalg.cholesky import Cholesky, all_above, factorize
from covmerge.maths.linalg.lapack import cholesky, norm
from covmerge.maths.linalg.leading import leading_inputs
from covmerge.maths.linalg.symmetric import add_gram_, mirror_

# A direction of so much of the mean eigenvalue is kept apart: at most one of so many, by the trace.
_APART = 16.0
# Entries that are split at once, in a core's cache.
_AT_ONCE = 2**17
# What the answer may be off by, of its norm.
_OFF = 2e-5


@dataclass(frozen=True)
class _Leading:
    """What is made in float64 of Y_t = R_tV `(d_out, k)` and E_t = R_t − Y_tVᵀ, k > 0.

    Attributes:
        axes: V `(d_in, k)`.
        own: ΣsYᵀY `(k, k)`.
        across: ΣsYᵀE `(k, d_in)`.
        numerator: the numerator along V, Σ(sYYᵀY + sEEᵀY + εY) `(d_out, k)`.
        products: Y, and sYᵀE, of every expert.
    """

    axes: Tensor
    own: Tensor
    across: Tensor
    numerator: Tensor
    products: list[tuple[Tensor, Tensor]]

    @classmethod
    def along(cls, axes: Tensor, d_out: int) -> Self:
        """Sums that are zero."""
        d_in, k = axes.shape
        own, across, numerator = (
            axes.new_zeros(k, k),
            axes.new_zeros(k, d_in),
            axes.new_zeros(d_out, k),
        )
        return cls(axes, own, across, numerator, [])

    def split_(self, covariance: Covariance) -> Tensor:
        """Add what one expert adds; return its E, of its dtype."""
        root, scale = covariance.root(), covariance.scale
        led = self.numerator.new_empty(self.numerator.shape)
        across, rest = torch.zeros_like(self.across), torch.empty_like(root)
        step = max(1, _AT_ONCE // root.shape[1])
        for start in range(0, len(root), step):
            rows = slice(start, start + step)
            block = root[rows].to(torch.float64)
            led[rows] = torch.mm(block, self.axes)
            block.addmm_(led[rows], self.axes.mT, alpha=-1.0)
            across.addmm_(led[rows].mT, block, alpha=scale)
            rest[rows] = block
        own = led.mT @ led
        self.own.add_(own, alpha=scale)
        self.across.add_(across)
        length = covariance.length
        self.numerator.addmm_(led, own, alpha=scale * length)
        self.numerator.add_(led, alpha=covariance.ridge * length)
        # V's own block, which is large, divides it: float32 will do.
        self.numerator.add_(rest @ across.mT.to(rest.dtype), alpha=length)
        self.products.append((led.mul_(length), across))
        return rest

    def beside_(self, numerator: Tensor) -> Tensor:
        """What Y adds to the rest of the numerator, and that: ΣsYYᵀE `(d_out, d_in)`, float64."""
        led, across = zip(*self.products, strict=True)
        self.products.clear()
        return torch.addmm(numerator.to(torch.float64), torch.cat(led, 1), torch.cat(across))


def solve_mixed(covariances: Sequence[Covariance], *, energy: float, floor: float) -> Tensor | None:
    """Return (Σ ℓ_tR_tC_t)(Σ C_t)⁻¹ `(d_out, d_in)`, float64, if float32 products can tell; None if not.

    Args:
        covariances: of one shape. Of float64, and where float64 costs less (`precision_choice`), the
            answer is None.
        energy: Tr Σ s_tR_tᵀR_t.
        floor: where an eigenvalue of Σ s_tR_tᵀR_t may be at or below it, the answer is None.

    Example:
        >>> draw = torch.Generator().manual_seed(0)
        >>> updates = [torch.randn(320, 256, generator=draw) for _ in range(2)]
        >>> unit = [Covariance(u, scale=1.0 / norm(u) ** 2, ridge=0.1 / 256) for u in updates]
        >>> solve_mixed(unit, energy=2.0, floor=1e-9).shape
        torch.Size([320, 256])
        >>> solve_mixed(unit, energy=2.0, floor=1.0)
    """
    first = covariances[0].update
    d_out, d_in = first.shape
    choice = precision_choice(
        d_out, d_in, len(covariances), first.dtype.itemsize, first.device.type
    )
    mean = energy / d_in
    possible = isfinite(mean) and mean > 0.0
    # What cannot be a factor in float32 has squares that leave it.
    possible &= max(c.scale for c in covariances) <= torch.finfo(torch.float32).max
    if choice.taken != "mixed" or not possible:
        return None
    # What float32 can tell from zero: errors of the entries are independent.
    least = max(floor, sqrt(d_in) * torch.finfo(first.dtype).eps * _APART * mean)
    if not _some_above(covariances, least):
        return None
    axes = leading_inputs(
        [covariance.root() for covariance in covariances],
        [covariance.scale for covariance in covariances],
        above=_APART * mean,
        most=int(d_in / _APART),
    )
    if axes is None:
        return None
    lower = first.new_zeros(d_in, d_in)
    numerator = torch.zeros_like(first)
    leading = _Leading.along(axes, d_out) if axes.shape[1] else None
    for covariance in covariances:
        rest = covariance.root() if leading is None else leading.split_(covariance)
        add_own_(lower, numerator, rest, covariance)
    ridge = sum(covariance.ridge for covariance in covariances)
    system = _System.of(mirror_(lower), leading, ridge=ridge, mean=mean, least=least, floor=floor)
    if system is None:
        return None
    solved = system.solve(numerator)
    return solved if system.off(solved, covariances) <= _OFF else None


@dataclass(frozen=True)
class _System:
    """Σ C_t by blocks: V's, and the Schur complement of it, which is of float32.

    Attributes:
        factor: of the Schur complement and the ridge.
        leading: the parts of float64, if there are any;
        block: the Cholesky factor of V's own block with the ridge.
    """

    factor: Cholesky
    leading: _Leading | None
    block: Tensor | None

    @classmethod
    def of(
        cls,
        gram: Tensor,
        leading: _Leading | None,
        *,
        ridge: float,
        mean: float,
        least: float,
        floor: float,
    ) -> Self | None:
        """Factorise ΣsEᵀE, which is lost, and what belongs to it.

        None where an eigenvalue is below `least`, or one of the whole may be below `floor`.
        """
        if leading is None:
            if not all_above(gram, least):
                return None
            return cls(factorize(gram, ridge=ridge), None, None)
        plain, block = cholesky(leading.own), cholesky(_shifted(leading.own, ridge))
        if plain is None or block is None or cholesky(_shifted(leading.own, -least)) is None:
            return None
        without, within = (torch.cholesky_solve(leading.across, f) for f in (plain, block))
        # The whole is (I + N)ᵀ(V's block ⊕ its complement)(I + N), N = `without` off the diagonal.
        if least < floor * (1.0 + norm(without)) ** 2:
            return None
        across, axes = leading.across.to(gram.dtype), leading.axes.to(gram.dtype)
        gram.addmm_(across.mT, without.to(gram.dtype), alpha=-1.0)
        # EV = 0: there is nothing along V, where any number may stand.
        gram.addmm_(axes * mean, axes.mT)
        if not all_above(gram, least):
            return None
        gram.addmm_(across.mT, (without - within).to(gram.dtype))
        return cls(factorize(gram, ridge=ridge), leading, block)

    def solve(self, numerator: Tensor) -> Tensor:
        """(Σ R_tC_t)(Σ C_t)⁻¹ of what is not V's of the numerator `(d_out, d_in)`, float64."""
        if self.leading is None:
            return self._rows(numerator)
        return self._rows(self.leading.beside_(numerator), self.leading.numerator)

    def _rows(self, rest: Tensor, along: Tensor | None = None) -> Tensor:
        """Rows `(_, d_in)` times (Σ C_t)⁻¹, given as Z Vᵀ + F with FV = 0, Z `(_, k)`; float64."""
        if along is None or self.leading is None or self.block is None:
            return self.factor.solve_right(rest.to(self.factor.factor.dtype)).to(torch.float64)
        across, axes = self.leading.across, self.leading.axes
        inside = torch.cholesky_solve(along.mT, self.block).mT
        schur = (rest - inside @ across).to(self.factor.factor.dtype)
        solved = self.factor.solve_right(schur).to(torch.float64)
        led = torch.cholesky_solve((along - solved @ across.mT).mT, self.block).mT
        return solved.addmm_(led, axes.mT)

    def off(self, solved: Tensor, covariances: Sequence[Covariance]) -> float:
        """‖X − (ΣRC)(ΣC)⁻¹‖ / ‖X‖, by (X ΣC − ΣRC) y in float64 with a random (ΣC) y."""
        draw = torch.Generator().manual_seed(0)
        white = torch.randn(1, solved.shape[1], generator=draw, dtype=torch.float64).to(solved)
        if self.leading is None:
            vector = self._rows(white)
        else:
            along = white @ self.leading.axes
            vector = self._rows(white - along @ self.leading.axes.mT, along)
        vector = vector[0]
        image, wanted = torch.zeros_like(vector), solved.new_zeros(len(solved))
        root = torch.empty_like(solved)
        for covariance in covariances:
            root.copy_(covariance.root())
            own = (root.mT @ (root @ vector)).mul_(covariance.scale)
            own.add_(vector, alpha=covariance.ridge)
            wanted.addmv_(root, own, alpha=covariance.length)
            image.add_(own)
        size = norm(solved)
        return norm(wanted.addmv_(solved, image, alpha=-1.0)) / size if size > 0.0 else inf


def _shifted(matrix: Tensor, shift: float) -> Tensor:
    return matrix + shift * torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)


def _some_above(covariances: Sequence[Covariance], least: float) -> bool:
    """Whether Σ s_tR_tᵀR_t of a quarter of the inputs has no eigenvalue below `least`.

    If it has one, so has the whole, and a sixteenth of the work has told.
    """
    first = covariances[0].update
    part = first.shape[1] // 4
    total = first.new_zeros(part, part)
    for covariance in covariances:
        add_gram_(total, covariance.root()[:, :part], covariance.scale)
    return all_above(mirror_(total), least)
