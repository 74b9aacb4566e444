"""The worker function: it takes the operands of some rows and returns their results."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import isfinite, prod, sqrt
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from covmerge.base.errors import CheckpointError, TensorError
from covmerge.base.threads import ThreadPool
from covmerge.base.types import Json, LinearGroup, LowRank
from covmerge.maths.linalg.lapack import square_norm
from covmerge.maths.linalg.spectral import RankRule, truncated_svd
from covmerge.maths.methods import Method
from covmerge.maths.methods.factored import MergedFactors
from covmerge.maths.methods.registry import Known
from covmerge.plan.planning.forms import BaseRows, Result, as_output
from covmerge.plan.planning.operations import Count, Inspect, Merge
from covmerge.plan.planning.work import WorkItem, experts_at_once, parts_at_once
from covmerge.run.engine.devices import naming_where_full
from covmerge.run.engine.executor import Batch, Done, Span, Task
from covmerge.run.engine.inputs import (
    Inputs,
    Sources,
    in_parts,
    read_inputs,
    seen_as,
    update_of,
    weights_of,
)
from covmerge.run.engine.inspect_rows import inspect_rows
from covmerge.run.engine.layer import Change, Context, LayerUpdates, naming
from covmerge.run.engine.selection import Selections, Thresholds
from covmerge.run.engine.thread_count import torch_threads, use_threads

# The tensor pass: a first pass over a large tensor, by expert or over all experts together, for methods
# that need the whole tensor.

_In = TypeVar("_In")
_Out = TypeVar("_Out")
_WORK = "its look over the whole tensor"


def tensor_pass(
    item: WorkItem, merge: Merge, method: Method, sources: Sources, context: Context
) -> dict[str, Known]:
    """Return, by expert, the findings about the whole tensor that the merge of its rows needs."""
    assert method.tensor_pass is not None
    inspect = method.tensor_pass.of
    shape = item.shape
    experts = list(item.tensor.operands)
    if method.tensor_pass.together:
        groups = partial(_groups, item, experts, merge, sources, context)
        with naming(item.tensor), method.naming_failures(_WORK), torch_threads(1):
            known = inspect(groups, shape, method.for_experts(merge.parameters, experts, experts))
        return dict.fromkeys(experts, known)

    def of(expert: str) -> Known:
        parameters = method.for_experts(merge.parameters, experts, [expert])
        groups = partial(_groups, item, [expert], merge, sources, context)
        with naming(item.tensor), method.naming_failures(_WORK):
            return inspect(groups, shape, parameters)

    held = method.tensor_pass.entry_bytes(merge.parameters) > 0
    together = experts_at_once(prod(shape), len(experts), held=held)
    return dict(zip(experts, in_lanes(of, experts, together), strict=True))


def in_lanes(do: Callable[[_In], _Out], given: Sequence[_In], most: int) -> list[_Out]:
    """Return `do` of each element, in order; at most `most` run at once, and no more than torch's threads.

    Each runs on one core, because the number of cores that share a sum decides how it is rounded.
    """
    lanes = min(torch.get_num_threads(), len(given), most)
    if lanes < 2:
        with torch_threads(1):
            return [do(one) for one in given]
    with ThreadPool(lanes, initializer=use_threads, initargs=(1,)) as pool:
        return list(pool.map(do, given))


def _groups(
    item: WorkItem,
    names: Sequence[str],
    merge: Merge,
    sources: Sources,
    context: Context,
    experts: Sequence[int] | None = None,
) -> Iterator[LinearGroup]:
    """Yield the rows of the chosen experts of a tensor as a group, block after block."""
    assert item.at_once is not None
    by = context.method(merge.method).sees == "weights"
    dtype, device = context.dtype, context.device
    chosen = [names[place] for place in (range(len(names)) if experts is None else experts)]
    operands = [item.tensor.operands[name] for name in chosen]
    for part in item.parts(item.at_once):
        assert item.tensor.base is not None
        stored = sources.read(item.tensor.base, part.rows)
        assert isinstance(stored, Tensor)
        base = stored.to(device)
        read = (
            base if operand == item.tensor.base else sources.read(operand, part.rows)
            for operand in operands
        )
        if by:
            models = [weights_of(rows, base, device) for rows in read]
            base, *tensors = seen_as(merge.half, [base, *models], dtype)
        else:
            base = base.to(dtype)
            tensors = [update_of(rows, base, dtype, device) for rows in read]
        yield LinearGroup(
            () if by else tuple(tensors),
            tuple(operand.weight for operand in operands),
            models=tuple(tensors) if by else (),
            base=base if by else None,
            streams=tuple(item.tensor.stream(name, part.first_element) for name in chosen),
        )


# The result of a method for some rows, in the encodings that the form of the output requests.


@dataclass
class Rows:
    """The merged rows of an item, for its form (`MergedRows`), which requests them once.

    Attributes:
        change: the result of the merge; it may be written over.
        unrounded: the result without the rounding of the method's steps, where that loss is measured.
        compare: whether several methods are compared, so that the result is measured against the updates.
        standing_for: how many times the loss of these rows counts, as other rows are not measured.
    """

    item: WorkItem
    merge: Merge
    layer: LayerUpdates
    change: Change
    unrounded: Change | None
    compare: bool
    standing_for: float

    def __post_init__(self) -> None:
        self.facts: dict[str, Json] = {**vars(self.layer.sizes)}
        if self.change.matrices:
            self.facts["matrices"] = self.change.matrices

    def update(self) -> Tensor:
        merged = self.change.dense(self.item, self.merge)
        square = square_norm(merged)
        if not isfinite(square):
            norms = (f"{n}: {sqrt(size):.3g}" for n, size in self.layer.sizes.updates.items())
            raise self.failure(
                "gave NaN or Inf, or numbers whose squares are, from finite updates of norms "
                + ", ".join(norms)
            )
        self.facts["merged"] = square
        if self.compare:
            self.facts |= self.layer.measured(merged)
        return merged

    def exact(self) -> Tensor:
        merged = self.update()
        return self._added(merged).to(merged.dtype)

    def rounded(self) -> Tensor:
        merged = self.update()
        exact = self._added(merged)
        rows = as_output(self.item.tensor.output, exact, "merged weights")
        lossy = rows.dtype != exact.dtype
        wide = merged.dtype
        lost = torch.sub(exact.to(wide), rows.to(wide), out=merged) if lossy else None
        self.facts["rounding"] = 0.0 if lost is None else square_norm(lost)
        return rows.cpu()

    def factors(self, rank: int) -> tuple[LowRank, Tensor]:
        if self.compare:
            dense = self.change.dense(self.item, self.merge)
            self.facts |= self.layer.measured(dense)
        delta, layout = self.change.delta, self.merge.layout
        if isinstance(delta, MergedFactors):
            found, sigma = delta.truncated(rank)
            return (found.mT if layout is not None and layout.transposed else found), sigma
        top = truncated_svd(delta.reshape(len(delta), -1), rank, RankRule(0.0), equals=False)
        root = top.leading.to(top.left.dtype).sqrt()
        # A result of lower rank than its place in the file is filled up with zero terms.
        spare = (0, rank - len(root))
        return LowRank(pad(top.left * root, spare), pad(top.right.mT * root, spare).mT), top.sigma

    def mask(self, expert: str) -> Tensor:
        mask = self.change.masks.get(expert)
        return torch.zeros(self.item.shape, dtype=torch.bool) if mask is None else mask

    def failure(self, why: str) -> TensorError:
        return TensorError(
            f"'{self.item.tensor.name}': method '{self.merge.method}' {why}. "
            "Please report this tensor; `average` merges it meanwhile."
        )

    def _added(self, merged: Tensor) -> Tensor:
        """Return W_0 + ΔW, in the memory of the update, or the weights where the method merged weights."""
        change, layer = self.change, self.layer
        exact = merged.add_(layer.base()) if change.weights is None else change.weights
        if self.unrounded is not None:
            self.facts["arithmetic"] = self._arithmetic(self.unrounded, exact)
        return exact

    def _arithmetic(self, unrounded: Change, exact: Tensor) -> Json:
        """Return ‖Ŵ − W̄‖², lost by rounding the method's steps, and ‖Ŵ − W_0‖², the unrounded update."""
        update = unrounded.dense(self.item, self.merge)
        square = square_norm(update)
        base = self.layer.base
        whole = update + base() if unrounded.weights is None else unrounded.weights
        times = self.standing_for
        return {"lost": times * square_norm(whole - exact), "update": times * square}


