"""Measures some rows for an inspection."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import combinations

import torch
from torch import Tensor

from covmerge.base.errors import NotFiniteError
from covmerge.base.types import Json, LinearGroup, LowRank, Role, Rounding
from covmerge.files.tensors.views import MatrixLayout, matrices
from covmerge.maths.linalg.auto import Cost, svd_cost
from covmerge.maths.linalg.spectral import RankRule, rank_tolerance
from covmerge.maths.measures.retention import retention
from covmerge.maths.measures.rounding import lost_when_stored, rounded_to, rounding_of
from covmerge.maths.measures.spectrum import Spectrum, leading, spectrum_of
from covmerge.maths.measures.sums import numbers, quadratics, sums_of
from covmerge.maths.measures.table_rows import table_rows
from covmerge.maths.methods.factored import merge_factors
from covmerge.plan.planning.forms import Result
from covmerge.plan.planning.operations import MERGED, Inspect, Merge
from covmerge.plan.planning.work import WorkItem
from covmerge.run.engine.inputs import Inputs, Update, dense, take_updates
from covmerge.run.engine.layer import Context, base_norm_for

# Number of singular values of a spectrum that are kept for pictures, evenly from the first to the last.
_SHOWN = 64
_HALF = 2  # bytes of a half-precision weight


def inspect_rows(item: WorkItem, inspect: Inspect, inputs: Inputs, context: Context) -> Result:
    """Measure some rows of base and experts, and of a merged model if one is inspected.

    NaN or Inf in the rows is returned as `fault`, not raised, so that the inspection goes on.
    """
    stored = {n: rows.dtype for n, rows in inputs.experts.items() if isinstance(rows, Tensor)}
    dtypes = inputs.rounded_to() if inspect.spectra else {}
    merged_dtype = None  # factors were not rounded
    if inspect.spectra and isinstance(inputs.merged, Tensor):
        merged_dtype = rounded_to(inputs.merged)
    result = {} if inspect.merged is None else {MERGED: inputs.merged}
    whose = "experts"
    try:
        given, _ = take_updates(item, inputs, context.dtype, context.device)
        whose = MERGED
        made, _ = take_updates(item, Inputs(inputs.base, result), context.dtype, context.device)
    except NotFiniteError as error:
        of_merged = error.expert is not None and whose == MERGED
        return Result((), {"fault": error.problem, "of": error.expert, "of_merged": of_merged})
    absent = [name for name in inspect.experts if name not in given]
    given = {name: given.get(name) for name in inspect.experts}
    base = inputs.base.to(context.device).to(context.dtype)
    updates, merged = (
        {n: dense(u, inputs.base, context.dtype, context.device) for n, u in found.items()}
        for found in (given, made)
    )
    layout = item.matrices
    facts: dict[str, Json] = {"experts": list(updates), "merged": bool(merged)}
    facts["absent"] = [*absent]
    if layout is None:
        # The merged model comes last, so that one product gives all sums.
        whole: dict[str, Json] = {
            "sums": sums_of(base, [*updates.values(), *merged.values()]).as_json(),
            "lost": _lost(updates, base, stored, inputs.base.dtype),
        }
        # If the table is tied to the head, every row has a gradient, and rounding decides which rows move.
        tied = bool(item.tensor.ties)
        if item.tensor.info.role is Role.EMBEDDING and base.dim() == 2 and not tied:
            whole["rows"] = {
                name: table_rows(base, update, stored.get(name)).as_json()
                for name, update in updates.items()
            }
        return Result((), {**facts, "pieces": [whole]})
    pieces: list[Json] = []
    split = {name: matrices(update, layout) for name, update in updates.items()}
    last = [matrices(update, layout) for update in merged.values()]
    for place, matrix in enumerate(matrices(base, layout)):
        parts = {name: found[place] for name, found in split.items()}
        results = [found[place] for found in last]
        piece: dict[str, Json] = {
            "shape": list(matrix.shape),
            "sums": sums_of(matrix, [*parts.values(), *results]).as_json(),
            "lost": _lost(parts, matrix, stored, inputs.base.dtype),
        }
        if results:
            piece["retention"] = {n: retention(results[0], u) for n, u in parts.items()}
        # Factors are measured faster than their products.
        models = {n: _factors(given[n], place, layout) or part for n, part in parts.items()}
        after = [_factors(made[MERGED], place, layout) or part for part in results]
        if inspect.quadratics:
            forms = quadratics([*models.values(), *after], len(parts))
            piece["quadratics"] = [None if form is None else numbers(form) for form in forms]
        if inspect.spectra:
            taken = {name: spectrum_of(model) for name, model in models.items()}
            errors = rounding_of(list(parts.values()), [dtypes.get(n) for n in parts], matrix)
            shown = zip(taken.items(), errors, strict=True)
            pairs = combinations(taken.values(), 2)
            overlaps: list[Json] = [one.overlap(other) for one, other in pairs]
            piece["spectra"] = {n: _ranked(s, matrix, error) for (n, s), error in shown}
            piece["overlaps"] = overlaps
            if results:
                (error,) = rounding_of(results, [merged_dtype], matrix)
                piece["after"] = _ranked(spectrum_of(after[0]), matrix, error)
            there = {n: part for n, part in parts.items() if n not in absent}
            errors = tuple(e for n, e in zip(parts, errors, strict=True) if n in there)
            again = inspect.redo and _merged_again(inspect.redo, item, there, errors)
            if again is not None:
                spectrum = spectrum_of(again)
                piece["before"] = _shown(spectrum, spectrum.rank(0.0))
            if inspect.attempt is not None:
                of_experts = [models[name] for name in there]
                piece["foreseen"] = _attempt(
                    inspect.attempt, item, matrix, there, of_experts, errors
                )
        pieces.append(piece)
    return Result((), {**facts, "pieces": pieces})


def _lost(
    updates: Mapping[str, Tensor],
    base: Tensor,
    stored: Mapping[str, torch.dtype],
    base_dtype: torch.dtype,
) -> dict[str, Json]:
    """Return the loss by half precision of updates whose expert and base share a half-precision dtype."""
    return {
        name: asdict(lost_when_stored(update, base, base_dtype))
        for name, update in updates.items()
        if stored.get(name) == base_dtype and base_dtype.itemsize == _HALF
    }


def _merged_again(
    redo: Merge, item: WorkItem, updates: Mapping[str, Tensor], rounding: tuple[Rounding, ...]
) -> Tensor | None:
    """Return the merged update of a matrix by `redo`; None if the method's gate did not fire."""
    weights = tuple(item.tensor.operands[name].weight for name in updates)
    group = LinearGroup(tuple(updates.values()), weights, rounding=rounding)
    method = redo.procedure
    merged = method(group, **redo.parameters)
    return merged.delta if method.diagnostics.from_json(merged.stats).fired else None


