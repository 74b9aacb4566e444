"""The one worker function: a work item's tensors in, merged rows and statistics out."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from math import isfinite, sqrt
from typing import Any, cast

import torch
from torch import Tensor

from covmerge.engine.inputs import Inputs, dense, in_parts, take_updates
from covmerge.engine.measures import Measures
from covmerge.errors import TensorError
from covmerge.linalg.lapack import norm
from covmerge.measures.rounding import rounding_of
from covmerge.methods import Method, registry
from covmerge.methods.factored import MergedFactors, merge_factors, survey_factors
from covmerge.plan import Merge, TensorPlan, WorkItem
from covmerge.tensors import MatrixLayout, matrices, write_matrices
from covmerge.types import Json, LinearGroup, LowRank, Measured, Merged, Rounding


@dataclass(frozen=True)
class Context:
    """What the work on an item needs beside its tensors.

    Attributes:
        weights: by expert.
        dtype: dtype of the computation.
        device: where it runs.
        thresholds: what the surveys found, a plan: `Merge.key` -> expert -> threshold.
        compare: several methods run on each item: keep what they share, and measure their results.
        method: what carries out a method of a name.
    """

    weights: Mapping[str, float]
    dtype: torch.dtype
    device: torch.device
    thresholds: Sequence[Mapping[str, Mapping[str, float]]] = ()
    compare: bool = False
    method: Callable[[str], Method] = registry.get


@dataclass(frozen=True)
class Result:
    """Merged rows of one item in the output dtype, on the CPU, and what there is to say of them.

    `stats` has `Sizes` and squared norms, which add up over the items of a tensor, and what the
    method noticed, a matrix. `masks` are boolean tensors by expert, from methods that write masks.
    """

    rows: Tensor
    stats: dict[str, Json]
    masks: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])


@dataclass(frozen=True)
class Change:
    """What a method makes of some rows, before the base is added.

    Attributes:
        delta: the merged update in the stored shape; by its factors and as `(d_out, d_in)` where
            the method is exact on them.
        matrices: what the method noticed, a matrix.
        masks: by expert, from methods that write masks.
    """

    delta: Tensor | MergedFactors
    matrices: list[Json]
    masks: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])


def compute(items: Sequence[WorkItem], inputs: Inputs, context: Context) -> Iterator[Result]:
    """Merge some rows by the plan of each item, one result after another.

    Raises:
        TensorError: NaN or Inf in the inputs, or in a result.
    """
    if not any(isinstance(item.tensor.action, Merge) for item in items):
        for item in items:
            yield Result(inputs.base.to(item.tensor.output.dtype), {})
        return
    if len(items) == 1:
        yield _merged(items[0], inputs, context)
        return
    layer = Layer(items, inputs, context)
    for number, item in enumerate(items):
        if isinstance(item.tensor.action, Merge):
            yield layer.merge(item, item.tensor.action, context.thresholds[number])
        else:
            yield Result(inputs.base.to(item.tensor.output.dtype), {})


def _merged(item: WorkItem, inputs: Inputs, context: Context) -> Result:
    """Merge the rows of one item, part by part where its plan says so."""
    action = item.tensor.action
    assert isinstance(action, Merge)
    (thresholds,) = context.thresholds
    rows: Tensor | None = None
    parts: list[Mapping[str, Any]] = []
    done = 0
    for part, own in in_parts(item, inputs, context.device):
        result = Layer([part], own, context).merge(part, action, thresholds)
        if part is item:
            return result
        if rows is None:
            rows = result.rows.new_empty(item.shape)
        rows[done : done + len(result.rows)] = result.rows
        done += len(result.rows)
        parts.append(result.stats)
    assert rows is not None
    return Result(rows, {key: _added([part[key] for part in parts]) for key in parts[0]})


def _added(values: Sequence[Any]) -> Json:
    """Add up what parts of an item measured: numbers, or numbers by expert."""
    if isinstance(values[0], Mapping):
        return {key: sum(own[key] for own in values) for key in cast("Any", values[0])}
    return sum(values)


class Layer:
    """The updates of some rows, and what several methods share on them."""

    def __init__(self, items: Sequence[WorkItem], inputs: Inputs, context: Context) -> None:
        """Turn the stored rows into updates; at least one of the items merges."""
        self._inputs = inputs
        self._context = context
        merging = [item for item in items if isinstance(item.tensor.action, Merge)]
        self._item = merging[0]
        self._stored = inputs.stored_dtypes()
        self._given, self.sizes = take_updates(self._item, inputs, context.dtype, context.device)
        self._shared: dict[MatrixLayout | None, list[dict[str, Any] | None]] = {}
        self._rounding: dict[MatrixLayout, list[tuple[Rounding, ...]]] = {}

    def merge(
        self, item: WorkItem, action: Merge, thresholds: Mapping[str, Mapping[str, float]]
    ) -> Result:
        """Run the action's method.

        Raises:
            TensorError: the result is not finite, or not in the output dtype.
        """
        method = self._context.method(action.method)
        change = self.change(item, action, thresholds)
        merged, matrix_stats, masks = self._dense(change, action), change.matrices, change.masks
        del change
        square_merged = norm(merged) ** 2
        if not isfinite(square_merged):
            raise TensorError(
                f"'{item.tensor.name}': method '{method.name}' gave NaN or Inf from finite updates of "
                "norms "
                + ", ".join(
                    f"{name}: {sqrt(square):.3g}" for name, square in self.sizes.updates.items()
                )
                + ". Please report this tensor; `average` merges it meanwhile."
            )
        stats: dict[str, Json] = {**self.sizes.as_json(), "merged": square_merged}
        if self._context.compare:
            stats |= self._measures.of(merged)
        exact = merged.add_(self._base())
        result = exact.to(item.tensor.output.dtype)
        lossy = result.dtype != exact.dtype
        rounding = norm(exact.sub_(result.to(exact.dtype))) ** 2 if lossy else 0.0
        if not isfinite(rounding):
            raise TensorError(
                f"'{item.tensor.name}': the merged weights overflow {result.dtype}; store them in "
                "another dtype (--out-dtype float32)"
            )
        stats["rounding"] = rounding
        if matrix_stats:
            stats["matrices"] = matrix_stats
        return Result(result.cpu(), stats, {name: mask.cpu() for name, mask in masks.items()})

    def change(
        self, item: WorkItem, action: Merge, thresholds: Mapping[str, Mapping[str, float]]
    ) -> Change:
        """Run the action's method on the tensor itself, on each of its matrices, or on factors."""
        method = self._context.method(action.method)
        factors = self._factors(action, method)
        if factors is not None:
            weights = [self._context.weights[expert] for expert in self._given]
            limits = thresholds.get(action.key)
            surveyed = None if limits is None else [limits[expert] for expert in self._given]
            with _naming(item.tensor):
                found = [
                    merge_factors(method, own, weights, action.parameters, surveyed)
                    for own in factors
                ]
            noticed: list[Json] = [dict(merged.stats) for merged in found]
            if action.layout is None or not action.layout.stacked:
                return Change(found[0], noticed)
            stack = self._empty()
            write_matrices(stack, action.layout, [merged.delta.dense() for merged in found])
            return Change(stack, noticed)
        groups = list(self._groups(item, action, method, thresholds.get(action.key)))
        with _naming(item.tensor):
            results = [method(group, **action.parameters) for group in groups]
        names = list(self._updates)
        stats: list[Json] = [dict(result.stats) for result in results]
        like = self._updates[names[0]]
        if action.layout is None:
            masks = dict(zip(names, results[0].masks, strict=False))
            noticed = stats if method.writes_masks else []
            return Change(_owned(results[0], self._updates), noticed, masks)
        if len(results) == 1 and not action.layout.transposed and results[0].delta.is_contiguous():
            return Change(_owned(results[0], self._updates).view_as(like), stats)
        merged = torch.empty_like(like)
        write_matrices(merged, action.layout, [result.delta for result in results])
        return Change(merged, stats)

    def _dense(self, change: Change, action: Merge) -> Tensor:
        """The merged update in the stored shape."""
        if isinstance(change.delta, Tensor):
            return change.delta
        product = change.delta.delta.dense()
        transposed = action.layout is not None and action.layout.transposed
        stored = product.mT.contiguous() if transposed else product
        return stored.view(self._inputs.base.shape)

    def survey_vectors(self, item: WorkItem, action: Merge) -> Iterator[tuple[str, Tensor]]:
        """The values whose magnitudes the action's survey ranks, by expert, matrix by matrix."""
        method = registry.get(action.method)
        assert method.survey is not None
        factors = self._factors(action, method)
        if factors is not None:
            weights = [self._context.weights[expert] for expert in self._given]
            for own in factors:
                vectors = survey_factors(method, own, weights, action.parameters)
                yield from zip(self._given, vectors, strict=True)
            return
        for group in self._groups(item, action, method, None):
            vectors = method.survey.vectors(group, action.parameters)
            yield from zip(self._given, vectors, strict=True)

    @cached_property
    def _updates(self) -> dict[str, Tensor]:
        """The updates as tensors; those of adapters multiplied out, where a method asks for them."""
        context = self._context
        return {
            expert: dense(update, self._inputs.base, context.dtype, context.device)
            for expert, update in self._given.items()
        }

    @cached_property
    def _measures(self) -> Measures:
        return Measures(self._updates, self._item.matrices)

    def _factors(self, action: Merge, method: Method) -> list[list[LowRank]] | None:
        """All updates of each matrix by their factors, oriented.

        None: the method must see them as tensors, or (one that takes any shape) may as well.
        """
        if not method.factored_for(action.parameters):
            return None
        if action.layout is None and not self._inputs.base.is_meta:
            return None
        return self._by_factors(action.layout)

    def _by_factors(self, layout: MatrixLayout | None) -> list[list[LowRank]] | None:
        """All updates of each matrix by their factors, oriented; None: some came multiplied out."""
        if layout is not None and layout.parts is not None:
            return None
        stacked, transposed = (layout.stacked, layout.transposed) if layout else (False, False)
        found: dict[str, tuple[LowRank, ...]] = {}
        for expert, update in self._given.items():
            own = update if isinstance(update, tuple) else (update,)
            factors = tuple(matrix for matrix in own if isinstance(matrix, LowRank))
            if len(factors) == len(own) and isinstance(update, tuple) == stacked:
                found[expert] = factors
            elif update is not None:
                return None
        if not found:
            return None
        nothing = tuple(matrix.zero() for matrix in next(iter(found.values())))
        together = zip(*(found.get(expert, nothing) for expert in self._given), strict=True)
        return [[u.mT if transposed else u for u in matrix] for matrix in together]

    def _empty(self) -> Tensor:
        context = self._context
        return torch.empty(self._inputs.base.shape, dtype=context.dtype, device=context.device)

    def _base(self) -> Tensor:
        return self._inputs.base.to(self._context.device).to(self._context.dtype)

    def _groups(
        self,
        item: WorkItem,
        action: Merge,
        method: Method,
        thresholds: Mapping[str, float] | None,
    ) -> Iterator[LinearGroup]:
        layout = action.layout
        weights = tuple(self._context.weights[expert] for expert in self._updates)
        if layout is None:
            views = [tuple(self._updates.values())]
        else:
            views = list(zip(*(matrices(u, layout) for u in self._updates.values()), strict=True))
        shared = self._shared.setdefault(
            layout, [{} if self._context.compare else None for _ in views]
        )
        errors = [()] * len(views) if layout is None else self._rounding_of(layout, views)
        factors = (None if layout is None else self._by_factors(layout)) or [()] * len(views)
        for updates, kept, rounding, own in zip(views, shared, errors, factors, strict=True):
            yield LinearGroup(
                updates,
                weights,
                streams=tuple(
                    item.tensor.stream(expert, item.first_element) for expert in self._updates
                )
                if method.seeded
                else (),
                measured=self._measured(item.tensor, method),
                thresholds=tuple(thresholds[expert] for expert in self._updates)
                if thresholds
                else None,
                shared=kept,
                factors=tuple(own),
                rounding=rounding,
            )

    def _rounding_of(
        self, layout: MatrixLayout, views: Sequence[Sequence[Tensor]]
    ) -> list[tuple[Rounding, ...]]:
        """What rounding of the stored weights gives to the updates of each matrix."""
        if layout not in self._rounding:
            stored = [self._stored.get(expert) for expert in self._updates]
            base = matrices(self._base(), layout) if any(stored) else [None] * len(views)
            self._rounding[layout] = [
                rounding_of(updates, stored, own) for updates, own in zip(views, base, strict=True)
            ]
        return self._rounding[layout]

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


@contextmanager
def _naming(tensor: TensorPlan) -> Generator[None]:
    """Say which tensor a method cannot merge; the method itself knows no names."""
    try:
        yield
    except TensorError as error:
        raise TensorError(f"'{tensor.name}': {error}") from error


def _owned(result: Merged, updates: Mapping[str, Tensor]) -> Tensor:
    """A result that may be added to: not one of the updates handed back."""
    if any(result.delta.data_ptr() == update.data_ptr() for update in updates.values()):
        return result.delta.clone()
    return result.delta