def work(
    items: Batch, inputs: Inputs, context: Context, selections: Selections | None = None
) -> Iterator[Result]:
    """Do the work of the items of a batch (one for each plan), and yield their results in order.

    Raises:
        TensorError: NaN or Inf in the inputs, or in a result.
        ResourceError: the memory of the device is full.
    """
    with naming_where_full(items[0], context.device):
        yield from _results(items, inputs, context, selections)


def _results(
    items: Batch, inputs: Inputs, context: Context, selections: Selections | None
) -> Iterator[Result]:
    if isinstance(items[0].tensor.operation, Count):
        assert selections is not None
        yield from _count(items, inputs, context, selections)
        return
    if len(items) == 1:
        yield _alone(items[0], inputs, context)
        return
    merging = any(not item.tensor.operation.copies for item in items)
    layer = LayerUpdates(items, inputs, context) if merging else None
    for number, item in enumerate(items):
        merge = item.tensor.merge
        if layer is not None and merge is not None:
            merged = _merged(layer, item, merge, context, context.thresholds[number])
            yield _as_stored(item, merged, inputs)
        else:
            yield _copied(item, inputs)


def _alone(item: WorkItem, inputs: Inputs, context: Context) -> Result:
    operation = item.tensor.operation
    if isinstance(operation, Inspect):
        return inspect_rows(item, operation, inputs, context)
    merge = operation.merge
    if merge is None:
        return _copied(item, inputs)
    if inputs.sources is not None:
        return _by_tensor_pass(item, merge, inputs.sources, context)
    return _as_stored(item, _in_parts(item, merge, inputs, context), inputs)


