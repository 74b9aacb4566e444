"""covmerge's `auto` with every constant and every part of it as a parameter, for the study of them."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from math import log1p
from typing import Any, Literal, cast

import torch
from torch import Tensor

import covmerge
from covmerge import LinearGroup

NAME = "auto_with"

_linalg: Any = torch.linalg  # its annotations are partial


@contextmanager
def registered() -> Generator[None]:
    """Have the method `auto_with` for as long as it lasts; elsewhere nobody meets it."""
    covmerge.register(NAME, base_inputs=True, base_norm=True)(auto_with)
    try:
        yield
    finally:
        covmerge.methods.registry.unregister(NAME)


def auto_with(
    group: LinearGroup,
    *,
    start: Literal["regression", "sum"] = "regression",
    ridge: float = 0.1,
    small: float = 0.01,
    long: float | None = 2.0,
    faint: float = 0.01,
    dense: float = 0.5,
    sparse: float = 0.75,
    power: float | None = 2.0,
    uneven: float | None = 1.0,
    unfelt: float = 1e-4,
    length: Literal["agreement", "sum", "start"] = "agreement",
    untold: float = 0.1,
    unused: float = 1e-4,
    told: float | None = None,
    beside: float | Literal["auto"] | None = "auto",
) -> Tensor:
    """W̄ = W₀ + (1 − a) M + a Δ̄, M = λ (K + τ²I)^(−q/2) R, of docs/auto.md, naive and in float64.

    Args:
        group: updates `(d_out, d_in)`, Ĉ as `inputs`, ‖W₀‖ as `base_norm` and ‖W₀Ĉ^½‖ as `base_outputs`.
            All experts weigh the same.
        start: what R is: the regression, or ΣΔ_t.
        ridge: beside ΔᵀΔ/‖Δ‖², as a share of its mean eigenvalue (0.1 I/d_in).
        small: share of the others' energy at which an expert counts half.
        long: times the usual length that an update is about brought to, where it is longer; None: none is.
        faint: τ over the mean singular value.
        dense: q where all directions of the layer are in use.
        sparse: q where hardly one is.
        power: p in 1 − N^(−p); None: q does not ask how unlike the experts are.
        uneven: p in (1 − η)^p; None: q does not ask how many of the layer's directions each expert uses.
        unfelt: an eigenvalue of an expert's own ΔΔᵀ so small beside their mean is hardly of a direction in
            use.
        length: what λ makes the outputs' singular values add up to: those of (ΣΔ_t)C₀^½, times the
            agreement of copies or not, or those of R.
        untold: with `inputs`, what is added to them as a share of their mean eigenvalue, times 1 − ω̄.
        unused: without `inputs`, an eigenvalue of what the updates tell so small beside the mean is hardly
            of an input in use.
        told: without `inputs`, how much of C₀ is what the updates tell, the rest I; None: as much as they
            use the inputs.
        beside: times ‖W₀C₀^½‖ that ‖MC₀^½‖ is about held to, the rest going to the average, and without
            `inputs` times ‖W₀‖ that updates are together where the result is half way to it; "auto": 0.15
            and ⅓; None: it does not go there.
    """
    updates = [update.double() for update in group.updates if float(update.abs().max()) > 0]
    first = group.updates[0]
    if not updates:
        return torch.zeros_like(first)
    d_out, d_in = first.shape
    energies, shares = _shares(updates, small)
    if long is not None and len(updates) > 1:
        logs = energies.log() / 2.0
        held = 1.0 / (1.0 + small * (2.0 * (logs - logs[:, None])).exp())
        counts = held.fill_diagonal_(0.0) @ (logs / 4.0).exp()
        times = (logs - (counts * logs).sum() / counts.sum()).exp() / long
        bounds = ((1.0 + long**-4.0) / (1.0 + times**4.0)) ** 0.25
        updates = [own * update for own, update in zip(bounds, updates, strict=True)]
        energies, shares = _shares(updates, small)
    used = torch.tensor([_used(update, unfelt) for update in updates], dtype=torch.float64)
    mean_used = (shares * used).sum() / shares.sum()
    base_outputs = group.base_outputs
    if group.base_inputs is None:
        units = zip(shares / energies, updates, strict=True)
        inputs = sum(own * (unit.mT @ unit) for own, unit in units) * (d_in / shares.sum())
        if told is None:
            volume = torch.logdet(torch.eye(d_in, dtype=torch.float64) + inputs / unused)
            told = float(volume) / (d_in * log1p(1.0 / unused))
        inputs = told * inputs
        inputs.diagonal().add_(1.0 - told)
    else:
        inputs = group.base_inputs.double()
        beside_them = untold * float((1.0 - mean_used + unfelt) * inputs.diagonal().mean())
        inputs = inputs + beside_them * torch.eye(d_in, dtype=torch.float64)
        if base_outputs is not None and group.base_norm is not None:
            base_outputs = (base_outputs**2 + beside_them * group.base_norm**2) ** 0.5
    unit = 1.0 if group.base_inputs is None else float(inputs.diagonal().sum() / d_in)
    inputs = inputs * (d_in / float(inputs.diagonal().sum()))
    total = torch.stack(updates).sum(0)
    fused = total if start == "sum" else _regression(updates, energies, shares, ridge)

    seen = [update @ inputs for update in updates]
    dots = torch.stack([torch.stack([(s * u).sum() for u in updates]) for s in seen])
    cosines = dots / torch.outer(dots.diagonal(), dots.diagonal()).sqrt()
    alike = float(shares @ cosines.square() @ shares)
    unlike = max(1.0, float(shares.sum()) ** 2 / alike)
    agreement = min(1.0, float(shares.square().sum()) / alike)

    energy, left = _eigh(fused @ inputs @ fused.mT)
    energy = energy.clamp_min(0.0)
    sigma = energy.sqrt()
    floor = (faint * energy.sum() / sigma.sum()).square()
    in_use = float((energy / (energy + floor)).sum()) / min(d_out, d_in)
    exponent = sparse - (sparse - dense) * in_use
    if power is not None:
        exponent *= 1.0 - unlike**-power
    if uneven is not None:
        variance = (shares * (used - mean_used).square()).sum() / shares.sum()
        if mean_used < 1.0:
            most = mean_used * (1.0 - mean_used)
            exponent *= float((1.0 - variance / most).clamp(0.0, 1.0)) ** uneven
    lift = (energy + floor) ** (-exponent / 2.0)
    wanted = sigma.sum()
    if length != "start":
        wanted = _eigh(total @ inputs @ total.mT)[0].clamp_min(0.0).sqrt().sum()
    if length == "agreement":
        wanted = wanted * agreement
    merged = (left * lift) @ (left.mT @ fused) * (wanted / (sigma * lift).sum())
    if beside is not None and group.base_norm is not None:
        together = float((shares * energies).sum()) ** 0.5
        tiny = 1e-60 * together  # beside a base of zeros
        if base_outputs is None:
            share = 1.0 / 3.0 if beside == "auto" else beside
            away = 1.0 - 1.0 / (1.0 + (together / max(share * group.base_norm, tiny)) ** 4)
        else:
            outputs = (unit * float((merged @ inputs * merged).sum())) ** 0.5
            share = 0.15 if beside == "auto" else beside
            held = (1.0 + (outputs / max(share * base_outputs, tiny)) ** 4) ** -0.25
            away = 1.0 - held / (1.0 + (together / max(group.base_norm, tiny)) ** 4)
        parts = [own * update for own, update in zip(shares, updates, strict=True)]
        mean = torch.stack(parts).sum(0) / shares.sum()
        merged = (1.0 - away) * merged + away * mean
    return merged.to(first.dtype)


def _shares(updates: list[Tensor], small: float) -> tuple[Tensor, Tensor]:
    """‖Δ_t‖² and s_t."""
    energies = torch.stack([update.square().sum() for update in updates])
    return energies, energies / (energies + small * energies.square().sum() / energies.sum())


def _used(update: Tensor, unfelt: float) -> float:
    """ω_t, by the eigenvalues of the smaller side."""
    values = _eigh(update @ update.mT if len(update) < update.shape[1] else update.mT @ update)[0]
    values = values.clamp_min(0.0) * (len(values) / values.sum())
    return float((values / unfelt).log1p().sum()) / (len(values) * log1p(1.0 / unfelt))


def _regression(updates: list[Tensor], energies: Tensor, shares: Tensor, ridge: float) -> Tensor:
    """(Σ s_t Δ_tC_t)(Σ s_t C_t)⁻¹."""
    d_in = updates[0].shape[1]
    fused, gram = torch.zeros_like(updates[0]), torch.zeros_like(updates[0].mT @ updates[0])
    for update, energy, share in zip(updates, energies, shares, strict=True):
        covariance = update.mT @ update / energy
        covariance.diagonal().add_(ridge / d_in)
        fused.add_(share * (update @ covariance))
        gram.add_(share * covariance)
    return cast("Tensor", _linalg.solve(gram, fused.mT)).mT


def _eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues and eigenvectors of a matrix that is symmetric but for rounding."""
    return cast("tuple[Tensor, Tensor]", tuple(_linalg.eigh((matrix + matrix.mT) / 2.0)))