def _attempt(
    merge: Merge,
    item: WorkItem,
    base: Tensor,
    updates: Mapping[str, Tensor],
    models: Sequence[LowRank | Tensor],
    rounding: tuple[Rounding, ...],
) -> Json:
    """Return a method's diagnostics of a matrix; it runs on factors if all updates have them and it can."""
    weights = tuple(item.tensor.operands[name].weight for name in updates)
    method, factors = merge.procedure, [m for m in models if isinstance(m, LowRank)]
    size = base_norm_for(method, item.tensor, base)
    if len(factors) == len(models) and method.factored_for(merge.parameters):
        merged = merge_factors(method, factors, weights, merge.parameters, base_norm=size)
    else:
        group = LinearGroup(tuple(updates.values()), weights, rounding=rounding, base_norm=size)
        merged = method(group, **merge.parameters)
    return dict(method.diagnostics.from_json(merged.stats).report_columns(list(updates)))


def inspect_cost(
    d_out: int, d_in: int, count: int, itemsize: int, *, spectra: bool, quadratics: bool = False
) -> Cost:
    """Return the cost of inspecting a matrix of `count` models."""
    elementwise = Cost(40.0 * count * d_out * d_in, 0)
    if quadratics:
        # The updates scaled to norm 1, and two products `(d_out, min(d_out, d_in))` of each.
        held = count * (d_out * d_in + 2 * d_out * min(d_out, d_in)) * itemsize
        elementwise += Cost(2.0 * count**2 * d_out * d_in * min(d_out, d_in), held)
    if not spectra:
        return elementwise
    one = svd_cost(d_out, d_in, leading(min(d_out, d_in)), itemsize)
    vectors = leading(min(d_out, d_in)) * d_in * itemsize
    return elementwise + Cost(count * one.flops, one.workspace + count * vectors, count * one.eigen)


def _ranked(spectrum: Spectrum, base: Tensor, error: Rounding) -> dict[str, Json]:
    """Return a spectrum and its numerical rank, the number of σ above the rounding of stored weights."""
    rtol = rank_tolerance(base.shape, base.dtype, None, [error])
    rank, _ = RankRule(rtol, error).rank(spectrum.sigma, base.shape)
    return _shown(spectrum, rank)


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


def _factors(update: Update, place: int, layout: MatrixLayout) -> LowRank | None:
    """Return the oriented factors of one matrix; None if it is a tensor or the layout has parts."""
    matrix = update[place] if isinstance(update, tuple) else update
    if not isinstance(matrix, LowRank) or layout.parts is not None:
        return None
    return matrix.mT if layout.transposed else matrix
