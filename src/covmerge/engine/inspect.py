"""What an inspection says of some rows: the worker of a run that merges nothing."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import combinations
from typing import TypeVar

import torch
from torch import Tensor

from covmerge.engine.inputs import Inputs, Update, dense, take_updates
from covmerge.engine.worker import Context, Result
from covmerge.errors import NotFiniteError
from covmerge.linalg.auto import Cost, svd_cost
from covmerge.linalg.spectral import numerical_rank, rank_tolerance
from covmerge.measures.retention import retention
from covmerge.measures.rounding import rounding_of
from covmerge.measures.spectrum import Spectrum, leading, spectrum_of
from covmerge.measures.sums import sums_of
from covmerge.plan import Merge, WorkItem
from covmerge.tensors import MatrixLayout, matrices
from covmerge.types import Json, LowRank, Rounding

# Of the experts in a run, the merged model itself: no expert can have this name.
MERGED = ""
# A spectrum is kept for pictures as so many of its values, evenly from the first to the last.
_SHOWN = 64

_Of = TypeVar("_Of")
# From the updates of a matrix by expert to a merged update; None where there is nothing to show.
Redo = Callable[[Mapping[str, Tensor]], Tensor | None]


def inspect_rows(
    items: Sequence[WorkItem],
    inputs: Inputs,
    context: Context,
    *,
    spectra: Collection[str] = (),
    before: Redo | None = None,
) -> Iterator[Result]:
    """Measure some rows of base and experts; with `MERGED` among these, of a merged model too.

    Args:
        items: one item.
        inputs: its rows.
        context: what a merge of it would need to know.
        spectra: names of the tensors whose singular values are taken, which is most of the work.
        before: merges a matrix again, to show its spectrum beside that of the merged model.
    """
    (item,) = items
    nothing = torch.empty(0)
    if not isinstance(item.tensor.action, Merge) or not inputs.experts:
        yield Result(nothing, {})
        return
    stored = inputs.stored_dtypes()
    try:
        given, _ = take_updates(item, inputs, context.dtype, context.device)
    except NotFiniteError as error:
        yield Result(nothing, {"fault": error.problem, "of": error.expert})
        return
    base = inputs.base.to(context.device).to(context.dtype)
    updates = {
        name: dense(update, inputs.base, context.dtype, context.device)
        for name, update in given.items()
    }
    layout = item.matrices
    if layout is None:
        sums = sums_of(base, list(updates.values())).as_json()
        yield Result(nothing, {"experts": list(updates), "pieces": [{"sums": sums}]})
        return
    pieces: list[Json] = []
    split = {name: matrices(update, layout) for name, update in updates.items()}
    for place, own in enumerate(matrices(base, layout)):
        parts = {name: found[place] for name, found in split.items()}
        factors = {name: _factors(given[name], place, layout) for name in parts}
        piece: dict[str, Json] = {
            "shape": list(own.shape),
            "sums": sums_of(own, list(parts.values())).as_json(),
        }
        if MERGED in parts:
            kept = {n: retention(parts[MERGED], u) for n, u in parts.items() if n != MERGED}
            piece["retention"] = kept
        if item.tensor.name in spectra:
            taken = {name: spectrum_of(factors[name] or parts[name]) for name in parts}
            errors = rounding_of(list(parts.values()), [stored.get(name) for name in parts], own)
            piece |= _spectra(taken, dict(zip(parts, errors, strict=True)), own)
            redone = None if before is None else before(_of_experts(parts))
            if redone is not None:
                spectrum = spectrum_of(redone)
                piece["before"] = _shown(spectrum, spectrum.rank(0.0))
        pieces.append(piece)
    yield Result(nothing, {"experts": list(updates), "pieces": pieces})


def inspection_cost(d_out: int, d_in: int, count: int, itemsize: int, *, spectra: bool) -> Cost:
    """Cost of inspecting a matrix of `count` experts."""
    elementwise = Cost(40.0 * count * d_out * d_in, 0)
    if not spectra:
        return elementwise
    one = svd_cost(d_out, d_in, leading(min(d_out, d_in)), itemsize)
    kept = leading(min(d_out, d_in)) * d_in * itemsize
    return elementwise + Cost(count * one.flops, one.workspace + count * kept)


def _spectra(
    taken: Mapping[str, Spectrum], errors: Mapping[str, Rounding], base: Tensor
) -> dict[str, Json]:
    found: dict[str, Json] = {}
    for name, spectrum in taken.items():
        rtol = rank_tolerance(base.shape, base.dtype, None)
        rank, _ = numerical_rank(spectrum.sigma, base.shape, rtol=rtol, rounding=errors[name])
        found[name] = _shown(spectrum, rank)
    pairs = combinations(_of_experts(taken).values(), 2)
    overlaps: list[Json] = [one.overlap(other) for one, other in pairs]
    return {"spectra": found, "overlaps": overlaps}


def _shown(spectrum: Spectrum, rank: int) -> dict[str, Json]:
    count = len(spectrum.sigma)
    places = sorted({round(i * (count - 1) / (_SHOWN - 1)) for i in range(_SHOWN)}) if count else []
    return {
        "stable_rank": spectrum.stable_rank,
        "effective_rank": spectrum.effective_rank,
        "rank": rank,
        "top_energy": spectrum.top_energy,
        "places": places,
        "sigma": [float(spectrum.sigma[place]) for place in places],
    }


def _of_experts(values: Mapping[str, _Of]) -> dict[str, _Of]:
    return {name: value for name, value in values.items() if name != MERGED}


def _factors(update: Update, place: int, layout: MatrixLayout) -> LowRank | None:
    """The factors of one matrix, oriented; None where it is known as a tensor."""
    own = update[place] if isinstance(update, tuple) else update
    if not isinstance(own, LowRank) or layout.parts is not None:
        return None
    return own.mT if layout.transposed else own
