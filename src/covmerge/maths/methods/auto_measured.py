"""auto_measured: least squares on the experts' measured inputs, with a flatter spectrum of the outputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import expm1, log1p, sqrt

import torch
from torch import Tensor

from covmerge.base.types import LinearGroup, Merged
from covmerge.maths.covariance.input_share import share_of_inputs, share_used
from covmerge.maths.covariance.measured import measured_equations, measured_equations_cost
from covmerge.maths.linalg.auto import Cost, dots_cost, metric_cost, symmetric_cost
from covmerge.maths.linalg.lapack import norm
from covmerge.maths.linalg.metric import Metric
from covmerge.maths.linalg.spectral import RankRule, rank_tolerance
from covmerge.maths.linalg.symmetric import gram
from covmerge.maths.methods.auto_measured_diagnostics import EqualisedMeasured
from covmerge.maths.methods.closed_form import (
    Active,
    active_experts,
    solve_ridge,
    stack_average,
    stack_weighted,
)
from covmerge.maths.methods.registry import AXIS_BOUND, register

# The second half of `auto_measured`: the spectrum of the least-squares result is made flatter.
#
#     W̄ = W₀ + (1 − a) λ (K + τ²I)^(−q/2) R + a R,  K = R C₀ Rᵀ
#
# R is a merged update `(d_out, d_in)`, C₀ `(d_in, d_in)` weighs the inputs. `docs/auto-measured.md` derives
# the formula.

# An expert with this share of the others' energy counts half, one with less energy counts less.
_SMALL = 0.01
# Updates longer than this many times the usual length are shortened towards that length.
_LONG = 2.0
# A direction of this share of the mean singular value counts as half in use, and is hardly lifted.
_FAINT = 0.01
# Updates whose joint length is this share of the base's weights go half way to least squares.
_OF_WEIGHTS = 1.0 / 3.0
_FAR = 1e60  # largest length ratio; larger ones make no difference


@dataclass(frozen=True)
class Counted:
    """The experts that changed a layer, and the weight of each."""

    group: LinearGroup  # the group with all experts
    active: Active  # the experts that changed the layer
    bounds: list[float]  # b_t
    used: Tensor  # ω_t `(T,)`, float64, the share of the layer's directions that each update uses

    @classmethod
    def of(cls, group: LinearGroup) -> Counted | None:
        """Return how the experts of a group count; None if none changed the layer."""
        active = active_experts(group)
        if not active.updates:
            return None
        pairs = zip(active.updates, active.norms, strict=True)
        used = [share_used(update, size, min(group.shape)) for update, size in pairs]
        return cls(group, active, _bounds(active), torch.tensor(used, dtype=torch.float64))

    @cached_property
    def energies(self) -> Tensor:
        """‖b_tΔ_t‖², float64."""
        sizes = [size * bound for size, bound in zip(self.active.norms, self.bounds, strict=True)]
        return torch.tensor(sizes, dtype=torch.float64).square()

    @cached_property
    def shares(self) -> Tensor:
        """s_t, float64: 1 for an expert as long as the others, 0 for one that hardly changed a layer."""
        energies = self.energies
        return energies / (energies + _SMALL * energies.square().sum() / energies.sum())

    @cached_property
    def weights(self) -> Tensor:
        """w_t, float64, of mean 1 by the shares s_t, so that it is continuous as an update vanishes."""
        weights = torch.tensor(self.active.weights, dtype=torch.float64)
        return weights * float(self.shares.sum() / (self.shares * weights).sum())

    def towards_safest(self) -> float | None:
        """Return a, how far a merged update goes towards R; None if the base's norm is not known.

        1 − a = (1 + (3ρ)⁴)⁻¹, ρ² = Σ s_tw_t‖b_tΔ_t‖²/‖W₀‖².
        """
        base_norm = self.group.base_norm
        if base_norm is None:
            return None
        together = sqrt(float((self.shares * self.weights * self.energies).sum()))
        usual = _OF_WEIGHTS * base_norm
        times = min(_FAR, together / usual) if usual else _FAR
        return -expm1(-log1p(times**4))

    def uneven(self) -> float:
        """Return η = Σ s_t(ω_t − ω̄)² / (Σ s_t ω̄(1 − ω̄)), ω̄ = Σ s_tω_t / Σ s_t, from 0 to 1.

        It is 0 if all experts use equally many of the layer's directions, and 1 if some use all and the
        others none.
        """
        mean = float((self.shares * self.used).sum() / self.shares.sum())
        apart = (self.used - mean).square()
        variance = float((self.shares * apart).sum() / self.shares.sum())
        most = mean * (1.0 - mean)
        return min(1.0, variance / most) if most > 0.0 else 0.0

    def of_all(self, values: Sequence[float]) -> tuple[float, ...]:
        """Return a number per expert of the group, 0 for those that did not change the layer."""
        of_active = dict(zip(map(id, self.active.updates), values, strict=True))
        return tuple(of_active.get(id(update), 0.0) for update in self.group.updates)


def _likeness(dots: Tensor, shares: Tensor) -> tuple[Tensor, float, float]:
    """Return how alike updates are on the inputs, from ⟨Δ_tC₀^½, Δ_uC₀^½⟩ `(T, T)`, float64.

    It is the lengths ‖Δ_tC₀^½‖ `(T,)`, N, the number of experts without a common direction that are
    equivalent to these, and Σ s_t² / Σ s_ts_u cos²(Δ_tC₀^½, Δ_uC₀^½), at most 1. Two updates that give no
    outputs have nothing in common.
    """
    squares = dots.diagonal().clamp_min(torch.finfo(torch.float64).tiny)
    lengths = squares.sqrt()  # the product of two lengths; that of two squares may underflow
    cosines = (dots / torch.outer(lengths, lengths)).square()
    cosines = cosines.clamp_max(1.0).fill_diagonal_(1.0)
    alike = float((shares * (cosines @ shares)).sum())
    experts = max(1.0, float(shares.sum()) ** 2 / alike)
    return lengths, experts, min(1.0, float(shares.square().sum()) / alike)


def equalise(
    counted: Counted,
    fused: Tensor,
    metric: Metric,
    diagnostics: EqualisedMeasured,
    *,
    rtol: float,
) -> Merged | None:
    """Return (1 − a) λ (K + τ²I)^(−q/2) R + a R; a = 0 if the base's norm is not known.

    Args:
        counted: the experts; λ, q and a depend on all of them.
        fused: R `(d_out, d_in)`, of the updates' dtype.
        metric: C₀.
        diagnostics: the facts known before this step.
        rtol: the relative cut-off of R's numerical rank.

    Returns:
        The merged update and its diagnostics; None if C₀R is zero.
    """
    updates = counted.active.updates
    lengths, experts, agreement = _likeness(metric.dots(updates), counted.shares)
    spectrum = metric.spectrum(fused, RankRule(rtol))
    sigma = spectrum.sigma
    if not len(sigma):
        return None
    faint = (_FAINT * sigma.square().sum() / sigma.sum()).square()
    in_use = float((sigma.square() / (sigma.square() + faint)).sum()) / min(counted.group.shape)
    uneven = counted.uneven()
    exponent = (0.75 - in_use / 4.0) * (1.0 - experts**-2.0) * (1.0 - uneven)
    lift = (sigma.square() + faint) ** (-exponent / 2.0)
    pairs = zip(counted.weights, counted.bounds, strict=True)
    in_sum = [float(weight) * bound for weight, bound in pairs]
    whole = metric.nuclear_norm(stack_weighted(updates, in_sum))
    scale = agreement * whole / float((sigma * lift).sum())
    lifted = sigma * lift * scale
    merged = spectrum.lifted(lift * scale, float(faint) ** (-exponent / 2.0) * scale)
    away = counted.towards_safest()
    if away is not None:
        merged = merged.mul_(1.0 - away).add_(fused, alpha=away)
    diagnostics = replace(
        diagnostics,
        shares=counted.of_all([float(share) for share in counted.shares]),
        bounds=counted.of_all(counted.bounds),
        unlike_experts=experts,
        uneven_use=uneven,
        directions_in_use=in_use,
        flattening=exponent,
        lengthening=float(lifted.sum() / sigma.sum()),
        outputs_length=norm(lifted) / float((lengths * counted.weights).sum()),
        towards_least_squares=away,
    )
    return Merged(merged, diagnostics)


def _bounds(active: Active) -> list[float]:
    """Return b_t: 1 for an expert as long as the others, near 2g/‖Δ_t‖ for one many times as long.

    In g an expert counts by its length relative to each of the others, not relative to the longest.
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


