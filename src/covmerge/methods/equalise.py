r"""Steps 3 and 4 of `auto`: the spectrum of what least squares gave, brought nearer to flat.

    W̄ = W₀ + (1 − a) λ (K + τ²I)^(−q/2) R + a Δ̄,  K = R C₀ Rᵀ

R is a merged update `(d_out, d_in)`, C₀ `(d_in, d_in)` says which inputs count. Δ̄ is what is safest: the
average, or R itself where inputs were measured. `docs/auto.md` derives it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import sqrt

import torch
from torch import Tensor

from covmerge.linalg.lapack import norm
from covmerge.linalg.metric import Metric
from covmerge.linalg.spectral import EXACT
from covmerge.methods.auto_noticed import Equalised
from covmerge.methods.closed_form import Active, active_experts, stack_weighted
from covmerge.types import LinearGroup, Merged, Rounding

# An expert of so much of the others' energy counts half, one of less for less.
_SMALL = 0.01
# An update of so many times the usual length is felt as long, beyond that more and more: it ends there.
_LONG = 2.0
# A direction of so much of the mean singular value counts as half in use, and is hardly lifted.
_FAINT = 0.01
# Updates that are together so many times as long as the base's weights are half way to their average.
_BESIDE_BASE = 1.0 / 3.0
_FAR = 1e60  # times as long: there is no difference any more


@dataclass(frozen=True)
class Counted:
    """The experts that changed a layer, and by how much each counts.

    Attributes:
        group: all of them.
        active: those that changed it.
        bounds: b_t.
        shares: s_t, float64.
    """

    group: LinearGroup
    active: Active
    bounds: list[float]
    shares: Tensor

    @classmethod
    def of(cls, group: LinearGroup) -> Counted | None:
        """How the experts of a group count; None where none changed the layer."""
        active = active_experts(group)
        if not active.updates:
            return None
        bounds = _bounds(active)
        sizes = [size * own for size, own in zip(active.norms, bounds, strict=True)]
        return cls(group, active, bounds, _shares(sizes))

    @cached_property
    def weights(self) -> Tensor:
        """w_t, float64, of mean 1 among those that count, so that one that vanishes makes no jump."""
        weights = torch.tensor(self.active.weights, dtype=torch.float64)
        return weights * float(self.shares.sum() / (self.shares * weights).sum())

    @cached_property
    def in_sum(self) -> list[float]:
        """w_tb_t."""
        pairs = zip(self.weights, self.bounds, strict=True)
        return [float(weight) * own for weight, own in pairs]

    def of_all(self, values: Sequence[float]) -> tuple[float, ...]:
        """A number of every expert, 0 of those that left the sums."""
        of_active = dict(zip(map(id, self.active.updates), values, strict=True))
        return tuple(of_active.get(id(update), 0.0) for update in self.group.updates)


def equalise(
    counted: Counted,
    fused: Tensor,
    seen: Metric,
    noticed: Equalised,
    *,
    rtol: float,
    safest: Tensor | None = None,
) -> Merged | None:
    """Return λ (K + τ²I)^(−q/2) R, and where ‖W₀‖ is known go from there to what is safest.

    Args:
        counted: the experts, each of which lends λ, q and a its part.
        fused: R `(d_out, d_in)`, of the updates' dtype.
        seen: C₀.
        noticed: what is known before. Where that is `inputs_known`, what C₀ does not see is lifted as what
            it hardly sees; else it is rounding.
        rtol: where the numerical rank of R ends.
        safest: Δ̄; None: the average.

    Returns:
        None where nothing of R is seen, though inputs are known.
    """
    group, active, shares = counted.group, counted.active, counted.shares
    squares, seen_lengths = _squared_cosines(active, seen)
    alike = float((shares * (squares @ shares)).sum())
    experts = max(1.0, float(shares.sum()) ** 2 / alike)
    agreement = min(1.0, float(shares.square().sum()) / alike)
    known = noticed.inputs_known
    rounding = EXACT if known else _rounding_of_sum(active, counted.in_sum)
    spectrum = seen.spectrum(fused, rtol=rtol, rounding=rounding)
    sigma = spectrum.sigma
    noticed = replace(
        noticed,
        shares=counted.of_all([float(own) for own in shares]),
        bounds=counted.of_all(counted.bounds),
        unlike_experts=experts,
    )
    if not len(sigma):
        return None if known else Merged(torch.zeros_like(fused), noticed)
    faint = (_FAINT * sigma.square().sum() / sigma.sum()).square()
    in_use = float((sigma.square() / (sigma.square() + faint)).sum()) / min(group.shape)
    exponent = (0.75 - in_use / 4.0) * (1.0 - experts**-2.0)
    lift = (sigma.square() + faint) ** (-exponent / 2.0)
    whole = seen.nuclear_norm(stack_weighted(active.updates, counted.in_sum))
    scale = agreement * whole / float((sigma * lift).sum())
    unseen = float(faint) ** (-exponent / 2.0) * scale if known else 0.0
    merged = spectrum.lifted(lift * scale, unseen)
    lifted = sigma * lift * scale
    together = float((seen_lengths * counted.weights).sum())
    if group.base_norm is not None:
        beside = _beside_base(counted, group.base_norm)
        merged = merged.mul_(1.0 - beside)
        if safest is None:
            own = shares / shares.sum()
            for update, weight, share in zip(active.updates, counted.in_sum, own, strict=True):
                merged.add_(update, alpha=beside * weight * float(share))
        else:
            merged.add_(safest, alpha=beside)
        noticed = noticed.going(beside)
    noticed = replace(
        noticed,
        directions_in_use=in_use,
        flattening=exponent,
        lengthening=float(lifted.sum() / sigma.sum()),
        outputs_length=norm(lifted) / together,
    )
    return Merged(merged, noticed)


def _beside_base(counted: Counted, base_norm: float) -> float:
    """Return a = ρ⁴/(ρ⁴ + ⅓⁴), ρ² = Σ s_tw_t‖b_tΔ_t‖² / ‖W₀‖²."""
    norms, bounds = counted.active.norms, counted.bounds
    sizes = [size * own for size, own in zip(norms, bounds, strict=True)]
    energies = torch.tensor(sizes, dtype=torch.float64).square()
    long = sqrt(float((counted.shares * counted.weights * energies).sum()))
    return 1.0 / (1.0 + min(_FAR, _BESIDE_BASE * base_norm / long) ** 4)


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
    return [float(own) for own in ((1.0 + _LONG**-4.0) / (1.0 + times**4.0)) ** 0.25]


def _squared_cosines(active: Active, seen: Metric) -> tuple[Tensor, Tensor]:
    """cos²(Δ_tC₀^½, Δ_uC₀^½) `(T, T)` and ‖Δ_tC₀^½‖ `(T,)`, float64.

    Two updates without outputs have nothing in common.
    """
    dots = seen.dots(active.updates)
    squares = dots.diagonal().clamp_min(torch.finfo(torch.float64).tiny)
    lengths = squares.sqrt()  # the product of two, as that of two squares may be 0
    found = (dots / torch.outer(lengths, lengths)).square()
    return found.clamp_max(1.0).fill_diagonal_(1.0), lengths


def _rounding_of_sum(active: Active, weights: Sequence[float]) -> Rounding:
    """What rounding of the stored weights gives to a weighted sum of the updates."""
    pairs = zip(active.rounding, weights, strict=True)
    return Rounding.together(error.times(weight) for error, weight in pairs)
