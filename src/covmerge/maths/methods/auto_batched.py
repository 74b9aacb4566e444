"""`auto` for layers of one shape at once; see `covmerge.maths.methods.auto`.

Norms of all updates are read together, and what follows of them are numbers of the host, by the kernel's
own functions (`Counted`, `Likeness`, `flattening`). What is of matrices goes along a leading axis: least
squares, what the updates tell of the inputs, and the spectra of the outputs, which are most of the work.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from covmerge.base.types import LinearGroup, Merged
from covmerge.maths.covariance.told import shares_told, shares_used
from covmerge.maths.linalg.batched import flags, numbers, per_member
from covmerge.maths.linalg.batched_metric import Metrics, lifted
from covmerge.maths.linalg.batched_spectra import nuclear_norms, spectra
from covmerge.maths.linalg.spectral import EXACT, numerical_rank, rank_tolerance
from covmerge.maths.methods.auto_least_squares import least_squares_all, roots_of_told
from covmerge.maths.methods.auto_noticed import Equalised
from covmerge.maths.methods.batched import all_active
from covmerge.maths.methods.closed_form import Active
from covmerge.maths.methods.equalise import Counted, Flattening, Likeness, flattening


def auto_batched(groups: Sequence[LinearGroup]) -> list[Merged | None]:
    """Merge layers `(d_out, d_in)` as `methods.auto.auto` merges each; None: it is to do that one.

    Layers of one tolerance whose inputs were measured are one stack, and the others another. Left to the
    kernel are an expert that did not change a layer, a C₀ without a Cholesky factor, and a layer of which
    nothing is seen.

    Raises:
        LinAlgError: LAPACK ends over one of the eigenproblems; nothing is returned then.

    Example:
        >>> d = torch.tensor([[1.0, 2.0], [3.0, 5.0]])
        >>> groups = [LinearGroup((d, s * d), weights=(1.0, 1.0)) for s in (1.0, 2.0, 0.0)]
        >>> found = auto_batched(groups)
        >>> [None if own is None else torch.allclose(own.delta, d, atol=1e-5) for own in found[::2]]
        [True, None]
    """
    found: list[Merged | None] = [None] * len(groups)
    active = {place: own for place, own in enumerate(all_active(groups)) if own is not None}
    kinds = {place: _kind(groups[place]) for place in active}
    for known, rtol in sorted(set(kinds.values())):
        own = {p: a for p, a in active.items() if kinds[p] == (known, rtol)}
        if len(own) > 1:
            layers = _counted([groups[place] for place in own], [*own.values()])
            for place, merged in zip(own, _merged(layers, rtol, known=known), strict=True):
                found[place] = merged
    return found


def _kind(group: LinearGroup) -> tuple[bool, float]:
    """Whether its inputs were measured, and its tolerance."""
    rtol = rank_tolerance(group.shape, group.updates[0].dtype, None, group.rounding)
    return group.base_inputs is not None, rtol


def _counted(groups: Sequence[LinearGroup], active: Sequence[Active]) -> list[Counted]:
    """How the experts of each layer count; numbers of the device are read for all layers at once."""
    known = [group.base_inputs for group in groups if group.base_inputs is not None]
    if known:
        means = numbers(torch.stack([own.diagonal().double().mean() for own in known]))
        pairs = zip(groups, means, strict=True)
        groups = [replace(group, base_inputs_mean=mean) for group, mean in pairs]
    each = zip(groups, active, _used(active, min(groups[0].shape)), strict=True)
    return [Counted.of_active(group, own, used) for group, own, used in each]


def _merged(layers: Sequence[Counted], rtol: float, *, known: bool) -> list[Merged | None]:
    """Merge layers of one tolerance, of all of which C₀ was measured, or of none."""
    fused, solved = least_squares_all(layers, rtol)
    inputs, told = _measured(layers) if known else _told(layers)
    seen = Metrics.of(inputs, [layer.untold for layer in layers])
    del inputs
    pairs = zip(solved, flags(seen.definite), strict=True)
    kept = [member for member, (own, definite) in enumerate(pairs) if own and definite]
    merged: list[Merged | None] = [None] * len(layers)
    if kept:
        noticed = [Equalised(inputs_known=known, inputs_told=told[member]) for member in kept]
        own = [layers[member] for member in kept]
        found = _equalised(own, fused[kept], seen.only(kept), noticed, rtol)
        for member, one in zip(kept, found, strict=True):
            merged[member] = one
    return merged


def _measured(layers: Sequence[Counted]) -> tuple[Tensor, list[float | None]]:
    """Ĉ, what was measured of the base's inputs, `(n, d_in, d_in)`, and that no ψ was asked for."""
    inputs = [layer.group.base_inputs for layer in layers]
    return torch.stack([own for own in inputs if own is not None]), [None] * len(layers)


