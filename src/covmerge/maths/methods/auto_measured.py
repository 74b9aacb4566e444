"""Least squares on the experts' measured inputs, whose outputs' spectrum is made flatter."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import sqrt

from torch import Tensor

from covmerge.base.types import LinearGroup, Merged
from covmerge.maths.covariance.input_share import share_of_inputs
from covmerge.maths.covariance.measured import (
    measured_equations,
    measured_equations_cost,
    measured_values,
)
from covmerge.maths.linalg.auto import Cost, dots_cost, metric_cost, symmetric_cost
from covmerge.maths.linalg.metric import Metric
from covmerge.maths.linalg.spectral import rank_tolerance
from covmerge.maths.linalg.symmetric import gram
from covmerge.maths.methods.auto_measured_diagnostics import EqualisedMeasured
from covmerge.maths.methods.closed_form import solve_ridge, stack_average
from covmerge.maths.methods.equalise import Counted, equalise
from covmerge.maths.methods.registry import Laws, register

_OFF_DIAGONAL = 0.9  # RegMean's default


def _cost(d_out: int, d_in: int, count: int, itemsize: int) -> Cost:
    # As RegMean's, with a Gram matrix of each update's inputs; then two spectra with what is left beside
    # them, and how many directions each update uses.
    least, most = sorted((d_out, d_in))
    sums = measured_equations_cost(d_out, d_in, count, itemsize)
    solve = (
        (1 + count) * d_in**3 / 3 + 2.0 * d_out * d_in * d_in + count * symmetric_cost(d_out, d_in)
    )
    spectra, dots = (
        metric_cost(d_out, d_in, itemsize),
        dots_cost(d_out, d_in, count, itemsize),
    )
    system = (5 * d_in * d_in + 4 * d_out * d_in) * 8
    return Cost(
        sums.flops
        + solve
        + spectra.flops
        + dots.flops
        + count * (symmetric_cost(most, least) + least**3 / 3)
        + 4.0 * d_out * d_in * least,
        max(
            sums.workspace + system,
            2 * d_out * d_in * itemsize
            + d_in * d_in * (8 + itemsize)
            + max(spectra.workspace + d_out * d_in * itemsize, dots.workspace),
        ),
        spectra.eigen,
    )


@register(
    "auto_measured",
    equation="W̄ = W₀ + (1 − a) λ (K + τ²I)^(−q/2) R + a R,  K = R (ΣG̃_t) Rᵀ,  R = (Σ b_tΔ_tC_t)(ΣC_t)⁻¹,  "
    "C_t = G̃_t + s_tψ_t Tr(G̃_t) Δ_tᵀΔ_t/‖Δ_t‖²,  G̃_t = 0.9 E[z zᵀ] + 0.1 diag E[z zᵀ],  "
    "λ, τ, q, a, b_t, s_t and ψ_t of docs/auto-measured.md",
    laws=Laws(
        order_invariant=True,
        scale_equivariant=True,
        rotation_equivariant=False,  # the diagonal belongs to the axes
        replicas=lambda parameters, count: 1.0,
        replicas_text="the expert, whatever the inputs of each copy",
    ),
    cost=_cost,
    data="gram",
    diagnostics=EqualisedMeasured,
    base_norm=True,
)
def auto_measured(group: LinearGroup) -> Merged:
    """Merge one linear layer by least squares on measured inputs, whose outputs' spectrum is made flatter.

    W̄ = W₀ + (1 − a) λ (K + τ²I)^(−q/2) R + a R,  K = R C₀ Rᵀ,  with

    R = (Σ w_tb_tΔ_tC_t)(Σ w_tC_t)⁻¹,  C_t = G̃_t + s_tψ_t Tr(G̃_t) Δ_tᵀΔ_t / ‖Δ_t‖²,
    C₀ = Σ w_tG̃_t,  G̃_t = 0.9 G_t + 0.1 diag G_t  (RegMean, §3),
    ψ_t = log det(I + 10⁴ d_in Δ_tᵀΔ_t / ‖Δ_t‖²) / (d_in log(1 + 10⁴))

    and b_t, s_t, N, φ, τ, q, λ and a as docs/auto-measured.md has them. G_t = E[z zᵀ] over expert t's
    inputs of this layer stands beside what its update tells of them, which counts as much where the update
    uses all directions of its inputs, and next to nothing where it is an adapter's. All G̃_t together say
    which outputs are long. Where updates are long beside the base's weights the merge goes to R.
    Equalising makes up for most of what inputs lack that the experts write themselves, and for what RegMean
    averages of experts that share it (docs/auto-measured.md). Where no data reached what was changed,
    updates are averaged.

    An expert whose data did not reach the layer has no part in it. One that did not change it keeps its
    Gram matrix in the sums, as in `regmean`; the length is still that of the updates' sum, and of updates
    that cancel each other no more than a R is left.

    Args:
        group: updates `(d_out, d_in)` with measured Gram matrices `(d_in, d_in)`; a weight
            multiplies its expert's Gram matrix, and its update in the sum. ‖W₀‖ as `base_norm`.

    Raises:
        RecipeError: an expert has no Gram matrix.
        TensorError: a Gram matrix has another shape, or the system stays indefinite.

    Departs from the paper: RegMean's, in C_t, which is G̃_t there, and in what is made of R; in G̃_t as
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
    grams = measured_values(group, "gram", method="auto_measured")
    heard = [bool(gram.any()) for gram in grams]
    changed = [bool(update.any()) for update in group.updates]
    nothing = group.updates[0].new_zeros(()).expand_as(group.updates[0])
    each = zip(group.updates, heard, strict=True)
    known = replace(group, updates=tuple(u if has_data else nothing for u, has_data in each))
    unchanged = changed.count(False)
    unheard = sum(update and not data for update, data in zip(changed, heard, strict=True))
    counted = Counted.of(known)
    if counted is None:  # data says nothing of what was changed, if anything was
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
    del normal  # the sums are not held beside the spectra
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
    """C_t = G̃_t + s_tψ_t Tr(G̃_t) Δ_tᵀΔ_t/‖Δ_t‖² `(d_in, d_in)`, and ψ_t."""
    inputs, d_in = _shrunk(measured), len(measured)
    if share == 0.0:
        return inputs, 0.0
    update_gram = gram(update * (sqrt(d_in) / size))
    used = share_of_inputs(update_gram, d_in)
    mean = float(inputs.diagonal().mean())
    return inputs.add_(update_gram, alpha=share * used * mean), used


def _shrunk(measured: Tensor) -> Tensor:
    """G̃ = 0.9 G + 0.1 diag G."""
    found = _OFF_DIAGONAL * measured
    found.diagonal().copy_(measured.diagonal())
    return found
