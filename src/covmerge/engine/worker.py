"""The one worker function: a work item's tensors in, merged rows and statistics out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from math import isfinite, sqrt
from typing import Any

import torch
from torch import Tensor

from covmerge.checkpoints import Checkpoint
from covmerge.engine.measures import measure
from covmerge.errors import TensorError
from covmerge.linalg.lapack import norm
from covmerge.linalg.random import Stream
from covmerge.methods import Method, registry
from covmerge.plan import Merge, Statistics, TensorPlan, WorkItem
from covmerge.tensors import MatrixLayout, matrices, write_matrices
from covmerge.types import Json, LinearGroup, Measured, Merged


@dataclass(frozen=True)
class Sources:
    """Where the tensors of a run come from."""

    base: Checkpoint
    experts: Mapping[str, Checkpoint]
    statistics: Statistics = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class Context:
    """What the work on an item needs beside its tensors.

    Attributes:
        weights: by expert.
        dtype: dtype of the computation.
        device: where it runs.
        thresholds: what the surveys found: `Merge.key` -> expert -> threshold.
        compare: several methods run on each item: keep what they share, and measure their results.
    """

    weights: Mapping[str, float]
    dtype: torch.dtype
    device: torch.device
    thresholds: Mapping[str, Mapping[str, float]] = field(
        default_factory=dict[str, Mapping[str, float]]
    )
    compare: bool = False


@dataclass(frozen=True)
class Inputs:
    """Stored rows of one work item: the base's, and per expert its own or None.

    The computation empties `experts` as it goes, so that stored rows and their updates are not all
    alive together.

    Attributes:
        base: rows of the base.
        experts: rows by expert.
        measured: by kind of statistic, by expert.
    """

    base: Tensor
    experts: dict[str, Tensor | None]
    measured: Mapping[str, Mapping[str, Measured]] = field(
        default_factory=dict[str, Mapping[str, Measured]]
    )


@dataclass(frozen=True)
class Result:
    """Merged rows of one item in the output dtype, on the CPU, and what there is to say of them.

    `stats` has squared norms, which add up over the items of a tensor, and what the method noticed,
    a matrix. `masks` are boolean tensors by expert, from methods that write masks.
    """

    rows: Tensor
    stats: dict[str, Json]
    masks: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])


def read_inputs(items: Sequence[WorkItem], sources: Sources) -> Inputs:
    """Read what the work on some rows needs, in the stored dtypes; one item for each plan."""
    first = items[0]
    own = sources.base.read(first.tensor.name, first.rows)
    merging = [item for item in items if isinstance(item.tensor.action, Merge)]
    if not merging:
        return Inputs(own, {})
    rows: dict[str, Tensor | None] = {
        expert: None if name is None else _read_rows(sources.experts[expert], name, first.rows)
        for expert, name in merging[0].tensor.sources.items()
    }
    measured: dict[str, dict[str, Measured]] = {}
    for item in merging:
        kind = _method(item).data
        if item.tensor.statistics and kind not in measured:
            measured[kind] = {
                expert: _read_measured(kind, sources, expert, name, item)
                for expert, name in item.tensor.statistics.items()
            }
    return Inputs(own, rows, measured)


def _method(item: WorkItem) -> Method:
    action = item.tensor.action
    assert isinstance(action, Merge)
    return registry.get(action.method)


def _read_rows(expert: Checkpoint, name: str, rows: range | None) -> Tensor:
    """Read rows of an expert, whose table may be shorter or longer than the base's."""
    return expert.read(name, _held(rows, expert.headers[name].shape))


def _held(rows: range | None, shape: tuple[int, ...]) -> range | None:
    return None if rows is None else range(min(rows.start, shape[0]), min(rows.stop, shape[0]))


def _read_measured(kind: str, sources: Sources, expert: str, name: str, item: WorkItem) -> Measured:
    file = sources.statistics[expert]
    # A Gram matrix belongs to the whole tensor, Fisher information to each of its elements.
    rows = _held(item.rows, file.header(kind, name).shape) if kind == "fisher" else None
    return Measured(file.read(kind, name, rows), file.rows(kind, name), file.total(kind))


