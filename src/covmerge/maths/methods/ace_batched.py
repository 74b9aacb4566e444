r"""ACE-Merging of layers of one shape at once; see `covmerge.maths.methods.ace`.

All layers are looked at together first: norms, means, energies, and where the gate fires. Then those whose
gate fired are one stack, and the others another, each with its covariances, one Cholesky factorisation and,
where it fired, one eigenproblem. What needs a word of its own is left to the kernel: an expert that did not
change a layer or of which the estimate tells nothing, a system that wants jitter or float64.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import torch
from torch import Tensor

from covmerge.base.types import LinearGroup, Merged
from covmerge.maths.covariance.batched import BatchedEquations, batched_equations, roots
from covmerge.maths.covariance.estimate import (
    TRACE_FLOOR,
    Covariance,
    what_centring_leaves,
)
from covmerge.maths.covariance.gate import Statistic, heterogeneity
from covmerge.maths.covariance.gate import gate as heterogeneity_gate
from covmerge.maths.linalg.batched import (
    all_finite,
    condition_numbers,
    factorize_all,
    flags,
    norms,
    numbers,
    per_member,
    solve_right_all,
)
from covmerge.maths.linalg.batched_spectra import spectra
from covmerge.maths.linalg.spectral import ORTHONORMAL, numerical_rank, with_equals
from covmerge.maths.methods.ace_noticed import AceNoticed
from covmerge.maths.methods.ace_rules import (
    BLIND,
    DROWNED,
    FLOAT32_CONDITION,
    known_rank,
    ridge_share,
    stands_clear,
    wanted_directions,
)
from covmerge.maths.methods.batched import all_active
from covmerge.maths.methods.closed_form import Active

# Up to which a batch in float64 and the kernel, which add in another order, agree to 1e-7.
_FLOAT64_CONDITION = 1e8


@dataclass(frozen=True)
class _Layer:
    """One layer all of whose experts are in the sums.

    Attributes:
        place: in the batch.
        active: its experts.
        covariances: Σ̂_t,reg of each (ACE, Eqs. 5–10).
        noticed: what there is to say of it so far.
    """

    place: int
    active: Active
    covariances: Sequence[Covariance]
    noticed: AceNoticed


def ace_batched(
    groups: Sequence[LinearGroup],
    *,
    eps: float,
    tau: float | None,
    k_frac: float,
    rank_rtol: float | None,
    normalize: bool,
    prior: bool,
    refine: bool,
    gate: Statistic,
) -> list[Merged | None]:
    """Merge layers `(d_out, d_in)` as `methods.ace.ace` merges each; None: it is to do that one.

    W̄ = W₀ + (Σ Δ̃_t Σ̂_t,reg)(Σ Σ̂_t,reg + C_agg)⁻¹ [+ σ_iso U_kV_kᵀ]  (ACE, Eqs. 14–19)

    Raises:
        LinAlgError: LAPACK ends over one of the spectra; nothing is returned then.

    Departs from the paper: as the kernel does, where it does not leave a layer to it.

    Example:
        >>> from covmerge.methods import get
        >>> d = torch.tensor([[1.0, 2.0, 0.0], [-1.0, -2.0, 0.5]]) / 100
        >>> groups = [LinearGroup((d, s * d), weights=(1.0, 1.0)) for s in (2.0, 1.5, 0.0)]
        >>> found = ace_batched(groups, **get("ace").resolve({}))
        >>> [None if merged is None else merged.delta.shape for merged in found]
        [torch.Size([2, 3]), torch.Size([2, 3]), None]
    """
    found: list[Merged | None] = [None] * len(groups)
    layers = list(_estimated(groups, eps=eps, tau=tau, normalize=normalize, gate=gate))
    for fired in (False, True):
        own = [layer for layer in layers if layer.noticed.gate_fired == fired]
        if len(own) < 2:
            continue
        refined = (k_frac, rank_rtol) if fired and refine else None
        for layer, merged in zip(own, _merged(own, prior, refined), strict=True):
            found[layer.place] = merged
    return found


def _estimated(
    groups: Sequence[LinearGroup],
    *,
    eps: float,
    tau: float | None,
    normalize: bool,
    gate: Statistic,
) -> Iterator[_Layer]:
    """The layers whose experts all tell of their inputs, and the gate over each (ACE, Eqs. 5–10)."""
    known = [(place, own) for place, own in enumerate(all_active(groups)) if own is not None]
    if not known:
        return
    rows = len(known[0][1].updates[0])
    means = [
        torch.stack([own.updates[t] for _, own in known]).mean(1)
        for t in range(len(known[0][1].updates))
    ]
    lengths = [numbers(norms(mean)) for mean in means]
    for member, (place, active) in enumerate(known):
        plain = [
            Covariance(update, mean=mean[member], ridge=eps)
            for update, mean in zip(active.updates, means, strict=True)
        ]
        energies: list[float] = []
        for covariance, size, own in zip(plain, active.norms, lengths, strict=True):
            rest = what_centring_leaves(size**2, rows * own[member] ** 2)
            energies.append(covariance.energy() if rest is None else rest)
        if any(e <= BLIND * size**2 for e, size in zip(energies, active.norms, strict=True)):
            continue
        found = heterogeneity_gate(active.norms, tau=tau, statistic=gate)
        fired = found.fired and normalize
        if fired and any(eps > DROWNED * energy for energy in energies):
            continue
        scales = [1.0 / (energy + TRACE_FLOOR) if fired else 1.0 for energy in energies]
        each = zip(plain, scales, active.weights, strict=True)
        covariances = [covariance.times(scale).times(weight) for covariance, scale, weight in each]
        noticed = AceNoticed(
            gamma=found.gamma,
            gate_fired=fired,
            spread=heterogeneity(active.norms, "scale_free"),
            ridge_share=ridge_share(covariances, energies, active.d_in),
        )
        yield _Layer(place, active, covariances, noticed)


def _merged(
    layers: Sequence[_Layer], prior: bool, refined: tuple[float, float | None] | None
) -> list[Merged | None]:
    """Solve the systems of layers on which the gate said the same (ACE, Eqs. 11–19)."""
    covariances = [layer.covariances for layer in layers]
    normal = batched_equations(covariances)
    dtype = normal.gram.dtype
    residual = None if refined is None else _structural_residuals(layers, normal)
    factors, solvable = factorize_all(normal.gram, normal.ridges)
    merged = normal.lift(solve_right_all(factors, normal.numerator))  # Eq. 14
    if prior:
        merged = _with_prior(merged, factors, normal, layers)
    conditions = condition_numbers(
        normal.gram, factors, ridges=normal.ridges, enough=FLOAT32_CONDITION
    )
    most = FLOAT32_CONDITION if dtype == torch.float32 else _FLOAT64_CONDITION
    finite = all_finite(merged) & torch.isfinite(conditions)
    if residual is not None:
        finite &= all_finite(residual)
    route = normal.route
    del factors, normal
    noticed: list[AceNoticed | None] = [None] * len(layers)
    each = zip(layers, flags(solvable & finite), numbers(conditions), strict=True)
    for member, (layer, solved, condition) in enumerate(each):
        if solved and condition <= most:
            noticed[member] = replace(
                layer.noticed,
                route=route,
                rcond=1.0 / condition,
                precision=str(dtype).removeprefix("torch."),
                jitter=0.0,
            )
    if residual is not None and refined is not None:
        _refine(merged, residual.add_(merged), layers, noticed, *refined)
    return [None if own is None else Merged(m, own) for m, own in zip(merged, noticed, strict=True)]


def _with_prior(
    merged: Tensor, factors: Tensor, normal: BatchedEquations, layers: Sequence[_Layer]
) -> Tensor:
    """Add 𝟏cᵀ to the systems that `merged` solves, by Sherman and Morrison's formula (ACE, Eqs. 11–13)."""
    fired = layers[0].noticed.gate_fired
    energies = [fmean(n**2 for n in layer.active.norms) if fired else 1.0 for layer in layers]
    row = normal.row_sums() / (layers[0].active.d_in * per_member(energies, merged, axes=1))
    solved = normal.lift(solve_right_all(factors, row.unsqueeze(1)))
    return merged - merged.sum(2, keepdim=True) * solved / (1.0 + solved.sum(2, keepdim=True))


