"""Candidates for a default that are rules of their own; a candidate is no method of covmerge.

All of them solve for the update that disturbs the experts least. They differ in what is known of a layer:
its inputs C_t ∝ Δ_tᵀΔ_t, its outputs' gradients L_t ∝ Δ_tΔ_tᵀ, or both.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import hypot
from typing import Any

import torch
from torch import Tensor

import covmerge
from covmerge import LinearGroup
from covmerge.maths.measures.spectrum import Spectrum
from covmerge.maths.methods import auto
from covmerge.methods import registry

# Their annotations are partial.
_linalg: Any = torch.linalg
PREFIX = "candidate "


@dataclass(frozen=True)
class Sums:
    """What the rules are made of, in float64.

    Attributes:
        outputs: Σ (L_t + εI) `(d_out, d_out)`.
        inputs: Σ (C_t + εI) `(d_in, d_in)`.
        numerator: Σ Δ_t(C_t + εI) `(d_out, d_in)`, which is Σ (L_t + εI)Δ_t too.
    """

    outputs: Tensor
    inputs: Tensor
    numerator: Tensor


def sums(updates: Sequence[Tensor], ridge: float) -> Sums:
    """Return the sums over the experts that changed a layer.

    C_t = Δ_tᵀΔ_t and L_t = Δ_tΔ_tᵀ are scaled alike: the mean of their eigenvalues is 1, if each
    counts as much as its own size. ε = `ridge` is in this unit.
    """
    d_out, d_in = updates[0].shape
    zero = torch.zeros(d_out, d_in, dtype=torch.float64)
    found = Sums(
        ridge * len(updates) * torch.eye(d_out, dtype=torch.float64),
        ridge * len(updates) * torch.eye(d_in, dtype=torch.float64),
        zero,
    )
    for update in updates:
        wide = update.double()
        inputs = wide.T @ wide
        scale = inputs.trace() / inputs.square().sum()
        found.inputs.add_(scale * inputs)
        found.outputs.add_(scale * wide @ wide.T)
        found.numerator.add_(scale * wide @ inputs + ridge * wide)
    return found


def by_inputs(updates: Sequence[Tensor], ridge: float) -> Tensor:
    """Return (Σ Δ_tC_t)(Σ C_t)⁻¹: the experts' outputs change least."""
    found = sums(updates, ridge)
    return _linalg.solve(found.inputs, found.numerator.T).T


def by_outputs(updates: Sequence[Tensor], ridge: float) -> Tensor:
    """Return (Σ L_t)⁻¹(Σ L_tΔ_t): the same from the other side."""
    found = sums(updates, ridge)
    return _linalg.solve(found.outputs, found.numerator)


def by_lengths(updates: Sequence[Tensor], ridge: float) -> Tensor:
    """Return (Σ Δ_t(C_t + r_tI))(Σ (C_t + r_tI))⁻¹, C_t = Δ_tᵀΔ_t / ‖Δ_t‖.

    An expert counts by the length of its update, so that one that vanishes leaves the sums. With B = ΣC_t,
    Σr_t = ridge · Tr(B²) / Tr(B), and r_t is in proportion to ‖Δ_t‖.
    """
    wide = [update.double() for update in updates]
    lengths = [float(_linalg.matrix_norm(update)) for update in wide]
    grams = [update.T @ update / size for update, size in zip(wide, lengths, strict=True)]
    total = torch.stack(grams).sum(dim=0)
    added = ridge * float(total.square().sum() / total.trace()) / sum(lengths)
    numerator = torch.zeros_like(wide[0])
    for update, gram, size in zip(wide, grams, lengths, strict=True):
        numerator.add_(update @ gram + added * size * update)
    total.diagonal().add_(added * sum(lengths))
    return _linalg.solve(total, numerator.T).T


def two_sided(updates: Sequence[Tensor], ridge: float, length: float = 1.0) -> Tensor:
    """Return the mean of both, times `length`."""
    return length * (by_inputs(updates, ridge) + by_outputs(updates, ridge)) / 2


def by_roots(updates: Sequence[Tensor], ridge: float) -> Tensor:
    """Return (Σ L_t)^(−½)(Σ Δ_tC_t)(Σ C_t)^(−½): half of the inverse on each side.

    It is the minimum under the Fisher information that Shampoo estimates, L^½ ⊗ C^½ of each expert, if the
    sum of these products is taken to be the product of the sums.
    """
    found = sums(updates, ridge)
    return _inverse_root(found.outputs) @ found.numerator @ _inverse_root(found.inputs)


