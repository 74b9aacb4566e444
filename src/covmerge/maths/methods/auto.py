r"""covmerge's own method: nothing to tune.

Least squares on the experts' outputs, as the covariance methods do; then the spectrum of what came out is
brought nearer to flat, as the spectral methods do: by as much as the experts differ, and by more where
their updates use few of a layer's directions. `docs/auto.md` derives it.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from covmerge.base.types import LinearGroup, Merged
from covmerge.maths.covariance.told import share_told
from covmerge.maths.linalg.auto import (
    Cost,
    dots_cost,
    metric_cost,
    precision_choice,
    solve_cost,
    sums_cost,
    symmetric_cost,
    system_choice,
)
from covmerge.maths.linalg.metric import Metric
from covmerge.maths.linalg.spectral import rank_tolerance
from covmerge.maths.linalg.symmetric import add_gram_, mirror_
from covmerge.maths.methods.auto_batched import auto_batched
from covmerge.maths.methods.auto_least_squares import least_squares, roots_of_told
from covmerge.maths.methods.auto_noticed import Equalised
from covmerge.maths.methods.closed_form import Active
from covmerge.maths.methods.equalise import Counted, equalise
from covmerge.maths.methods.registry import Laws, register


def _cost(d_out: int, d_in: int, count: int, itemsize: int) -> Cost:
    # With a C₀ that is made of the updates. Memory as where float32 could not tell. What C₀ sees of the
    # base's weights is one more of what it sees of the updates.
    matrix, route = d_out * d_in, system_choice(d_out, d_in, count, 8).taken
    least, most = sorted((d_out, d_in))
    sums = sums_cost(route, d_out, d_in, count, 8)
    solve = solve_cost(route, d_out, d_in, count, 8)
    spectra = metric_cost(d_out, d_in, itemsize)
    dots = dots_cost(d_out, d_in, count + 1, itemsize)
    return Cost(
        precision_choice(d_out, d_in, count, itemsize).cost.flops
        + spectra.flops
        + dots.flops
        + count * symmetric_cost(d_out, d_in)
        + count * (symmetric_cost(most, least) + least**3 / 3)
        + 4.0 * matrix * least,
        max(
            2 * matrix * 8 + sums.workspace + solve.workspace,
            spectra.workspace + matrix * itemsize,
            dots.workspace,
        )
        + 2 * matrix * itemsize
        + d_in * d_in * (8 + itemsize),
        spectra.eigen,
    )


@register(
    "auto",
    equation="W̄ = W₀ + (1 − a) M + a Δ̄,  M = λ (K + τ²I)^(−q/2) R,  K = R C₀ Rᵀ,  "
    "R = (Σ b_tΔ_tC_t)(ΣC_t)⁻¹,  C_t = Δ_tᵀΔ_t/‖Δ_t‖² + 0.1 I/d_in,  q = (¾ − φ/4)(1 − N⁻²)(1 − η),  "
    "1 − a = (1 + (ν/0.15)⁴)^(−¼) (1 + ρ⁴)⁻¹,  ν = ‖MC₀^½‖/‖W₀C₀^½‖,  ρ² = Σ‖b_tΔ_t‖²/‖W₀‖²; without the "
    "base's inputs 1 − a = (1 + (3ρ)⁴)⁻¹",
    laws=Laws(
        order_invariant=True,
        scale_equivariant=True,
        rotation_equivariant=True,
        replicas=lambda parameters, count: 1.0,
        replicas_text="the expert",
    ),
    cost=_cost,
    factored="both",
    batched=auto_batched,
    noticed=Equalised,
    base_inputs=True,
    base_norm=True,
)
def auto(group: LinearGroup) -> Merged:
    """Merge one linear layer by least squares on the outputs, whose spectrum is brought nearer to flat.

    W̄ = W₀ + (1 − a) M + a Δ̄,  M = λ (K + τ²I)^(−q/2) R,  K = R C₀ Rᵀ,  with

    R = (Σ s_tw_t b_tΔ_tC_t)(Σ s_tw_t C_t)⁻¹,  C_t = Δ_tᵀΔ_t / ‖Δ_t‖² + 0.1 I / d_in,
    s_t = ‖b_tΔ_t‖² / (‖b_tΔ_t‖² + 0.01 Σ‖b_sΔ_s‖⁴ / Σ‖b_sΔ_s‖²),
    b_t = ((1 + 2⁻⁴) / (1 + (‖Δ_t‖/2g)⁴))^¼,  g = exp(Σ c_t log ‖Δ_t‖ / Σ c_t),
    c_t = Σ_(u≠t) ‖Δ_u‖^¼ ‖Δ_t‖² / (‖Δ_t‖² + 0.01 ‖Δ_u‖²),
    σ² the eigenvalues of K,  τ = 0.01 Σσ² / Σσ,  φ = Σ σ²/(σ² + τ²) / min(d_out, d_in),
    q = (¾ − φ/4)(1 − N⁻²)(1 − η),  N = (Σ s_t)² / Σ s_ts_u cos²(Δ_tC₀^½, Δ_uC₀^½),
    η = Σ s_t(ω_t − ω̄)² / (Σ s_t ω̄(1 − ω̄)),  ω̄ = Σ s_tω_t / Σ s_t,
    ω_t = log det(I + 10⁴ m Δ_tᵀΔ_t / ‖Δ_t‖²) / (m log(1 + 10⁴)),  m = min(d_out, d_in),
    λ such that the outputs' singular values add up to those of (Σ w_tb_tΔ_t) C₀^½, times
    Σ s_t² / Σ s_ts_u cos²(Δ_tC₀^½, Δ_uC₀^½),
    Δ̄ = Σ s_tw_tb_tΔ_t / Σ s_tw_t,  1 − a = (1 + (ν/0.15)⁴)^(−¼) (1 + ρ⁴)⁻¹,
    ν = ‖MC₀^½‖ / ‖W₀C₀^½‖,  ρ² = Σ s_tw_t ‖b_tΔ_t‖² / ‖W₀‖²,
    and where C₀ was not measured 1 − a = (1 + (3ρ)⁴)⁻¹.

    R disturbs the experts' outputs least, if updates tell of inputs (ACTMat, ACE). It gives what
    experts share its full length and leaves the rest behind; (K + τ²I)^(−q/2) brings that forward.
    C₀ says what counts as long: Ĉ + 0.1 (1 − ω̄ + 10⁻⁴) I, where Ĉ, E[z zᵀ] of the layer's inputs in the
    base, of mean eigenvalue 1, comes from a statistics file of the base (`covmerge collect BASE`), and what
    its random inputs do not show is unknown, as far as the updates do not use all directions, ω̄ = 1; or
    without one ψĜ + (1 − ψ)I: Ĝ, Σ s_tw_t Δ_tᵀΔ_t / ‖Δ_t‖² of mean eigenvalue 1, is what
    the updates tell of the inputs, and ψ = log det(I + 10⁴Ĝ) / (d_in log(1 + 10⁴))
    how much of the layer's inputs they use, 1 for all alike. N counts the experts by how unlike their
    updates are: one expert alone, or copies of one, have N = 1 and come back as they are. φ is the
    share of the layer's directions that the updates use: full fine-tunes use most, where the weakest
    are noise and q goes to ½; adapters use few, and q goes to ¾. ω_t is such a share of one update alone,
    by volume: where full fine-tunes are merged with adapters the long directions are the adapters' and the
    short ones the others', and what is brought nearer is not what averaging made unlike; η, 1 at most, is
    how much of that there is. An expert whose update vanishes
    leaves all sums, s_t → 0, without a jump. One that is many times as long as the others is brought to
    about twice their length, b_t; lengths that differ by less stay nearly what they are. All this holds
    while what is added is small beside what the base's weights give. Where the outputs of M are half as
    long as those of W₀, ν = ½, the layers behind get something else than they know, and nothing is as safe
    as the average Δ̄: M is held to about 0.15 of the base's outputs, and what is left of 1 goes to Δ̄.
    Where updates together are longer than W₀ itself, ρ > 1, nothing is left of M; where nobody knows
    outputs, their lengths alone have to tell, and that begins at a third. Of short updates a is a few per
    cent at most. It is 0 where the base's weights are not read, and outside the row of blocks.

    Args:
        group: updates `(d_out, d_in)`, and Ĉ `(d_in, d_in)` of any scale as `inputs`; a weight
            multiplies its expert's covariance and its update in the sum (weights are brought to mean 1
            first, each counted s_t times). ‖W₀‖ as `base_norm` and ‖W₀Ĉ^½‖ as
            `base_outputs`.

    Departs from the paper: there is none; `docs/auto.md` derives it, and `docs/auto-log.md` has what
    was tried.

    Example:
        >>> d = torch.tensor([[1.0, 2.0], [3.0, 5.0]])
        >>> torch.allclose(auto(LinearGroup((d, d), weights=(1.0, 1.0))).delta, d, atol=1e-6)
        True
    """
    first = group.updates[0]
    counted = Counted.of(group)
    if counted is None:
        return Merged(torch.zeros_like(first), Equalised(len(group.updates)))
    base_inputs, told = group.base_inputs, None
    if base_inputs is not None and not counted.inputs_mean > 0.0:  # nothing ever came in
        return auto(_unmeasured(group))
    known = base_inputs is not None
    if base_inputs is None:
        base_inputs, told = _told(counted.active, counted.shares)
    rtol = rank_tolerance(group.shape, first.dtype, None, group.rounding)
    fused = least_squares(counted, rtol).to(first.dtype)
    noticed = Equalised(counted.active.unchanged, inputs_known=known, inputs_told=told)
    seen = Metric.of(base_inputs, counted.untold)
    found = equalise(counted, fused, seen, noticed, rtol=rtol)
    return auto(_unmeasured(group)) if found is None else found  # updates that cancel each other


def _unmeasured(group: LinearGroup) -> LinearGroup:
    """The group as it is where nobody has measured the base's inputs."""
    return replace(group, base_inputs=None, base_inputs_mean=None, base_outputs=None)


def _told(active: Active, shares: Tensor) -> tuple[Tensor, float]:
    """ψĜ + (1 − ψ)I, of the updates' dtype, and ψ."""
    first = active.updates[0]
    gram = first.new_zeros(first.shape[1], first.shape[1])
    for update, times in zip(active.updates, roots_of_told(active, shares), strict=True):
        add_gram_(gram, update * times)
    told = share_told(mirror_(gram), active.d_in)
    gram.mul_(told).diagonal().add_(1.0 - told)
    return gram, told
