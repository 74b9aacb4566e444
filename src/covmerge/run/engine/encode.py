"""What a method made of some rows, encoded in the form that the plan asks for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite, sqrt

import torch
from torch import Tensor
from torch.nn.functional import pad

from covmerge.base.errors import TensorError
from covmerge.base.types import Json, LowRank
from covmerge.maths.linalg.bits import pack
from covmerge.maths.linalg.lapack import square_norm
from covmerge.maths.linalg.spectral import truncated_svd
from covmerge.maths.linalg.stored import stored_as
from covmerge.maths.methods.factored import MergedFactors
from covmerge.plan.planning import (
    AdapterFactors,
    AdapterTensor,
    Merge,
    ModelTensor,
    PackedTensor,
    WorkItem,
)
from covmerge.run.engine.layer import Change, Layer

# So many singular values of each layer are kept for the reader: enough to choose a rank by.
_SPECTRUM = 256


@dataclass(frozen=True)
class Result:
    """What an item gave.

    Attributes:
        tensors: on the CPU, one for each of the item's places.
        stats: `Sizes` and squared norms, which add up over the items of a tensor, and what the method
            noticed, a matrix.
    """

    tensors: tuple[Tensor, ...] = ()
    stats: Mapping[str, Json] = field(default_factory=dict[str, Json])


def encode(item: WorkItem, merge: Merge, layer: Layer, change: Change, *, compare: bool) -> Result:
    """Encode a merged update.

    Args:
        item: the work.
        merge: its operation.
        layer: the updates that were merged.
        change: what they were merged to; it may be written over.
        compare: whether it is one of several, which are held against the updates.

    Raises:
        TensorError: the result is not finite, or not in the dtype that it is stored in.
    """
    form = item.tensor.form
    stats: dict[str, Json] = {**layer.sizes.as_json()}
    if change.matrices:
        stats["matrices"] = change.matrices
    if isinstance(form, AdapterFactors):
        if compare:
            stats |= layer.measures.of(change.dense(item, merge))
        pieces, facts = _as_factors(form, merge, item, change.delta)
        return Result(pieces, {**stats, **facts})
    merged, masks = change.dense(item, merge), change.masks
    square = square_norm(merged)
    if not isfinite(square):
        raise TensorError(
            f"'{item.tensor.name}': method '{merge.method}' gave NaN or Inf, or numbers whose squares "
            "are, from finite updates of norms "
            + ", ".join(f"{n}: {sqrt(size):.3g}" for n, size in layer.sizes.updates.items())
            + ". Please report this tensor; `average` merges it meanwhile."
        )
    stats["merged"] = square
    if compare:
        stats |= layer.measures.of(merged)
    if not isinstance(form, ModelTensor | AdapterTensor | PackedTensor):
        return Result((), {**stats, "rounding": 0.0, "left_out": True})
    exact = merged.add_(layer.base()) if change.weights is None else change.weights
    if isinstance(form, PackedTensor):  # which takes all rows of the item
        return Result((exact.cpu(),), {**stats, "rounding": 0.0})
    rows = as_output(item, exact, "merged weights")
    lossy = rows.dtype != exact.dtype
    lost = torch.sub(exact, rows.to(exact.dtype), out=merged) if lossy else None
    stats["rounding"] = 0.0 if lost is None else square_norm(lost)
    rows = rows.cpu()
    if isinstance(form, AdapterTensor):
        return held_whole(form, rows, stats)
    nothing = torch.zeros(rows.shape, dtype=torch.bool)
    bits = (pack(masks[expert].cpu() if expert in masks else nothing) for expert in form.masks)
    return Result((rows, *bits), stats)


def as_output(item: WorkItem, rows: Tensor, what: str) -> Tensor:
    """Round to the dtype of the output.

    Raises:
        TensorError: `what` these rows are does not fit it.
    """
    dtype = item.tensor.output.dtype
    try:
        return stored_as(rows, dtype)
    except OverflowError as error:
        raise TensorError(
            f"'{item.tensor.name}': the {what} overflow {dtype} ({error}); store them in "
            "another dtype (--out-dtype float32)"
        ) from error


def held_whole(form: AdapterTensor, rows: Tensor, stats: Mapping[str, Json]) -> Result:
    """Encode weights that an adapter holds as they are, under each of their names."""
    names = form.place.names
    facts: dict[str, Json] = {"adapter": {"tensor": names[0], "ties": names[1:]}}
    return Result(tuple(rows for _ in form.place.keys), {**stats, **facts})


def _as_factors(
    form: AdapterFactors, merge: Merge, item: WorkItem, update: Tensor | MergedFactors
) -> tuple[tuple[Tensor, ...], dict[str, Json]]:
    place = form.place
    transposed = merge.layout is not None and merge.layout.transposed
    delta, sigma = _factored(update, place.rank, transposed=transposed)
    try:
        rounded = LowRank(stored_as(delta.left, form.dtype), stored_as(delta.right, form.dtype))
    except OverflowError as error:
        raise TensorError(
            f"'{item.tensor.name}': the factors of the merged update overflow {form.dtype} ({error}); "
            "store them in another dtype (--out-dtype float32)"
        ) from error
    energy = sigma.double().square()
    total, kept = float(energy.sum()), float(energy[: place.rank].sum())
    lost = _rounding(delta, rounded)
    if not isfinite(total + lost):
        raise TensorError(
            f"'{item.tensor.name}': method '{merge.method}' gave NaN or Inf from finite updates. "
            "Please report this tensor; `average` merges it meanwhile."
        )
    return tuple(place.factors(rounded.to(torch.device("cpu")))), {
        "merged": total,
        "rounding": lost,
        "adapter": {
            "tensor": place.name,
            "rank": place.rank,
            "discarded_energy": 1.0 - kept / total if total else 0.0,
            "singular_values": [float(value) for value in sigma[:_SPECTRUM]],
        },
    }


def _factored(
    delta: Tensor | MergedFactors, rank: int, *, transposed: bool
) -> tuple[LowRank, Tensor]:
    """Return the best approximation of a rank in the stored orientation, and all singular values."""
    if isinstance(delta, MergedFactors):
        found, sigma = delta.truncated(rank)
        return (found.mT if transposed else found), sigma
    top = truncated_svd(delta.reshape(len(delta), -1), rank, rtol=0.0, equals=False)
    root = top.kept.to(top.left.dtype).sqrt()
    # A result of lower rank than its place in the file: terms that are zero.
    spare = (0, rank - len(root))
    return LowRank(pad(top.left * root, spare), pad(top.right.mT * root, spare).mT), top.sigma


def _rounding(exact: LowRank, rounded: LowRank) -> float:
    """‖LR − L̃R̃‖²_F ≈ Σ_j σ_j (‖L_j − L̃_j‖² + ‖R_j − R̃_j‖²), where LᵀL = RRᵀ = diag(σ).

    What is left out are products of errors that do not know of each other; a Gram matrix of all
    would be a third of the work on a layer.
    """
    if rounded.left.dtype == exact.left.dtype:
        return 0.0
    # In float64: squares of long factors overflow float32, though what is stored does not.
    exact, back = exact.to(torch.float64), rounded.to(torch.float64)
    sigma = exact.right.square().sum(dim=1)
    left = (exact.left - back.left).square().sum(dim=0)
    right = (exact.right - back.right).square().sum(dim=1)
    return float((sigma * (left + right)).sum())