def _inverse_root(matrix: Tensor) -> Tensor:
    values, vectors = _linalg.eigh(matrix)
    return (vectors * values.rsqrt()) @ vectors.T


# --- `auto` changed: these see the whole group.
def whole_length(group: LinearGroup) -> Tensor:
    """Return `auto` with s = 1: its second rule, which rounds eight and nine start from."""
    return _whole_length(group)[0]


def _whole_length(group: LinearGroup) -> tuple[Tensor, Any]:
    """Return `auto` with s = 1, and its diagnostics."""
    merged = registry.get("auto")(group)
    found: Any = merged.diagnostics
    return merged.delta / (found.length_share or 1.0), found


def as_long_as_one(group: LinearGroup) -> Tensor:
    """Return the second rule, no longer than Σ‖Δ_t‖²/Σ‖Δ_t‖."""
    merged = whole_length(group)
    sizes = [float(_linalg.matrix_norm(update)) for update in group.updates]
    most = sum(size**2 for size in sizes) / sum(sizes)
    return merged * min(1.0, most / max(float(_linalg.matrix_norm(merged)), 1e-300))


def shorter_by_updates(group: LinearGroup) -> Tensor:
    """Return the second rule, s times as long: s = 1 − ½ (1 − e)² (1 − N^(−½)).

    A low-rank update does not tell where its inputs lie. Then the length is the mean of two: the sum's,
    and that of one expert, which is N^(−½) of it where updates are unlike. e is (Σ√σ)²/(nΣσ) of an
    update's n singular values, averaged by ‖Δ_t‖.
    """
    updates = [update.double() for update in group.updates if update.any()]
    shares = torch.tensor([_half_power_share(update) for update in updates], dtype=torch.float64)
    sizes = torch.stack([_linalg.matrix_norm(update) for update in updates])
    return _shortened(group, float((shares * sizes).sum() / sizes.sum()))


def shorter_by_sum(group: LinearGroup) -> Tensor:
    """Return the same with e of ΣΔ_t, whose spectrum `auto` has."""
    share = _half_power_share(torch.stack(list(group.updates)).double().sum(dim=0))
    return _shortened(group, share)


def _shortened(group: LinearGroup, share: float) -> Tensor:
    merged, found = _whole_length(group)
    return merged * (1 - 0.5 * (1 - share) ** 2 * (1 - found.unlike_experts**-0.5))


def _half_power_share(matrix: Tensor) -> float:
    sigma = _linalg.svdvals(matrix)
    total = float(sigma.sum())
    return float(sigma.sqrt().sum()) ** 2 / (len(sigma) * total) if total else 1.0


def shorter_by_weights(group: LinearGroup) -> Tensor:
    """Return `auto`, √((‖W₀‖² + l²)/(‖W₀‖² + ‖M‖²)) times as long, where l = Σ‖Δ_t‖²/Σ‖Δ_t‖ is below ‖M‖.

    The merge M makes the weights longer than one expert does, and is shortened by as much. It is M itself
    for one expert, for copies, and where updates are short beside the base's weights.
    """
    merged = registry.get("auto")(group).delta
    base: Any = group.base
    start = float(_linalg.matrix_norm(base.double()))
    sizes = [float(_linalg.matrix_norm(update.double())) for update in group.updates]
    whole = float(_linalg.matrix_norm(merged.double()))
    one = min(whole, sum(size**2 for size in sizes) / sum(sizes))
    return merged * (hypot(start, one) / hypot(start, whole))