_OFF_DIAGONAL = 0.9  # RegMean's default


def _cost(d_out: int, d_in: int, count: int, itemsize: int) -> Cost:
    # As for RegMean, plus a Gram matrix of each update's inputs; then two spectra with what is still
    # held, and how many directions each update uses.
    least, most = sorted((d_out, d_in))
    sums = measured_equations_cost(d_out, d_in, count, itemsize)
    solve = (
        (1 + count) * d_in**3 / 3 + 2.0 * d_out * d_in * d_in + count * symmetric_cost(d_out, d_in)
    )
    used = count * (symmetric_cost(most, least) + least**3 / 3)
    system = Cost(solve + used, (5 * d_in * d_in + 4 * d_out * d_in) * 8)
    matrix = d_out * d_in
    spectra = metric_cost(d_out, d_in, itemsize) + Cost(4.0 * matrix * least, matrix * itemsize)
    held = Cost(0.0, 2 * matrix * itemsize + d_in * d_in * (8 + itemsize))
    return (sums + system).then(spectra.then(dots_cost(d_out, d_in, count, itemsize)) + held)


@register(
    "auto_measured",
    equation="W̄ = W₀ + (1 − a) λ (K + τ²I)^(−q/2) R + a R,  K = R (ΣG̃_t) Rᵀ,  R = (Σ b_tΔ_tC_t)(ΣC_t)⁻¹,  "
    "C_t = G̃_t + s_tψ_t Tr(G̃_t) Δ_tᵀΔ_t/‖Δ_t‖²,  G̃_t = 0.9 E[z zᵀ] + 0.1 diag E[z zᵀ],  "
    "λ, τ, q, a, b_t, s_t and ψ_t of docs/auto-measured.md",
    # The diagonal depends on the axes.
    laws=AXIS_BOUND.copies_give(1.0, "the expert, whatever the inputs of each copy"),
    cost=_cost,
    data="gram",
    diagnostics=EqualisedMeasured,
    base_norm=True,
)
def auto_measured(group: LinearGroup) -> Merged:
    """Merge one layer by least squares on measured inputs, with a flatter spectrum of the outputs.

    W̄ = W₀ + (1 − a) λ (K + τ²I)^(−q/2) R + a R,  K = R C₀ Rᵀ,  with

    R = (Σ w_tb_tΔ_tC_t)(Σ w_tC_t)⁻¹,  C_t = G̃_t + s_tψ_t Tr(G̃_t) Δ_tᵀΔ_t / ‖Δ_t‖²,
    C₀ = Σ w_tG̃_t,  G̃_t = 0.9 G_t + 0.1 diag G_t  (RegMean, §3),
    ψ_t = log det(I + 10⁴ d_in Δ_tᵀΔ_t / ‖Δ_t‖²) / (d_in log(1 + 10⁴))

    and b_t, s_t, N, φ, τ, q, λ and a as in docs/auto-measured.md. G_t = E[z zᵀ] over expert t's inputs of
    this layer is combined with the estimate from its update. The estimate counts as much as G_t if the
    update uses all directions of its inputs, and next to nothing if the update is an adapter. All G̃_t
    together show which outputs are long. If the updates are long relative to the base's weights, the
    merge goes towards R. Equalising makes up for most of what inputs lack if the experts write them
    themselves, and for what RegMean averages away between experts that share it (docs/auto-measured.md).
    If no data reached the changed inputs, updates are averaged.

    An expert whose data did not reach the layer has no part in the merge. One that did not change the
    layer keeps its Gram matrix in the sums, as in `regmean`. The length is still that of the sum of the
    updates; of updates that cancel each other only a R is left.

    Args:
        group: updates `(d_out, d_in)` with measured Gram matrices `(d_in, d_in)`; a weight
            multiplies its expert's Gram matrix, and its update in the sum. ‖W₀‖ as `base_norm`.

    Raises:
        RecipeError: an expert has no Gram matrix.
        TensorError: a Gram matrix has another shape, or the system stays indefinite.

    Departs from the paper: from RegMean in C_t, which is G̃_t there, and in the steps after R; in G̃_t as
        `regmean` does.

    Example:
        >>> import torch
        >>> from covmerge.base.types import Measured
        >>> d = torch.tensor([[2.0, 2.0]])
        >>> data = Measured(torch.diag(torch.tensor([3.0, 1.0])), rows=8, total=3.2)
        >>> group = LinearGroup((d, d), (1.0, 1.0), expert_statistics=(data, data))
        >>> auto_measured(group).delta.round(decimals=4).tolist()
        [[2.0, 2.0]]
    """
    grams = [measured.value for measured in group.expert_statistics]
    heard = [bool(gram.any()) for gram in grams]
    changed = [bool(update.any()) for update in group.updates]
    nothing = group.updates[0].new_zeros(()).expand_as(group.updates[0])
    each = zip(group.updates, heard, strict=True)
    known = replace(group, updates=tuple(u if has_data else nothing for u, has_data in each))
    unchanged = changed.count(False)
    unheard = sum(update and not data for update, data in zip(changed, heard, strict=True))
    counted = Counted.of(known)
    if counted is None:  # the data tell nothing of what was changed
        diagnostics = EqualisedMeasured(unchanged, inputs_known=not unheard, unheard=unheard)
        return Merged(stack_average(group), diagnostics)
    used_shares: list[float] = []

    def covariances() -> Iterator[Tensor]:
        sizes = counted.of_all(counted.active.norms)
        shares = counted.of_all([float(share) for share in counted.shares])
        for update, size, measured, share in zip(known.updates, sizes, grams, shares, strict=True):
            inputs, used = _covariance(update, size, measured, share)
            used_shares.append(used)
            yield inputs

    bounds = counted.of_all(counted.bounds)
    normal = measured_equations(known.updates, covariances(), group.weights, lengths=bounds)
    fused = solve_ridge(normal)[0]
    del normal  # frees the sums before the spectra are computed
    inputs = fused.new_zeros(grams[0].shape)
    for measured, weight in zip(grams, group.weights, strict=True):
        inputs.add_(measured, alpha=weight)
    rtol = rank_tolerance(group.shape, fused.dtype, None, group.rounding)
    diagnostics = EqualisedMeasured(
        unchanged, inputs_known=True, unheard=unheard, updates_told=tuple(used_shares)
    )
    found = equalise(counted, fused, Metric.of(_shrunk(inputs)), diagnostics, rtol=rtol)
    return Merged(fused, diagnostics) if found is None else found


def _covariance(
    update: Tensor, size: float, measured: Tensor, share: float
) -> tuple[Tensor, float]:
    """Return C_t = G̃_t + s_tψ_t Tr(G̃_t) Δ_tᵀΔ_t/‖Δ_t‖² `(d_in, d_in)`, and ψ_t."""
    inputs, d_in = _shrunk(measured), len(measured)
    if share == 0.0:
        return inputs, 0.0
    update_gram = gram(update * (sqrt(d_in) / size))
    used = share_of_inputs(update_gram, d_in)
    mean = float(inputs.diagonal().mean())
    return inputs.add_(update_gram, alpha=share * used * mean), used


def _shrunk(measured: Tensor) -> Tensor:
    """Return G̃ = 0.9 G + 0.1 diag G."""
    found = _OFF_DIAGONAL * measured
    found.diagonal().copy_(measured.diagonal())
    return found