def compute(items: Sequence[WorkItem], inputs: Inputs, context: Context) -> Iterator[Result]:
    """Merge some rows by the plan of each item, one result after another.

    Raises:
        TensorError: NaN or Inf in the inputs, or in a result.
    """
    if not any(isinstance(item.tensor.action, Merge) for item in items):
        for item in items:
            yield Result(inputs.base.to(item.tensor.output.dtype), {})
        return
    layer = Layer(items, inputs, context)
    for item in items:
        if isinstance(item.tensor.action, Merge):
            yield layer.merge(item, item.tensor.action)
        else:
            yield Result(inputs.base.to(item.tensor.output.dtype), {})


class Layer:
    """The updates of some rows, and what several methods share on them."""

    def __init__(self, items: Sequence[WorkItem], inputs: Inputs, context: Context) -> None:
        """Turn the stored rows into updates; at least one of the items merges."""
        self._inputs = inputs
        self._context = context
        merging = [item for item in items if isinstance(item.tensor.action, Merge)]
        layouts = [a.layout for item in items if isinstance(a := item.tensor.action, Merge)]
        # Methods that take any shape do not say how a tensor holds matrices, others do.
        self._layout = next((layout for layout in layouts if layout is not None), None)
        self._updates, self._squares = _take_updates(merging[0], inputs, context)
        self._shared: dict[MatrixLayout | None, list[dict[str, Any] | None]] = {}

    def merge(self, item: WorkItem, action: Merge) -> Result:
        """Run the action's method.

        Raises:
            TensorError: the result is not finite.
        """
        method = registry.get(action.method)
        base = self._base() if method.needs_base else None
        merged, matrix_stats, masks = self._run(item, action, method, base)
        del base  # formed again for the sum: a method's workspace is the peak
        square_merged = norm(merged) ** 2
        if not isfinite(square_merged):
            raise TensorError(
                f"'{item.tensor.name}': method '{method.name}' gave NaN or Inf from finite updates of "
                "norms "
                + ", ".join(f"{name}: {sqrt(square):.3g}" for name, square in self._squares.items())
                + ". Please report this tensor; `average` merges it meanwhile."
            )
        stats: dict[str, Json] = {"updates": dict(self._squares), "merged": square_merged}
        if self._context.compare:
            stats |= measure(merged, self._updates, self._layout)
        exact = merged.add_(self._base())
        result = exact.to(item.tensor.output.dtype)
        lossy = result.dtype != exact.dtype
        stats["rounding"] = norm(exact.sub_(result.to(exact.dtype))) ** 2 if lossy else 0.0
        if matrix_stats:
            stats["matrices"] = matrix_stats
        return Result(result.cpu(), stats, {name: mask.cpu() for name, mask in masks.items()})

    def survey_vectors(self, item: WorkItem, action: Merge) -> Mapping[str, Tensor]:
        """Return per expert the values whose magnitudes the action's survey ranks."""
        method = registry.get(action.method)
        assert method.survey is not None
        (group,) = self._groups(item, action, method, None)
        vectors = method.survey.vectors(group, action.parameters)
        return dict(zip(self._updates, vectors, strict=True))

    def _base(self) -> Tensor:
        return self._inputs.base.to(self._context.device).to(self._context.dtype)

    def _run(
        self, item: WorkItem, action: Merge, method: Method, base: Tensor | None
    ) -> tuple[Tensor, list[Json], Mapping[str, Tensor]]:
        """Run the method on the tensor itself, or on each of its matrices."""
        groups = list(self._groups(item, action, method, base))
        results = [method(group, **action.parameters) for group in groups]
        names = list(self._updates)
        stats: list[Json] = [dict(result.stats) for result in results]
        like = self._updates[names[0]]
        if action.layout is None:
            masks = dict(zip(names, results[0].masks, strict=False))
            return _owned(results[0], self._updates), stats if method.writes_masks else [], masks
        if len(results) == 1 and not action.layout.transposed and results[0].delta.is_contiguous():
            return _owned(results[0], self._updates).view_as(like), stats, {}
        merged = torch.empty_like(like)
        write_matrices(merged, action.layout, [result.delta for result in results])
        return merged, stats, {}

    def _groups(
        self, item: WorkItem, action: Merge, method: Method, base: Tensor | None
    ) -> Iterator[LinearGroup]:
        layout = action.layout
        weights = tuple(self._context.weights[expert] for expert in self._updates)
        thresholds = self._context.thresholds.get(action.key)
        if layout is None:
            views = [tuple(self._updates.values())]
            bases = [base]
        else:
            views = list(zip(*(matrices(u, layout) for u in self._updates.values()), strict=True))
            bases = repeat(None) if base is None else matrices(base, layout)
        shared = self._shared.setdefault(
            layout, [{} if self._context.compare else None for _ in views]
        )
        for updates, own, kept in zip(views, bases, shared, strict=False):
            yield LinearGroup(
                updates,
                weights,
                own,
                streams=tuple(_stream(item, expert) for expert in self._updates)
                if method.seeded
                else (),
                measured=self._measured(item.tensor, method),
                thresholds=tuple(thresholds[expert] for expert in self._updates)
                if thresholds
                else None,
                shared=kept,
            )

    def _measured(self, tensor: TensorPlan, method: Method) -> tuple[Measured, ...]:
        if not tensor.statistics:
            return ()
        found = self._inputs.measured[method.data]
        return tuple(self._fitted(found[expert], method) for expert in self._updates)

    def _fitted(self, measured: Measured, method: Method) -> Measured:
        value = measured.value.to(self._context.device).to(self._context.dtype)
        wanted = next(iter(self._updates.values()))
        if method.data == "fisher" and value.shape != wanted.shape:
            padded = torch.zeros_like(wanted)  # rows that the expert's table lacks
            padded[: len(value)] = value
            value = padded
        return Measured(value, measured.rows, measured.total)


