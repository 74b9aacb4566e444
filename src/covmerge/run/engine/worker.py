"""The one worker function: the operands of some rows in, what becomes of them out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from covmerge.base.types import Json
from covmerge.plan.planning.forms import BaseRows, Result
from covmerge.plan.planning.operations import Copy, Count, Inspect, Merge
from covmerge.plan.planning.work import WorkItem, parts_at_once
from covmerge.run.engine.device_room import naming_where_full
from covmerge.run.engine.encode import Rows
from covmerge.run.engine.inputs import Inputs, Sources, in_parts, is_compared, read_inputs
from covmerge.run.engine.inspect_rows import inspect_rows
from covmerge.run.engine.layer import Context, Layer
from covmerge.run.engine.selection import Selections
from covmerge.run.engine.tensor_pass import in_lanes, tensor_pass


def work(
    items: Sequence[WorkItem],
    inputs: Inputs,
    context: Context,
    selections: Selections | None = None,
) -> Iterator[Result]:
    """Do the work of each item, one for each plan, on the same rows; one result after another.

    Args:
        items: of one range of rows.
        inputs: these rows of their operands.
        context: what the work needs to know beside.
        selections: what counting adds to.

    Raises:
        TensorError: NaN or Inf in the inputs, or in a result.
        ResourceError: the device ran full.
    """
    with naming_where_full(items[0], context.device):
        yield from _results(items, inputs, context, selections)


def _results(
    items: Sequence[WorkItem],
    inputs: Inputs,
    context: Context,
    selections: Selections | None,
) -> Iterator[Result]:
    if isinstance(items[0].tensor.operation, Count):
        assert selections is not None
        yield from _count(items, inputs, context, selections)
        return
    if len(items) == 1:
        yield _alone(items[0], inputs, context)
        return
    merging = any(not isinstance(item.tensor.operation, Copy) for item in items)
    layer = Layer(items, inputs, context) if merging else None
    for number, item in enumerate(items):
        operation = item.tensor.operation
        if layer is not None and isinstance(operation, Merge):
            merged = _merged(layer, item, operation, context, context.thresholds[number])
            yield _as_stored(item, merged, inputs)
        else:
            yield _copied(item, inputs)


def _alone(item: WorkItem, inputs: Inputs, context: Context) -> Result:
    operation = item.tensor.operation
    if isinstance(operation, Copy):
        return _copied(item, inputs)
    if isinstance(operation, Inspect):
        return inspect_rows(item, operation, inputs, context)
    assert isinstance(operation, Merge)
    if inputs.sources is not None:
        return _by_tensor_pass(item, operation, inputs.sources, context)
    return _as_stored(item, _in_parts(item, operation, inputs, context), inputs)


def _as_stored(item: WorkItem, result: Result, inputs: Inputs) -> Result:
    """What was merged as it is stored, where that takes all rows of an item."""
    return item.tensor.form.completed(result, _base_rows(item, inputs))


def _base_rows(item: WorkItem, inputs: Inputs) -> BaseRows:
    return BaseRows(inputs.base, inputs.packed, item.tensor.output, item.rows)


def _in_parts(item: WorkItem, merge: Merge, inputs: Inputs, context: Context) -> Result:
    """Merge the rows of one item, part by part where its plan says so."""
    (thresholds,) = context.thresholds
    rows: Tensor | None = None
    parts: list[Mapping[str, Any]] = []
    done = 0
    for part, part_inputs in in_parts(item, inputs, context.device):
        result = _merged(Layer([part], part_inputs, context), part, merge, context, thresholds)
        if part is item:
            return result
        (merged,) = result.tensors
        if rows is None:
            rows = merged.new_empty(item.shape)
        rows[done : done + len(merged)] = merged
        done += len(merged)
        parts.append(result.stats)
    assert rows is not None
    return Result((rows,), _added_up(parts))


def _by_tensor_pass(item: WorkItem, merge: Merge, sources: Sources, context: Context) -> Result:
    """Look a tensor over, then read it again and merge it part by part."""
    (thresholds,) = context.thresholds
    found = tensor_pass(item, merge, context.method(merge.method), sources, context)
    rows = torch.empty(item.shape, dtype=item.tensor.output.dtype)

    def merged(part: WorkItem) -> Mapping[str, Any]:
        assert part.rows is not None
        known = {expert: whole.rows(part.rows) for expert, whole in found.items()}
        inputs = replace(read_inputs([part], sources), known=known)
        result = _merged(Layer([part], inputs, context), part, merge, context, thresholds)
        (rows[part.rows.start : part.rows.stop],) = result.tensors
        return result.stats

    assert item.at_once is not None
    parts = list(item.parts(item.at_once))
    return Result((rows,), _added_up(in_lanes(merged, parts, parts_at_once(rows.numel()))))


def _merged(
    layer: Layer,
    item: WorkItem,
    merge: Merge,
    context: Context,
    thresholds: Mapping[str, Mapping[str, float]],
) -> Result:
    unrounded = layer.unrounded(item, merge, thresholds)
    change = layer.change(item, merge, thresholds)
    rows = Rows(item, merge, layer, change, unrounded, compare=context.compare)
    return item.tensor.form.encode(rows, item.tensor.output)


def _copied(item: WorkItem, inputs: Inputs) -> Result:
    result = item.tensor.form.copied(_base_rows(item, inputs))
    if not is_compared(item):
        return result
    differ = [
        expert
        for expert, rows in inputs.experts.items()
        if isinstance(rows, Tensor) and not _equal(rows, inputs.base)
    ]
    return Result(result.tensors, {**result.stats, "differ": differ})


def _equal(one: Tensor, base: Tensor) -> bool:
    """Whether tensors that are not floating point have the same values, in whatever dtypes."""
    if one.dtype == base.dtype:
        return torch.equal(one, base)
    wide = torch.int64  # which has no place for half of uint64's values
    return torch.uint64 not in (one.dtype, base.dtype) and torch.equal(one.to(wide), base.to(wide))


def _count(
    items: Sequence[WorkItem], inputs: Inputs, context: Context, selections: Selections
) -> Iterator[Result]:
    """Add the magnitudes of some rows to the selections of every plan."""
    parts = in_parts(items[0], inputs, context.device) if len(items) == 1 else [(items[0], inputs)]
    for part, part_inputs in parts:
        counted = [part] if len(items) == 1 else items
        layer = Layer(counted, part_inputs, context)
        for item in counted:
            assert isinstance(item.tensor.operation, Count)
            count = item.tensor.operation
            for expert, vector in layer.ranked_vectors(item, count.merge):
                selections.add(count, expert, vector)
    for _ in items:
        yield Result()


def _added_up(parts: Sequence[Mapping[str, Any]]) -> dict[str, Json]:
    """What parts of an item measured, of all of it."""
    return {key: _added([part[key] for part in parts]) for key in parts[0]}


def _added(values: Sequence[Any]) -> Json:
    """Add up what parts of an item measured: numbers, or numbers by expert."""
    if isinstance(values[0], Mapping):
        return {key: sum(value[key] for value in values) for key in cast("Any", values[0])}
    return sum(values)