def _as_stored(item: WorkItem, result: Result, inputs: Inputs) -> Result:
    """Return the merged rows in their stored form, for forms that need all rows of an item."""
    return item.tensor.form.completed(result, _base_rows(item, inputs))


def _base_rows(item: WorkItem, inputs: Inputs) -> BaseRows:
    return BaseRows(inputs.base, inputs.packed, item.tensor.output, item.rows)


def _in_parts(item: WorkItem, merge: Merge, inputs: Inputs, context: Context) -> Result:
    """Merge the rows of one item, part by part if its plan divides them."""
    (thresholds,) = context.thresholds
    rows: Tensor | None = None
    parts: list[Mapping[str, Any]] = []
    done = 0
    for part, part_inputs in in_parts(item, inputs, context.device):
        layer = LayerUpdates([part], part_inputs, context)
        if part is item:
            return _merged(layer, item, merge, context, thresholds)
        standing_for = 0.0 if parts else item.shape[0] / part.shape[0]
        result = _merged(layer, part, merge, context, thresholds, standing_for)
        (merged,) = result.tensors
        if rows is None:
            rows = merged.new_empty(item.shape)
        rows[done : done + len(merged)] = merged
        done += len(merged)
        parts.append(result.stats)
    assert rows is not None
    return Result((rows,), _added_up(parts))


def _by_tensor_pass(item: WorkItem, merge: Merge, sources: Sources, context: Context) -> Result:
    """Do the tensor pass of an item, then read the tensor again and merge it part by part."""
    (thresholds,) = context.thresholds
    found = tensor_pass(item, merge, context.method(merge.method), sources, context)
    rows = torch.empty(item.shape, dtype=item.tensor.output.dtype)

    def merged(part: WorkItem) -> Mapping[str, Any]:
        assert part.rows is not None
        known = {expert: whole.rows(part.rows) for expert, whole in found.items()}
        inputs = replace(read_inputs([part], sources), known=known)
        result = _merged(LayerUpdates([part], inputs, context), part, merge, context, thresholds)
        (rows[part.rows.start : part.rows.stop],) = result.tensors
        return result.stats

    assert item.at_once is not None
    parts = list(item.parts(item.at_once))
    return Result((rows,), _added_up(in_lanes(merged, parts, parts_at_once(rows.numel()))))


def _merged(
    layer: LayerUpdates,
    item: WorkItem,
    merge: Merge,
    context: Context,
    thresholds: Thresholds,
    standing_for: float = 1.0,
) -> Result:
    """Merge some rows, and measure the loss to half-precision steps, which takes a second merge.

    Of an item in parts, it is measured in the first, `standing_for` times as many rows as it has.
    """
    unrounded = layer.unrounded(item, merge, thresholds) if standing_for else None
    change = layer.change(item, merge, thresholds)
    rows = Rows(item, merge, layer, change, unrounded, context.compare, standing_for)
    return item.tensor.form.encode(rows, item.tensor.output)