def _owned(result: Merged, updates: Mapping[str, Tensor]) -> Tensor:
    """A result that may be added to: not one of the updates handed back."""
    if any(result.delta.data_ptr() == update.data_ptr() for update in updates.values()):
        return result.delta.clone()
    return result.delta


def _stream(item: WorkItem, expert: str) -> Stream:
    return Stream(f"{item.tensor.name}\0{expert}", item.first_element)


def _take_updates(
    item: WorkItem, inputs: Inputs, context: Context
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Turn the stored rows of the experts into updates, with their squared norms."""
    base = inputs.base.to(context.device).to(context.dtype)
    updates: dict[str, Tensor] = {}
    squares: dict[str, float] = {}
    for expert in list(inputs.experts):
        stored = inputs.experts.pop(expert)
        if stored is not None:
            updates[expert] = _update(stored, base, context.device)
        elif item.tensor.absent == "unchanged":
            updates[expert] = torch.zeros_like(base)
        else:
            continue
        squares[expert] = norm(updates[expert]) ** 2
        if stored is not None and not isfinite(squares[expert]):
            _name_what_is_not_finite(item, inputs.base, expert, stored)
        del stored
    return updates, squares


def _update(stored: Tensor, base: Tensor, device: torch.device) -> Tensor:
    """Δ_t = W_t − W_0; rows that the expert's table lacks count as unchanged."""
    update = stored.to(device).to(base.dtype)
    if update.shape == base.shape:
        # A fresh tensor from the reader, or one just cast: nobody else sees the subtraction.
        return update.sub_(base)
    padded = torch.zeros_like(base)
    torch.sub(update, base[: len(update)], out=padded[: len(update)])
    return padded


def _name_what_is_not_finite(item: WorkItem, base: Tensor, expert: str, stored: Tensor) -> None:
    """Raise for the first NaN or Inf; a norm has told that there is one."""
    start = 0 if item.rows is None else item.rows.start
    for source, values in (("the base", base), (f"expert '{expert}'", stored)):
        bad = ~torch.isfinite(values.float())
        if bad.any():
            where = [int(axis) for axis in bad.nonzero()[0]] or [0]
            where[0] += start
            raise TensorError(
                f"'{item.tensor.name}' of {source} holds {int(bad.sum())} NaN or Inf values, the "
                f"first at {where}. Fetch the checkpoint again, or leave the tensor to the base with "
                f"the rule {{match: '{item.tensor.name}', use: base}}."
            )
    raise TensorError(
        f"'{item.tensor.name}': the update of expert '{expert}' overflows the compute dtype; compute "
        "in float64 (--dtype float64)."
    )