def _told(layers: Sequence[Counted]) -> tuple[Tensor, list[float]]:
    """ψĜ + (1 − ψ)I of the updates' dtype, `(n, d_in, d_in)`, and ψ; of one without, NaN."""
    first = layers[0].active.updates[0]
    d_in = layers[0].active.d_in
    grams = first.new_zeros(len(layers), d_in, d_in)
    factors = [roots_of_told(layer.active, layer.shares) for layer in layers]
    for updates, times in _by_expert([layer.active for layer in layers], factors):
        root = updates.mul_(per_member(times, updates))
        grams.baddbmm_(root.mT, root)
    told = shares_told(grams, d_in)
    grams.mul_(per_member(told, grams))
    grams.diagonal(dim1=1, dim2=2).add_(per_member([1.0 - own for own in told], grams, axes=1))
    return grams, told


def _equalised(
    layers: Sequence[Counted],
    fused: Tensor,
    seen: Metrics,
    noticed: Sequence[Equalised],
    rtol: float,
) -> Iterator[Merged | None]:
    """Bring the spectra of R `(n, d_out, d_in)` nearer to flat, as `methods.equalise.equalise`."""
    dots = seen.dots([layer.active.updates for layer in layers])
    each = zip(dots, layers, strict=True)
    alike = [Likeness.of(own, layer.shares) for own, layer in each]
    found = spectra(seen.seen(fused))
    counts: list[int] = []
    for own, layer, said in zip(found.sigma.cpu(), layers, noticed, strict=True):
        rounding = EXACT if said.inputs_known else layer.rounding_of_sum()
        counts.append(numerical_rank(own, fused.shape[1:], rtol=rtol, rounding=rounding)[0])
    whole = numbers(nuclear_norms(seen.seen(_weighted(layers, [own.in_sum for own in layers]))))
    flat: list[Flattening | None] = []
    each = zip(layers, alike, found.sigma.cpu(), counts, whole, noticed, strict=True)
    for layer, own, sigma, count, length, said in each:
        said = layer.noticed(said, own)
        flat.append(flattening(layer, own, sigma[:count], length, said) if count else None)
    lifts = [torch.zeros(1) if own is None else own.lift * own.scale for own in flat]
    unseen = [0.0 if own is None else own.unseen for own in flat]
    merged = lifted(found, fused, counts, lifts, unseen)
    sizes = zip(layers, flat, numbers(seen.sizes), strict=True)
    away = [
        None if own is None else layer.towards_safest(own.length * size)
        for layer, own, size in sizes
    ]
    if any(away):
        merged.mul_(per_member([1.0 - (own or 0.0) for own in away], merged))
        pairs = zip(layers, away, strict=True)
        merged.add_(_weighted(layers, [layer.in_average(own or 0.0) for layer, own in pairs]))
    for delta, own, beside in zip(merged, flat, away, strict=True):
        if own is None:
            yield None
        else:
            yield Merged(delta, own.noticed if beside is None else own.noticed.going(beside))


def _used(layers: Sequence[Active], directions: int) -> list[tuple[float, ...]]:
    """ω_t of the experts, of every layer."""
    by_expert = [
        shares_used(updates, sizes, directions)
        for updates, sizes in _by_expert(layers, [layer.norms for layer in layers])
    ]
    return list(zip(*by_expert, strict=True))


def _weighted(layers: Sequence[Counted], weights: Sequence[Sequence[float]]) -> Tensor:
    """Σ_t of multiples of the updates, `(n, d_out, d_in)`."""
    first = layers[0].active.updates[0]
    total = first.new_zeros(len(layers), *first.shape)
    for updates, own in _by_expert([layer.active for layer in layers], weights):
        total.addcmul_(updates, per_member(own, total))
    return total


def _by_expert(
    layers: Sequence[Active], values: Sequence[Sequence[float]]
) -> Iterator[tuple[Tensor, list[float]]]:
    """Of one expert after another its updates in all layers, a copy, and its number in each."""
    for t in range(len(values[0])):
        updates = torch.stack([layer.updates[t] for layer in layers])
        yield updates, [own[t] for own in values]
