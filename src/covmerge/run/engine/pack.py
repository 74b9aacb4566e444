"""Merged rows as a quantised format stores them, and what rounding does to their update."""

from __future__ import annotations

from math import isfinite

import torch
from torch import Tensor

from covmerge.base.errors import TensorError
from covmerge.base.text import keep_plain
from covmerge.base.types import Json
from covmerge.maths.linalg.lapack import dot, square_norm
from covmerge.plan.planning import PackedTensor, WorkItem
from covmerge.run.engine.encode import Result
from covmerge.run.engine.inputs import Inputs


def packed(item: WorkItem, form: PackedTensor, result: Result, inputs: Inputs) -> Result:
    """Pack merged rows, rounded once, from the dtype of the computation.

    Rows that are the base's, to the bit, become what it stores of them, where that is the same layout.

    Args:
        item: the work.
        form: what it becomes.
        result: the exact rows, and what was measured of them.
        inputs: of the work.

    Raises:
        TensorError: weights that are not finite, or that the format cannot hold.
    """
    (exact,) = result.tensors
    base = None if inputs.base.is_meta else inputs.base
    if inputs.packed and base is not None and torch.equal(exact, base.to(exact.dtype)):
        return Result(
            inputs.packed, {**result.stats, "packed": _sums(square_norm(exact), 0.0, 0.0)}
        )
    parts, sums = _rounded(item, form, exact, base)
    stats = {**result.stats, "rounding": sums["error"], "packed": sums}
    return Result(parts, stats)


def packed_copy(item: WorkItem, form: PackedTensor, inputs: Inputs) -> Result:
    """Pack rows of the base: what it stores of them, where that is the same layout.

    Raises:
        TensorError: as `packed`.
    """
    if inputs.packed:
        return Result(inputs.packed)
    parts, sums = _rounded(item, form, inputs.base, None)
    return Result(parts, {"packed": sums})


def _rounded(
    item: WorkItem, form: PackedTensor, exact: Tensor, base: Tensor | None
) -> tuple[tuple[Tensor, ...], dict[str, Json]]:
    """Parts of some rows, and how far what a client reads of them is from the rows; sums, which add up."""
    packing, rows = form.packing, item.rows
    assert rows is not None, "scalars are not packed"
    try:
        parts = packing.quantise(exact.float())
    except OverflowError as problem:
        raise _not_held(item, form) from problem
    weights, error, along = 0.0, 0.0, None if base is None else 0.0
    for few, read in packing.unpacked(parts, rows):
        own = slice(few.start - rows.start, few.stop - rows.start)
        wanted = exact[own]
        lost = read.to(wanted.dtype).sub_(wanted)
        weights += square_norm(wanted)
        error += square_norm(lost)
        if base is not None and along is not None:
            update = wanted - base[own].to(wanted.dtype)
            along += dot(lost.add_(update), update)
    if not isfinite(error):
        raise _not_held(item, form)
    return packing.placed(parts, rows), _sums(weights, error, along)


def _not_held(item: WorkItem, form: PackedTensor) -> TensorError:
    return TensorError(
        f"'{item.tensor.name}': the merged weights are not finite, or beyond what {form.format} can "
        f"hold: {keep_plain([item.tensor.name])}"
    )


def _sums(weights: float, error: float, along: float | None) -> dict[str, Json]:
    """What the statistics of an item have of its rounding.

    ‖W̄‖², ‖Q(W̄) − W̄‖², and of an update ⟨Q(W̄) − W_0, W̄ − W_0⟩.
    """
    found: dict[str, Json] = {"weights": weights, "error": error}
    return found if along is None else {**found, "along": along}
