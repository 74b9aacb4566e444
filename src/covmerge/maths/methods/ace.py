"""ACE-Merging: adaptive covariance estimation, collective prior and spectral refinement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import sqrt
from statistics import fmean
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from covmerge.base.types import Frame, LinearGroup, Merged, Rounding
from covmerge.maths.covariance.estimate import (
    TRACE_FLOOR,
    Covariance,
    Gate,
    Statistic,
    centered_gram,
    heterogeneity,
)
from covmerge.maths.covariance.estimate import gate as heterogeneity_gate
from covmerge.maths.covariance.normal import NormalEquations, collective_prior, normal_equations
from covmerge.maths.linalg.auto import Cost, eigh_cost, solve_cost, sums_cost, system_choice
from covmerge.maths.linalg.cholesky import Cholesky, condition_number
from covmerge.maths.linalg.joint import joint_directions
from covmerge.maths.linalg.lapack import square_norm
from covmerge.maths.linalg.pinv import largest_eigenvalue
from covmerge.maths.linalg.spectral import (
    LeadingDirections,
    has_above,
    leading_directions,
    rank_tolerance,
)
from covmerge.maths.linalg.symmetric import gram
from covmerge.maths.methods.ace_diagnostics import AceDiagnostics
from covmerge.maths.methods.closed_form import Active, active_experts, solve_ridge, stack_weighted
from covmerge.maths.methods.registry import BOUND, Reference, register

# Least share of an update's energy that centring must leave. The mean of random rows has 1/d_out of it.
BLIND = 1e-2
# An expert whose ridge is this many times its energy is left out of the sums. The published code's outputs
# to which covmerge is compared go up to 125 (`golden/ace_eps0.04`).
DROWNED = 200.0
# The condition number up to which sums and solve in float32 agree with float64's to 2e-3. In d_in axes the
# error is 1.5 eps times the condition number, in the row space of the updates a hundredth of that
# (tests/methods/test_precision.py).
FLOAT32_CONDITION = 1e4
# The largest factor by which a solve may amplify the rounding of stored weights; beyond it the solve leaves
# that rounding out. The value is an order of magnitude, and was compared with no other.
AMPLIFIED = 10.0
# σ/σ₁ of a direction that cannot be rounding of a well-conditioned solve.
_CLEAR = 1e-2


def ridge_share(covariances: Sequence[Covariance], energies: Sequence[float], d_in: int) -> float:
    """Return the largest share of the ridge in an expert's covariance: ε d_in / Tr Δ̃_tᵀΔ̃_t.

    From about 1 on, ACE follows the ridge instead of that expert.
    """
    pairs = zip(covariances, energies, strict=True)
    return max(c.ridge * d_in / (c.scale * energy + TRACE_FLOOR) for c, energy in pairs)


def known_rank(active: Active, shape: Sequence[int], dtype: torch.dtype, enough: int) -> int:
    """Return the numerical rank of the updates' row space, all scaled to norm 1 so that none is lost.

    If the longest update alone has `enough` directions, `enough` is returned: the singular values of
    updates stacked below each other are no smaller than those of one of them.
    """
    rtol = rank_tolerance(shape, dtype, None, active.rounding)
    errors = [e.times(1 / size) for e, size in zip(active.rounding, active.norms, strict=True)]
    # Stacked updates of norm 1 have no singular value above √T.
    floor = max(rtol * sqrt(len(errors)), Rounding.together(errors).edge)
    longest = max(range(len(errors)), key=active.norms.__getitem__)
    if has_above(active.updates[longest], enough, floor * active.norms[longest]):
        return enough
    units = [update.mT / size for update, size in zip(active.updates, active.norms, strict=True)]
    return max(1, len(joint_directions(units, rtol=rtol, rounding=errors).sigma))


def _cost(d_out: int, d_in: int, count: int, itemsize: int) -> Cost:
    # The refinement is counted in full, though only layers whose gate fires pay for it.
    side = min(d_out, d_in)
    matrix = d_out * d_in * itemsize
    route = system_choice(d_out, d_in, count, itemsize).taken
    usual, exact = (
        sums_cost(route, d_out, d_in, count, size) + solve_cost(route, d_out, d_in, count, size)
        for size in (itemsize, 8)
    )
    residual_flops = 2.0 * d_out * d_in * d_in
    # The test for amplified rounding, which is done for experts from files.
    rounding_flops = 2.0 * count * side * d_out * d_in
    # Badly conditioned systems are formed and solved again in float64: memory counts that, the usual time
    # does not.
    solved = Cost(
        usual.flops + residual_flops + rounding_flops, 3 * d_out * d_in * 8 + exact.workspace
    )
    # The sums are held during the solve but not during the spectrum; residual and W̄_pre during both.
    return solved.then(eigh_cost(side) + Cost(4.0 * side * d_out * d_in, 4 * matrix))


@register(
    "ace",
    equation="W̄ = W₀ + (Σ Δ̃_t C_t)(Σ C_t + 𝟏cᵀ)⁻¹ [+ σ̄ U_kV_kᵀ if γ > τ],  "
    "C_t = Δ̃_tᵀΔ̃_t + εI [over Tr Δ̃_tᵀΔ̃_t if γ > τ]",
    reference=Reference(
        title="ACE-Merging: Data-Free Model Merging with Adaptive Covariance Estimation",
        authors=(
            "Bo Xu",
            "Haotian Wu",
            "Hehai Lin",
            "Weiquan Huang",
            "Beier Zhu",
            "Yao Shu",
            "Chengwei Qin",
        ),
        venue="CVPR 2026",
        arxiv="2603.02945",
        equations="Eqs. 5–19, Algorithm 1",
    ),
    laws=BOUND.copies_give(
        None,
        "near the expert, not equal to it: centring takes off the mean row and the prior shrinks",
    ),
    cost=_cost,
    factored="both",
    diagnostics=AceDiagnostics,
    family_defaults={"gpt2": {"eps": 4e-2}, "roberta-base": {"eps": 2e-4}},
)
def ace(
    group: LinearGroup,
    *,
    eps: Annotated[float, Field(ge=0, description="ε, ridge of every covariance")] = 1e-5,
    tau: Annotated[
        float | None,
        Field(ge=0, description="τ, threshold of γ; by default 0.3 (paper) or 1.0 (scale_free)"),
    ] = None,
    k_frac: Annotated[
        float, Field(gt=0, le=1, description="share of min(d_out, d_in) that is refined")
    ] = 0.3,
    rank_rtol: Annotated[
        float | None,
        Field(
            ge=0,
            lt=1,
            description="singular values at or below rank_rtol · σ₁ are never refined; by default "
            "max(d_out, d_in) · machine epsilon, 0 refines k directions whatever the rank",
        ),
    ] = None,
    normalize: Annotated[
        bool, Field(description="let γ > τ put the experts on one scale; false: the gate is off")
    ] = True,
    prior: Annotated[bool, Field(description="add the collective structural prior")] = True,
    refine: Annotated[bool, Field(description="refine the spectrum where γ > τ")] = True,
    gate: Annotated[
        Statistic,
        Field(description="γ as in Eq. 7, or the variance of log-energies alone"),
    ] = "paper",
) -> Merged:
    """Merge one linear layer by ACE-Merging.

    W̄ = W₀ + (Σ Δ̃_t Σ̂_t,reg)(Σ Σ̂_t,reg + C_agg)⁻¹  (ACE, Eq. 14), with centred updates Δ̃_t (Eq. 5),
    Σ̂_t,reg = Δ̃_tᵀΔ̃_t + εI (Eqs. 6, 10) and C_agg = 𝟏cᵀ (Eq. 11). Where the experts' scales differ,
    γ > τ (Eq. 7), each Σ̂_t,reg is divided by Tr Δ̃_tᵀΔ̃_t (Eqs. 8, 9), C_agg by the mean energy
    (Eqs. 12, 13), and σ_iso U_kV_kᵀ is added (Eqs. 15–19).

    The paper's ablation (Table 4): E1 `normalize=False, prior=False`; E2 `prior=False,
    refine=False`; E3 `refine=False`; E4 the defaults.

    An expert that hardly changed a layer, ‖Δ_t‖² below ε d_in, is a danger where the gate fires: its
    ε over its trace is in Σ̄ of Eq. 16 but not in Σ̃_t, so that Δ_res turns against all experts. The
    published code does so too. `ridge_share` in the diagnostics, ε d_in over the least trace, shows how
    near a layer is to that. From about 1 on, take a smaller `eps`, or `refine: false`.

    Args:
        group: updates `(d_out, d_in)`; a weight multiplies its expert's covariance (weights are
            scaled to mean 1 first).
        eps: ε in squared units of the updates; 4e-2 for GPT-2 and 2e-4 for RoBERTa-base in the
            paper, 1e-5 for everything else.
        k_frac: k = ⌊k_frac · min(d_out, d_in)⌋, at least 1, at most the numerical rank.
        gate: the paper's γ depends on the absolute scale of the updates (it fires for equal norms
            near 1); `scale_free` does not.

    Raises:
        TensorError: the system is singular beyond repair by jitter (only with a tiny `eps`).

    Departs from the paper: an expert that did not change the layer is left out of the sums. So is an
    expert whose estimate tells nothing: centring leaves less than a hundredth of its energy (one output
    row, rows that are nearly alike), or where γ > τ its ε is more than 200 times its energy. ACE would
    lose the first, and would let the ridge of the second, divided by its trace, turn Δ_res into thousands
    of times the updates. Here they are averaged, Δ_t/T, and `averaged` in the diagnostics counts them.
    If the solve would amplify rounding of stored weights more than ten times, it is done within the inputs
    Q `(d_in, k)` that are above this rounding, eigenvectors of Σ C_t: W̄ = W₀ + N Q (QᵀSQ)⁻¹Qᵀ, with N and
    S the two sums of Eq. 14; `below_rounding` counts the other directions. 1 ≤ k ≤ rank, which is at most
    that of the updates; γ = 0 for norms that agree to rounding. The variance of Eq. 7 is the unbiased one,
    as in the published code.

    Example:
        >>> import torch
        >>> d = torch.tensor([[1.0, 2.0, 0.0], [-1.0, -2.0, 0.5]]) / 100
        >>> merged = ace(LinearGroup((d, 2 * d), weights=(1.0, 1.0)))
        >>> merged.delta.shape, merged.stats["gate_fired"]
        (torch.Size([2, 3]), False)
    """
    first, frame = group.updates[0], group.frame
    changed = active_experts(group)
    # Eqs. 5–7
    active, gamma = _estimated(changed, frame, eps=eps, tau=tau, gate=gate, normalize=normalize)
    averaged = len(changed.updates) - len(active.updates)
    fired = gamma.fired and normalize
    diagnostics = AceDiagnostics(changed.unchanged, averaged, gamma.gamma, fired)
    if not active.updates:
        rest = _average_of_the_rest(changed, active)
        return Merged(torch.zeros_like(first) if rest is None else rest, diagnostics)

    covariances = _covariances(active, frame, eps=eps, normalize=fired)  # Eqs. 5–10
    solve = partial(_solve, active, group=group, prior=prior, scaled=fired, refine=fired and refine)
    pre, exact = solve(covariances), [replace(c, exact=True) for c in covariances]
    if pre.condition > FLOAT32_CONDITION and first.dtype != torch.float64:
        del pre
        pre = solve(exact)
    if _amplifies_rounding(active, covariances, pre):
        del pre
        pre = solve(exact, above_rounding=True)
    merged = pre.merged.to(first.dtype)
    diagnostics = replace(
        diagnostics,
        route=pre.route,
        spread=heterogeneity(active.norms, "scale_free"),
        ridge_share=ridge_share(covariances, [c.energy() for c in covariances], group.shape[1]),
        rcond=1.0 / pre.condition,
        precision=str(pre.merged.dtype).removeprefix("torch."),
        jitter=pre.factor.jitter,
        below_rounding=pre.below_rounding,
    )
    residual = pre.residual
    del pre
    if residual is not None:
        fused = residual.to(first.dtype).add_(merged)  # Eqs. 15–17
        top = _refinement_directions(fused, active, group.shape, k_frac, rank_rtol)
        sigma_iso = float(top.sigma[: top.k].mean())
        merged.add_(top.isometry, alpha=sigma_iso)  # Eqs. 18, 19
        diagnostics = replace(diagnostics, k=top.k, rank=top.rank, sigma_iso=sigma_iso)
    rest = _average_of_the_rest(changed, active)
    return Merged(merged if rest is None else merged.add_(rest), diagnostics)


def _estimated(
    changed: Active,
    frame: Frame | None,
    *,
    eps: float,
    tau: float | None,
    gate: Statistic,
    normalize: bool,
) -> tuple[Active, Gate]:
    """Return the experts whose updates tell of their inputs, and the gate over them (ACE, Eq. 7)."""
    energies = [centered_gram(update, frame=frame).energy() for update in changed.updates]
    pairs = zip(energies, changed.norms, strict=True)
    informative = [t for t, (energy, size) in enumerate(pairs) if energy > BLIND * size**2]
    found = heterogeneity_gate([changed.norms[t] for t in informative], tau=tau, statistic=gate)
    if found.fired and normalize:
        informative = [t for t in informative if eps <= DROWNED * energies[t]]
        found = heterogeneity_gate([changed.norms[t] for t in informative], tau=tau, statistic=gate)
    return changed.only(informative) if len(informative) < len(changed.updates) else changed, found


def _average_of_the_rest(changed: Active, active: Active) -> Tensor | None:
    """Return Σ w_tΔ_t / T over the experts that are in no sum, T the number that changed the layer."""
    summed = {id(update) for update in active.updates}
    rest = [
        (update, weight / len(changed.updates))
        for update, weight in zip(changed.updates, changed.weights, strict=True)
        if id(update) not in summed
    ]
    return stack_weighted(*zip(*rest, strict=True)) if rest else None


@dataclass(frozen=True)
class _Preliminary:
    """W̄_pre and Δ_res `(d_out, d_in)` (ACE, Eqs. 14 and 17), and how the system was solved."""

    merged: Tensor
    residual: Tensor | None
    factor: Cholesky
    condition: float
    route: str
    below_rounding: int


def _solve(
    active: Active,
    covariances: Sequence[Covariance],
    *,
    group: LinearGroup,
    prior: bool,
    scaled: bool,
    refine: bool,
    above_rounding: bool = False,
) -> _Preliminary:
    """Form the sums and solve them, in the dtype of the covariances' roots (ACE, Eqs. 11–17).

    With `above_rounding`, solve within the inputs that are above the rounding of stored weights.
    """
    ones_in = None if group.frame is None else group.frame.ones_in
    normal = normal_equations(covariances)
    below_rounding = 0
    if above_rounding:
        known = len(normal.gram)
        normal = normal.within(*active.above_rounding(covariances, normal.gram))
        below_rounding = known - len(normal.gram)
    ones_in = ones_in if ones_in is None else ones_in.to(normal.gram.dtype)
    energy = fmean(size**2 for size in active.norms) if scaled else 1.0  # Eq. 12
    prior_row = None
    if prior:
        prior_row = collective_prior(normal, group.shape[1], energy=energy, ones=ones_in)  # 11, 13
    # Before the solve, so that the system and its factor are freed when the spectrum is computed.
    residual = _structural_residual(active, covariances, normal) if refine else None
    largest = largest_eigenvalue(normal.gram)
    merged, factor = solve_ridge(normal, prior_row, ones_in)  # Eq. 14
    condition = condition_number(largest, factor, ridge=normal.ridge, enough=FLOAT32_CONDITION)
    return _Preliminary(merged, residual, factor, condition, normal.route, below_rounding)


def _amplifies_rounding(
    active: Active, covariances: Sequence[Covariance], pre: _Preliminary
) -> bool:
    """Return whether the solve amplifies the rounding E_t of stored weights by more than `AMPLIFIED`.

    To first order W̄_pre has Σ s_t(Δ_t − W̄_pre)Δ_tᵀE_t(Σ C_t)⁻¹ of it: where experts disagree, that is
    σ₁(Δ_t)²/ε times as much, on inputs that only rounding shows.
    """
    energies = [error.energy for error in active.rounding]
    if not any(energies):
        return False
    entries, made = active.updates[0].numel(), 0.0
    for expert, energy in zip(covariances, energies, strict=True):
        apart = expert.update - pre.merged.to(expert.update.dtype)
        made += expert.scale**2 * energy / entries * _square_norm_of_product(apart, expert.update)
    return made * pre.factor.square_norm_of_inverse() > AMPLIFIED**2 * sum(energies)


def _square_norm_of_product(one: Tensor, other: Tensor) -> float:
    """Return ‖ABᵀ‖²_F, computed on the shorter side."""
    if len(one) <= one.shape[1]:
        return square_norm(one @ other.mT)
    return float(gram(one).mul_(gram(other)).sum(dtype=torch.float64))


def _covariances(
    active: Active, frame: Frame | None, *, eps: float, normalize: bool
) -> list[Covariance]:
    """Return Σ̂_t,reg of every expert (ACE, Eqs. 5–10)."""
    estimates = [centered_gram(update, eps=eps, frame=frame) for update in active.updates]
    if normalize:
        # Over Tr RᵀR, with the ridge divided too (Eqs. 8 and 9).
        estimates = [each.times(1.0 / (each.energy() + TRACE_FLOOR)) for each in estimates]
    return [e.times(weight) for e, weight in zip(estimates, active.weights, strict=True)]


def _structural_residual(
    active: Active, covariances: Sequence[Covariance], normal: NormalEquations
) -> Tensor:
    r"""Return Δ_res = Σ_t Δ_t (Σ̃_t − Σ̄_reg) `(d_out, d_in)` (ACE, Eqs. 15–17).

    It is formed without any Σ̃_t: with R_t = Δ_t − 𝟏μ_tᵀ,
    Σ Δ_tΣ̃_t = (Σ R_tC_t − Σ ε_tR_t) + 𝟏 Σ s_t (μ_tᵀR_tᵀ)R_t  and  Σ Δ_tΣ̄ = (Σ Δ_t)(Σ C_t)/T.
    """
    count = len(covariances)
    total = stack_weighted(active.updates, [1.0] * count).to(normal.gram.dtype)
    residual = normal.apply(total).mul_(-1.0 / count)
    del total
    residual.add_(normal.lift(normal.numerator))
    for covariance in covariances:
        root, mean = covariance.root(), covariance.mean
        assert mean is not None, "ACE centres every update (Eq. 5)"
        residual.add_(root, alpha=-covariance.ridge)
        row = ((root @ mean.to(root.dtype)) @ root).mul_(covariance.scale)
        ones = covariance.ones
        residual.add_(row if ones is None else torch.outer(ones.to(row.dtype), row))
    return residual


def _refinement_directions(
    fused: Tensor,
    active: Active,
    shape: tuple[int, ...],
    k_frac: float,
    rank_rtol: float | None,
) -> LeadingDirections:
    """Return U_kV_kᵀ of W̄_fused (ACE, Eq. 18), k at most the numerical rank.

    W̄_fused has the row space of the updates. Its own spectrum shows the rank only if it is above the
    rounding of the solve: each kept direction of rounding would become as long as the first.
    """
    rtol = max(shape) * torch.finfo(fused.dtype).eps if rank_rtol is None else rank_rtol
    top = leading_directions(fused, max(1, int(k_frac * min(shape))), rtol=rtol)
    if rank_rtol is not None or float(top.sigma[top.k - 1]) > _CLEAR * float(top.sigma[0]):
        return top
    known = known_rank(active, shape, fused.dtype, top.k)
    return top if known >= top.k else leading_directions(fused, known, rtol=rtol)