def common_inputs(group: LinearGroup) -> Tensor:
    """Return the second rule with covariances e_tC_t + (1 − e_t) ‖Δ_t‖ ΣC_u/Σ‖Δ_u‖ in its regression.

    e_t is the effective rank of Δ_t as a share of its smaller side: what it tells of its own inputs.
    """
    wide = [update.double() for update in group.updates if update.any()]
    merged, found = _whole_length(group)
    sizes: Any = torch.stack([_linalg.vector_norm(update) for update in wide])
    grams = torch.stack([u.T @ u / size for u, size in zip(wide, sizes, strict=True)])
    total = grams.sum(dim=0)
    told = torch.tensor([_told(update) for update in wide], dtype=torch.float64)
    shared = [
        e * gram + (1 - e) * size * total / sizes.sum()
        for e, gram, size in zip(told, grams, sizes, strict=True)
    ]
    flat = torch.stack([update.flatten() for update in wide])
    alike = ((flat @ flat.T).square() / torch.outer(sizes, sizes)).sum()
    shorter = sizes.square().sum() / alike
    parts = [_solved(wide, own, float(shorter)) for own in (grams, shared)]
    return merged + (1 - found.flat_share) * (parts[1] - parts[0])


def _solved(updates: Sequence[Tensor], grams: Any, shorter: float) -> Tensor:
    """Return the regression of `auto` with other covariances."""
    total: Any = torch.stack(list(grams)).sum(dim=0)
    ridge = auto.CONSTANTS.ridge * total.square().sum() / total.trace()
    numerator: Any = sum(update @ gram for update, gram in zip(updates, grams, strict=True))
    numerator = numerator + ridge * shorter * sum(updates)
    total.diagonal().add_(ridge)
    return _linalg.solve(total, numerator.T).T


def _told(update: Tensor) -> float:
    sigma = _linalg.svdvals(update)
    return Spectrum(sigma, update[:0]).effective_rank / len(sigma)


_RIDGES = (0.003, 0.01, 0.03, 0.1, 0.3)
RULES: Mapping[str, Callable[[Sequence[Tensor]], Tensor]] = {
    f"{PREFIX}by inputs, ridge 0.01": partial(by_inputs, ridge=0.01),
    f"{PREFIX}by outputs, ridge 0.01": partial(by_outputs, ridge=0.01),
    f"{PREFIX}by lengths, ridge 0.03": partial(by_lengths, ridge=0.03),
    **{f"{PREFIX}two-sided, ridge {r}": partial(two_sided, ridge=r) for r in (0.02, *_RIDGES)},
    f"{PREFIX}two-sided, ridge 0.02, length 0.8": partial(two_sided, ridge=0.02, length=0.8),
    **{f"{PREFIX}by roots, ridge {r}": partial(by_roots, ridge=r) for r in (0.01, 0.03, 0.1, 0.3)},
}
SECOND = "auto, second rule"
BY_WEIGHTS = f"{PREFIX}shorter by weights"
OF_AUTO: Mapping[str, Callable[[LinearGroup], Tensor]] = {
    SECOND: whole_length,
    f"{PREFIX}as long as one": as_long_as_one,
    f"{PREFIX}common inputs": common_inputs,
    f"{PREFIX}shorter by updates": shorter_by_updates,
    f"{PREFIX}shorter by sum": shorter_by_sum,
    BY_WEIGHTS: shorter_by_weights,
}
BY_LENGTHS = f"{PREFIX}by lengths, ridge 0.03"
TWO_SIDED = f"{PREFIX}two-sided, ridge 0.02"


@contextmanager
def registered(title: str) -> Generator[str]:
    """Make a rule known to covmerge while a block runs, under the name that it yields."""
    name = "bank_candidate"

    def merge(group: LinearGroup) -> Tensor:
        updates = [update for update in group.updates if update.any()]
        if not updates:
            return torch.zeros_like(group.updates[0])
        found = RULES[title](updates) if title in RULES else OF_AUTO[title](group)
        return found.to(updates[0].dtype)

    covmerge.register(name, equation=title, needs_base=title == BY_WEIGHTS)(merge)
    try:
        yield name
    finally:
        registry.unregister(name)


# --- `auto` with other constants: how much its scores depend on them.
CONSTANTS: Mapping[str, auto.Constants] = {
    f"auto, {name} {value:.2g}": replace(auto.CONSTANTS, **{name: value})
    for name, chosen in asdict(auto.CONSTANTS).items()
    for value in (chosen / 3, chosen * 3)
}


@contextmanager
def other_constants(title: str) -> Generator[str]:
    """Let `auto` have other constants while a block runs; yield its name."""
    chosen = auto.CONSTANTS
    auto.CONSTANTS = CONSTANTS[title]
    try:
        yield "auto"
    finally:
        auto.CONSTANTS = chosen
