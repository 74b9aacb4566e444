r"""The second half of `auto_measured`: the spectrum of what least squares gave, brought nearer to flat.

    W̄ = W₀ + (1 − a) λ (K + τ²I)^(−q/2) R + a R,  K = R C₀ Rᵀ

R is a merged update `(d_out, d_in)`, C₀ `(d_in, d_in)` says which inputs count. `docs/auto-measured.md`
derives it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import expm1, log1p, sqrt

import torch
from torch import Tensor

from covmerge.base.types import LinearGroup, Merged
from covmerge.maths.covariance.input_share import share_used
from covmerge.maths.linalg.lapack import norm
from covmerge.maths.linalg.metric import Metric
from covmerge.maths.linalg.spectral import EXACT
from covmerge.maths.methods.auto_measured_diagnostics import EqualisedMeasured
from covmerge.maths.methods.closed_form import Active, active_experts, stack_weighted

# An expert of so much of the others' energy counts half, one of less for less.
_SMALL = 0.01
# An update of so many times the usual length is felt as long, beyond that more and more: it ends there.
_LONG = 2.0
# A direction of so much of the mean singular value counts as half in use, and is hardly lifted.
_FAINT = 0.01
# Updates that are together so many times as long as the base's weights are half way to least squares.
_OF_WEIGHTS = 1.0 / 3.0
_FAR = 1e60  # times as long: there is no difference any more


@dataclass(frozen=True)
class Counted:
    """The experts that changed a layer, and by how much each counts.

    Attributes:
        group: all of them.
        active: those that changed it.
        bounds: b_t.
        shares: s_t, float64.
        used: ω_t `(T,)`, float64, the share of the layer's directions that each update uses.
    """

    group: LinearGroup
    active: Active
    bounds: list[float]
    shares: Tensor
    used: Tensor

    @classmethod
    def of(cls, group: LinearGroup) -> Counted | None:
        """How the experts of a group count; None where none changed the layer."""
        active = active_experts(group)
        if not active.updates:
            return None
        pairs = zip(active.updates, active.norms, strict=True)
        used = [share_used(update, size, min(group.shape)) for update, size in pairs]
        return cls.of_active(group, active, used)

    @classmethod
    def of_active(cls, group: LinearGroup, active: Active, used: Sequence[float]) -> Counted:
        """The same where those that changed the layer are known, one at least, and ω_t."""
        bounds = _bounds(active)
        sizes = [size * bound for size, bound in zip(active.norms, bounds, strict=True)]
        share_of_each = torch.tensor(used, dtype=torch.float64)
        return cls(group, active, bounds, _shares(sizes), share_of_each)

    @cached_property
    def weights(self) -> Tensor:
        """w_t, float64, of mean 1 among those that count, so that one that vanishes makes no jump."""
        weights = torch.tensor(self.active.weights, dtype=torch.float64)
        return weights * float(self.shares.sum() / (self.shares * weights).sum())

    @cached_property
    def in_sum(self) -> list[float]:
        """w_tb_t."""
        pairs = zip(self.weights, self.bounds, strict=True)
        return [float(weight) * bound for weight, bound in pairs]

    def towards_safest(self) -> float | None:
        """Return a, how far a merged update goes to R; None where the base is not known.

        1 − a = (1 + (3ρ)⁴)⁻¹, ρ² = Σ s_tw_t‖b_tΔ_t‖²/‖W₀‖².
        """
        base_norm = self.group.base_norm
        if base_norm is None:
            return None
        sizes = [size * bound for size, bound in zip(self.active.norms, self.bounds, strict=True)]
        energies = torch.tensor(sizes, dtype=torch.float64).square()
        together = sqrt(float((self.shares * self.weights * energies).sum()))
        return -expm1(-log1p(_times(together, _OF_WEIGHTS * base_norm) ** 4))

    @cached_property
    def mean_used(self) -> float:
        """ω̄ = Σ s_tω_t / Σ s_t."""
        return float((self.shares * self.used).sum() / self.shares.sum())

    @cached_property
    def uneven(self) -> float:
        """η = Σ s_t(ω_t − ω̄)² / (Σ s_t ω̄(1 − ω̄)): 0 where all use equally many of the layer's directions.

        It is 1 where some use all and the others none.
        """
        apart = (self.used - self.mean_used).square()
        variance = float((self.shares * apart).sum() / self.shares.sum())
        most = self.mean_used * (1.0 - self.mean_used)
        return min(1.0, variance / most) if most > 0.0 else 0.0

    def of_all(self, values: Sequence[float]) -> tuple[float, ...]:
        """A number of every expert, 0 of those that left the sums."""
        of_active = dict(zip(map(id, self.active.updates), values, strict=True))
        return tuple(of_active.get(id(update), 0.0) for update in self.group.updates)

    def diagnostics(self, before: EqualisedMeasured, alike: Likeness) -> EqualisedMeasured:
        """What there is to say of how they count."""
        return replace(
            before,
            shares=self.of_all([float(share) for share in self.shares]),
            bounds=self.of_all(self.bounds),
            unlike_experts=alike.experts,
            uneven_use=self.uneven,
        )


@dataclass(frozen=True)
class Likeness:
    """How alike the experts' updates are, as the inputs see them.

    Attributes:
        lengths: ‖Δ_tC₀^½‖ `(T,)`, float64.
        experts: N, as how many of no common direction they count.
        agreement: Σ s_t² / Σ s_ts_u cos²(Δ_tC₀^½, Δ_uC₀^½), 1 at most.
    """

    lengths: Tensor
    experts: float
    agreement: float

    @classmethod
    def of(cls, dots: Tensor, shares: Tensor) -> Likeness:
        """By ⟨Δ_tC₀^½, Δ_uC₀^½⟩ `(T, T)`, float64.

        Two updates without outputs have nothing in common.
        """
        squares = dots.diagonal().clamp_min(torch.finfo(torch.float64).tiny)
        lengths = squares.sqrt()  # the product of two, as that of two squares may be 0
        cosines = (dots / torch.outer(lengths, lengths)).square()
        cosines = cosines.clamp_max(1.0).fill_diagonal_(1.0)
        alike = float((shares * (cosines @ shares)).sum())
        return cls(
            lengths,
            max(1.0, float(shares.sum()) ** 2 / alike),
            min(1.0, float(shares.square().sum()) / alike),
        )


@dataclass(frozen=True)
class Flattening:
    """What λ (K + τ²I)^(−q/2) makes of the directions of the outputs.

    Attributes:
        lift: of those of R `(k,)`, without λ.
        scale: λ.
        unseen: of what C₀ does not see, with λ.
        diagnostics: and what there is to say of it.
    """

    lift: Tensor
    scale: float
    unseen: float
    diagnostics: EqualisedMeasured


def flattening(
    counted: Counted, alike: Likeness, sigma: Tensor, whole: float, diagnostics: EqualisedMeasured
) -> Flattening:
    """How far the spectrum of RC₀^½ is brought to flat, and how long it becomes.

    Args:
        counted: the experts.
        alike: how alike they are.
        sigma: the singular values of RC₀^½ within the numerical rank `(k,)`, float64, k > 0.
        whole: Σσ of (Σ w_tb_tΔ_t) C₀^½.
        diagnostics: what is known before.
    """
    faint = (_FAINT * sigma.square().sum() / sigma.sum()).square()
    in_use = float((sigma.square() / (sigma.square() + faint)).sum()) / min(counted.group.shape)
    exponent = (0.75 - in_use / 4.0) * (1.0 - alike.experts**-2.0) * (1.0 - counted.uneven)
    lift = (sigma.square() + faint) ** (-exponent / 2.0)
    scale = alike.agreement * whole / float((sigma * lift).sum())
    lifted = sigma * lift * scale
    together = float((alike.lengths * counted.weights).sum())
    diagnostics = replace(
        diagnostics,
        directions_in_use=in_use,
        flattening=exponent,
        lengthening=float(lifted.sum() / sigma.sum()),
        outputs_length=norm(lifted) / together,
    )
    unseen = float(faint) ** (-exponent / 2.0) * scale
    return Flattening(lift, scale, unseen, diagnostics)


def equalise(
    counted: Counted,
    fused: Tensor,
    metric: Metric,
    diagnostics: EqualisedMeasured,
    *,
    rtol: float,
) -> Merged | None:
    """Return (1 − a) λ (K + τ²I)^(−q/2) R + a R; a = 0 where the base is not known.

    Args:
        counted: the experts, each of which lends λ, q and a its part.
        fused: R `(d_out, d_in)`, of the updates' dtype.
        metric: C₀.
        diagnostics: what is known before.
        rtol: where the numerical rank of R ends.

    Returns:
        None where C₀ sees nothing of R.
    """
    active = counted.active
    alike = Likeness.of(metric.dots(active.updates), counted.shares)
    spectrum = metric.spectrum(fused, rtol=rtol, rounding=EXACT)
    diagnostics = counted.diagnostics(diagnostics, alike)
    if not len(spectrum.sigma):
        return None
    whole = metric.nuclear_norm(stack_weighted(active.updates, counted.in_sum))
    found = flattening(counted, alike, spectrum.sigma, whole, diagnostics)
    merged, diagnostics = spectrum.lifted(found.lift * found.scale, found.unseen), found.diagnostics
    away = counted.towards_safest()
    if away is not None:
        merged = merged.mul_(1.0 - away).add_(fused, alpha=away)
        diagnostics = replace(diagnostics, towards_least_squares=away)
    return Merged(merged, diagnostics)


def _times(length: float, base: float) -> float:
    """Return how many times as long as the base; as good as endless beside nothing."""
    return min(_FAR, length / base) if base else _FAR


def _shares(norms: Sequence[float]) -> Tensor:
    """s_t, float64: 1 for an expert as long as the others, 0 for one that hardly changed the layer."""
    energies = torch.tensor(norms, dtype=torch.float64).square()
    return energies / (energies + _SMALL * energies.square().sum() / energies.sum())


def _bounds(active: Active) -> list[float]:
    """b_t: 1 for an expert as long as the others, near 2g/‖Δ_t‖ for one that is many times as long.

    In g an expert counts by how long it is beside each of the others, and not beside the longest.
    """
    if len(active.norms) == 1:
        return [1.0]
    logs = torch.tensor(active.norms, dtype=torch.float64).log()
    logs -= logs.max()
    beside = 1.0 / (1.0 + _SMALL * (2.0 * (logs - logs[:, None])).exp())
    counts = beside.fill_diagonal_(0.0) @ (logs / 4.0).exp()
    usual = float((counts * logs).sum() / counts.sum())
    times = (logs - usual).exp() / _LONG
    return [float(bound) for bound in ((1.0 + _LONG**-4.0) / (1.0 + times**4.0)) ** 0.25]