def _copied(item: WorkItem, inputs: Inputs) -> Result:
    result = item.tensor.form.copied(_base_rows(item, inputs))
    if not item.tensor.operation.compared:
        return result
    differ = [
        expert
        for expert, rows in inputs.experts.items()
        if isinstance(rows, Tensor) and not _equal(rows, inputs.base)
    ]
    return Result(result.tensors, {**result.stats, "differ": differ})


def _equal(one: Tensor, base: Tensor) -> bool:
    """Return whether two tensors that are not floating point have equal values, in whatever dtypes."""
    if one.dtype == base.dtype:
        return torch.equal(one, base)
    wide = torch.int64  # cannot hold the upper half of uint64's values
    return torch.uint64 not in (one.dtype, base.dtype) and torch.equal(one.to(wide), base.to(wide))


def _count(
    items: Batch, inputs: Inputs, context: Context, selections: Selections
) -> Iterator[Result]:
    """Add the magnitudes of some rows to the selections; yield an empty result for each item."""
    parts = in_parts(items[0], inputs, context.device) if len(items) == 1 else [(items[0], inputs)]
    for part, part_inputs in parts:
        counted = [part] if len(items) == 1 else items
        layer = LayerUpdates(counted, part_inputs, context)
        for item in counted:
            assert isinstance(item.tensor.operation, Count)
            count = item.tensor.operation
            for expert, vector in layer.ranked_vectors(item, count.merge):
                selections.add(count, expert, vector)
    for _ in items:
        yield Result()


def _added_up(parts: Sequence[Mapping[str, Any]]) -> dict[str, Json]:
    """Return the measurements of a whole item from those of its parts; the first part has all of them."""
    return {key: _added([part[key] for part in parts if key in part]) for key in parts[0]}


def _added(values: Sequence[Any]) -> Json:
    """Return the sum of a measurement over the parts of an item: a number, or numbers by expert."""
    if isinstance(values[0], Mapping):
        return {key: sum(value[key] for value in values) for key in cast("Any", values[0])}
    return sum(values)


# One batch from its operands to its bytes, in a process that does batches one after another.

_LOOKS = 25  # how often the bytes written by another machine are read before they count as wrong


def serve(index: int, batch: Batch, task: Task, threads: int) -> Iterator[Done]:
    """Read the operands of a batch, do its work, and write and yield the results.

    It computes with as many threads as the executor of threads uses, so that the bytes of the output are
    the same.
    """
    use_threads(cores_of(batch, task, threads))
    start = time.perf_counter()
    inputs = read_inputs(batch, task.sources)
    spans = [("read", start, time.perf_counter())]
    results = work(batch, inputs, task.context, task.selections)
    for number, item in enumerate(batch):
        start = time.perf_counter()
        result = next(results)
        spans.append(("compute", start, time.perf_counter()))
        checksum = ""
        if task.outputs:
            checksum = task.outputs[number].write(item.places, result.tensors)
            spans.append(("write", spans[-1][2], time.perf_counter()))
        taken = tuple(Span(stage, id(task), begun, ended) for stage, begun, ended in spans)
        yield Done(index, number, checksum, result.stats, taken)
        spans = []


def cores_of(batch: Batch, task: Task, threads: int) -> int:
    """Return how many threads compute a batch: one for a GPU or a narrow item, else all."""
    device = task.context.device
    return 1 if device.type != "cpu" or batch[0].is_narrow(device) else threads


def check_there(done: Done, batch: Batch, task: Task, who: str, wait: Callable[[], object]) -> None:
    """Check the bytes that another machine wrote; retry, as a network file system may show them late.

    Raises:
        CheckpointError: the bytes read here still do not have the checksum.
    """
    if not task.outputs:
        return
    item = batch[done.number]
    for _ in range(_LOOKS):
        if task.outputs[done.number].read_back(item.places) == done.checksum:
            return
        wait()
    raise CheckpointError(
        f"{who} has written '{item.tensor.name}', and what is read of it here is something else: is the "
        "output on a folder that all machines share, whose file system shows one what another has written?"
    )
