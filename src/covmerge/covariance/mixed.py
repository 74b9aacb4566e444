r"""W̄ = (Σ R_tC_t)(Σ C_t)⁻¹ of float32 updates to nearly float64's answer, by products in float32.

What float32 loses is in proportion to the largest eigenvalue of Σ s_tR_tᵀR_t, and a few directions of the inputs
may have most of its energy. These, V `(d_in, k)`, are kept apart: with Y_t = R_tV and E_t = R_t − Y_tVᵀ, EV = 0,

    Σ s_tR_tᵀR_t = V(ΣsYᵀY)Vᵀ + V(ΣsYᵀE) + (ΣsEᵀY)Vᵀ + ΣsEᵀE                     and so R_tR_tᵀR_t,

where all that has Y is thin and made in float64, and ΣsEᵀE and ΣsEEᵀE are large, well conditioned and made in
float32. The system is solved by blocks, V first. No bound is believed: the distance from the exact answer is
measured by one vector in float64, and where it is too much, or a direction may be missing, there is no answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite, sqrt

import torch
from torch import Tensor

from covmerge.covariance.estimate import Covariance
from covmerge.covariance.normal import add_own_
from covmerge.linalg.auto import precision_choice
from covmerge.linalg.cholesky import Cholesky, all_above, factorize
from covmerge.linalg.lapack import cholesky, eigh, norm, qr
from covmerge.linalg.symmetric import mirror_

# A direction of so much of the mean eigenvalue is kept apart: at most one of so many, by the trace.
_APART = 16.0
# So many are looked for at once, by so many products; the first few tell whether there are any.
_PROBES, _BLOCK, _POWERS = 8, 16, 2
# Entries that are split at once, in a core's cache.
_AT_ONCE = 2**17
# What the answer may be off by, of its norm.
_OFF = 3e-5


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
    def along(cls, axes: Tensor, d_out: int) -> _Leading:
        """Sums that are zero."""
        d_in, k = axes.shape
        sizes = (k, k), (k, d_in), (d_out, k)
        return cls(axes, *(axes.new_zeros(size) for size in sizes), [])

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
        self.numerator.addmm_(led, own, alpha=scale).add_(led, alpha=covariance.ridge)
        # Of the size of what is solved in float32 as well.
        self.numerator.add_(rest @ across.mT.to(rest.dtype))
        self.products.append((led, across))
        return rest

    def beside_(self, numerator: Tensor) -> Tensor:
        """What Y adds to the rest of the numerator, and that: ΣsYYᵀE `(d_out, d_in)`, float64."""
        led, across = zip(*self.products, strict=True)
        self.products.clear()
        return torch.addmm(numerator.to(torch.float64), torch.cat(led, 1), torch.cat(across))


def solve_mixed(covariances: Sequence[Covariance], *, floor: float) -> Tensor | None:
    """Return (Σ R_tC_t)(Σ C_t)⁻¹ `(d_out, d_in)`, float64, if float32 products can tell; None if not.

    None too where an eigenvalue of Σ s_tR_tᵀR_t may be at or below `floor`.

    Example:
        >>> draw = torch.Generator().manual_seed(0)
        >>> updates = [torch.randn(320, 256, generator=draw) for _ in range(2)]
        >>> unit = [Covariance(u, scale=1.0 / norm(u) ** 2, ridge=0.1 / 256) for u in updates]
        >>> solve_mixed(unit, floor=1e-9).shape, solve_mixed(unit, floor=1.0)
        (torch.Size([320, 256]), None)
    """
    first = covariances[0].update
    choice = precision_choice(*first.shape, len(covariances), first.dtype.itemsize)
    mean = sum(c.scale * c.energy() for c in covariances) / first.shape[1]
    if choice.taken != "mixed" or not (isfinite(mean) and mean > 0.0):
        return None
    axes = _leading_axes(covariances, _APART * mean)
    lower = first.new_zeros(first.shape[1], first.shape[1])
    numerator = torch.zeros_like(first)
    leading = _Leading.along(axes, len(first)) if axes.shape[1] else None
    for covariance in covariances:
        rest = covariance.root() if leading is None else leading.split_(covariance)
        add_own_(lower, numerator, rest, covariance)
    ridge = sum(covariance.ridge for covariance in covariances)
    system = _System.of(mirror_(lower), leading, ridge=ridge, mean=mean, floor=floor)
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
        cls, gram: Tensor, leading: _Leading | None, *, ridge: float, mean: float, floor: float
    ) -> _System | None:
        """Factorise ΣsEᵀE, which is lost, and what belongs to it; None where an eigenvalue may be too small."""
        block = None
        least = max(4.0 * floor, sqrt(len(gram)) * torch.finfo(gram.dtype).eps * _APART * mean)
        if leading is not None:
            plain = cholesky(leading.own)
            block = cholesky(leading.own + ridge * torch.eye(len(leading.own)).to(leading.own))
            if plain is None or block is None or not all_above(leading.own, least):
                return None
            across, axes = leading.across.to(gram.dtype), leading.axes.to(gram.dtype)
            without, within = (torch.cholesky_solve(leading.across, f) for f in (plain, block))
            gram.addmm_(across.mT, without.to(gram.dtype), alpha=-1.0)
            # EV = 0: there is nothing along V, which any number may stand for.
            gram.addmm_(axes * mean, axes.mT)
        if not all_above(gram, least):
            return None
        if leading is not None:
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
            wanted.addmv_(root, own)
            image.add_(own)
        return norm(wanted.addmv_(solved, image, alpha=-1.0)) / norm(solved)


def _leading_axes(covariances: Sequence[Covariance], above: float) -> Tensor:
    """Orthonormal V `(d_in, k)`, float64, near the eigenvectors of Σ s_tR_tᵀR_t of larger eigenvalues.

    By block power iteration from fixed random vectors, block after block.

    Raises:
        OverflowError: the sums leave float32.
    """
    first = covariances[0].update
    d_in = first.shape[1]
    draw = torch.Generator().manual_seed(0)
    found = first.new_zeros(d_in, 0)

    def image(vectors: Tensor) -> Tensor:
        total = torch.zeros_like(vectors)
        for covariance in covariances:
            root = covariance.root()
            total.addmm_(root.mT, root @ vectors, alpha=covariance.scale)
        return total

    def basis(vectors: Tensor) -> Tensor:
        return qr(vectors - found @ (found.mT @ vectors))[0]

    def ritz(vectors: Tensor) -> tuple[Tensor, Tensor]:
        total = vectors.new_zeros(vectors.shape[1], vectors.shape[1])
        for covariance in covariances:
            seen = covariance.root() @ vectors
            total.addmm_(seen.mT, seen, alpha=covariance.scale)
        if not isfinite(float(total.sum())):
            raise OverflowError("the sums of this layer overflow")
        values, turn = eigh(total)
        return values, vectors @ turn

    def random(count: int) -> Tensor:
        return torch.randn(d_in, count, generator=draw).to(first)

    vectors = basis(image(basis(random(_PROBES))))
    if float(ritz(vectors)[0][-1]) < above / 2.0:
        return found.to(torch.float64)
    vectors = basis(torch.cat([vectors, random(_BLOCK - _PROBES)], 1))
    while found.shape[1] < d_in / _APART:
        for _ in range(_POWERS):
            vectors = basis(image(vectors))
        values, vectors = ritz(vectors)
        kept = values > above
        found = torch.cat([found, vectors[:, kept]], 1)
        if int(kept.sum()) < _BLOCK:
            break
        vectors = basis(random(_BLOCK))
    return qr(found.to(torch.float64))[0]