def _structural_residuals(layers: Sequence[_Layer], normal: BatchedEquations) -> Tensor:
    """Δ_res `(n, d_out, d_in)` (ACE, Eqs. 15–17), formed as that of one layer."""
    covariances = [layer.covariances for layer in layers]
    count = len(covariances[0])
    total = torch.stack([layer.active.updates[0] for layer in layers])
    for t in range(1, count):
        total += torch.stack([layer.active.updates[t] for layer in layers])
    residual = normal.apply(total).mul_(-1.0 / count)
    residual.add_(normal.lift(normal.numerator))
    for t in range(count):
        own = [layer[t] for layer in covariances]
        root = roots(covariances, t)
        means = torch.stack([covariance.mean for covariance in own if covariance.mean is not None])
        residual.addcmul_(root, per_member([c.ridge for c in own], root), value=-1.0)
        row = (root @ means.unsqueeze(2)).mT @ root
        residual.add_(row.mul_(per_member([c.scale for c in own], root)))
    return residual


def _refine(
    merged: Tensor,
    fused: Tensor,
    layers: Sequence[_Layer],
    noticed: list[AceNoticed | None],
    k_frac: float,
    rank_rtol: float | None,
) -> None:
    """Add σ_iso U_kV_kᵀ of W̄_fused to the members that are still there (ACE, Eqs. 18 and 19), in place."""
    members = [member for member, own in enumerate(noticed) if own is not None]
    if not members:
        return
    shape = fused.shape[1:]
    found = spectra(fused[members])
    wanted, rtol = wanted_directions(shape, fused.dtype, k_frac, rank_rtol)
    counts: list[int] = []
    for member, sigma in zip(members, found.sigma.cpu(), strict=True):
        rank, _ = numerical_rank(sigma, shape, rtol=rtol)
        k = with_equals(sigma[:rank], min(wanted, rank))
        if k and rank_rtol is None and not stands_clear(sigma, k):
            known = known_rank(layers[member].active, shape, fused.dtype, k)
            k = k if known >= k else with_equals(sigma[:rank], known)
        counts.append(k)
        own = noticed[member]
        assert own is not None
        flat = float(sigma[:k].mean()) if k else 0.0
        noticed[member] = replace(own, k=k, rank=rank, sigma_iso=flat) if k else None
    if not any(counts):
        return
    isometries, off = found.isometries(counts)
    for place, (member, error) in enumerate(zip(members, numbers(off), strict=True)):
        own = noticed[member]
        if own is not None and own.sigma_iso is not None and error <= ORTHONORMAL:
            merged[member].add_(isometries[place], alpha=own.sigma_iso)
        else:
            noticed[member] = None
