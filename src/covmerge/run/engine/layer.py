"""The updates of some rows, and the methods that merge them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from covmerge.base.diagnostics import Diagnostics
from covmerge.base.errors import ResourceError, TensorError
from covmerge.base.types import Json, LinearGroup, LowRank, Measured, Merged, Rounding
from covmerge.files.tensors.views import MatrixLayout, matrices, write_matrices
from covmerge.maths.linalg.lapack import square_norm
from covmerge.maths.linalg.stored import all_finite
from covmerge.maths.measures.retention import energy_gram, retention
from covmerge.maths.measures.rounding import rounding_of
from covmerge.maths.measures.spectrum import stable_rank
from covmerge.maths.methods import Method, registry
from covmerge.maths.methods.factored import MergedFactors, merge_factors, ranked_factors
from covmerge.plan.planning.operations import Merge
from covmerge.plan.planning.work import TensorPlan, WorkItem
from covmerge.run.engine.inputs import Inputs, dense, seen_as, take_updates
from covmerge.run.engine.selection import Thresholds

_ROWS = 64  # number of rows that are widened to float64 at once


def registered(name: str) -> Method:
    """Return the registered method of a name. Unlike a bound method, this function pickles by its name."""
    return registry.get(name)


_Seen = tuple[MatrixLayout | None, tuple[float, ...]]  # a layout, and the experts' weights


@dataclass(frozen=True)
class Context:
    """The settings of the work on an item.

    Attributes:
        thresholds: the global passes' thresholds, for each plan: `Merge.key` -> expert -> threshold.
        compare: whether to measure the results, for a comparison of several methods.
    """

    dtype: torch.dtype
    device: torch.device
    thresholds: Sequence[Thresholds] = ()
    compare: bool = False
    method: Callable[[str], Method] = registered


@dataclass(frozen=True)
class Change:
    """The result of a method for some rows, before the base is added.

    Attributes:
        delta: the merged update in the stored shape; or its factors, as `(d_out, d_in)`, where the
            method is exact on factors.
        matrices: the method's diagnostics of each matrix, as JSON.
        masks: by expert, from methods that write masks.
        weights: the merged weights W̄, from methods that see weights.
    """

    delta: Tensor | MergedFactors
    matrices: Sequence[Mapping[str, Json]]
    masks: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    weights: Tensor | None = None

    def dense(self, item: WorkItem, merge: Merge) -> Tensor:
        """Return the merged update as a tensor in the stored shape."""
        if isinstance(self.delta, Tensor):
            return self.delta
        product = self.delta.delta.dense()
        transposed = merge.layout is not None and merge.layout.transposed
        stored = product.mT.contiguous() if transposed else product
        return stored.view(item.shape)


class LayerUpdates:
    """The updates of some rows (or the experts' weights), and the results that several methods share."""

    def __init__(self, items: Sequence[WorkItem], inputs: Inputs, context: Context) -> None:
        """Turn the stored rows into updates; at least one of the items must not be a copy."""
        self._inputs = inputs
        self._context = context
        self._item = next(i for i in items if not i.tensor.operation.copies)
        merges = [item.tensor.merge for item in items if item.tensor.merge is not None]
        ranked = any(merge.layout is not None for merge in merges)
        self._rounded_to = inputs.rounded_to() if ranked else {}
        sees = {merge.around(context.method(merge.method)).sees for merge in merges}
        self._models: dict[str, Tensor] = {}
        self._given, self.sizes = take_updates(
            self._item,
            inputs,
            context.dtype,
            context.device,
            self._models if "weights" in sees else None,
            keep="updates" in sees or context.compare,
        )
        # Shared by layout and by the experts' weights: plans may weight the experts differently, and the
        # spectra of the weighted sum depend on the weights.
        self._keeps = len(items) > 1
        self._shared: dict[_Seen, list[dict[str, Any] | None]] = {}
        self._rounding: dict[MatrixLayout, list[tuple[Rounding, ...]]] = {}

    def change(self, item: WorkItem, merge: Merge, thresholds: Thresholds) -> Change:
        """Run the merge's method on the tensor itself, on each of its matrices, or on factors."""
        method = merge.around(self._context.method(merge.method))
        factors = self._factors(merge, method)
        if factors is None:
            summed = self._summed(item, merge, method)
            return summed or self._dense_change(item, merge, method, thresholds)
        limits = thresholds.get(merge.key)
        ranked = None if limits is None else [limits[expert] for expert in self._given]
        measured = self._measured(item.tensor, method)
        sizes = self._base_norms(item.tensor, merge.layout, method, len(factors))
        weights = _weights_of(item)
        with naming(item.tensor):
            found = [
                merge_factors(method, low_rank, weights, merge.parameters, ranked, measured, size)
                for low_rank, size in zip(factors, sizes, strict=True)
            ]
        found = [merged.times(merge.scale) for merged in found]
        diagnostics = [merged.stats for merged in found]
        if merge.layout is None or not merge.layout.stacked:
            return Change(found[0], diagnostics)
        context = self._context
        stack = torch.empty(self._inputs.base.shape, dtype=context.dtype, device=context.device)
        write_matrices(stack, merge.layout, [merged.delta.dense() for merged in found])
        return Change(stack, diagnostics)

    def unrounded(self, item: WorkItem, merge: Merge, thresholds: Thresholds) -> Change | None:
        """Return the method's result without its rounding to half precision, to measure that loss.

        None: the method's steps do not round, or they follow a tensor pass whose steps rounded.
        """
        if merge.half is None or self._inputs.known:
            return None
        return self.change(item, merge.unrounded, thresholds)

    def _summed(self, item: WorkItem, merge: Merge, method: Method) -> Change | None:
        """Return a linear method's merge of adapters, as one product of their factors side by side.

        None: the method is not linear, or some updates are tensors, not factors.
        """
        if not method.is_linear_for(merge.parameters):
            return None
        stacked = any(isinstance(update, tuple) for update in self._given.values())
        found = self._by_factors(MatrixLayout(stacked=stacked))
        if found is None:
            return None
        with naming(item.tensor):
            given = method.coefficients_for(_weights_of(item), merge.parameters)
            coefficients = [coefficient * merge.scale for coefficient in given]
            products = [LowRank.sum(matrix, coefficients).dense() for matrix in found]
            for matrix, product in zip(found, products, strict=True):
                if not all_finite(product):
                    raise method.beyond(matrix, "gives NaN or Inf", merge.parameters)
        whole = torch.stack(products) if stacked else products[0]
        return Change(whole.view(self._inputs.base.shape), [])

    def _dense_change(
        self, item: WorkItem, merge: Merge, method: Method, thresholds: Thresholds
    ) -> Change:
        groups = self._groups(item, merge, method, thresholds.get(merge.key))
        with naming(item.tensor):
            results = [
                method(group, **merge.parameters).times(merge.scale, group.base) for group in groups
            ]
        diagnostics = [result.stats for result in results]
        if merge.layout is None:
            masks = dict(zip(self._given, results[0].masks, strict=False))
            # Without a layout (tensors of any shape, or parts of them), only diagnostics of a type of the
            # method's own are kept.
            method_diagnostics = diagnostics if method.diagnostics is not Diagnostics else []
            if results[0].weights is not None:
                return Change(results[0].delta, method_diagnostics, masks, results[0].weights)
            return Change(_owned(results[0], self._updates), method_diagnostics, masks)
        like = next(iter(self._updates.values()))
        if len(results) == 1 and not merge.layout.transposed and results[0].delta.is_contiguous():
            return Change(_owned(results[0], self._updates).view_as(like), diagnostics)
        merged = torch.empty_like(like)
        write_matrices(merged, merge.layout, [result.delta for result in results])
        return Change(merged, diagnostics)

    def ranked_vectors(self, item: WorkItem, merge: Merge) -> Iterator[tuple[str, Tensor]]:
        """Yield the values whose magnitudes the merge's global pass ranks, by expert, matrix by matrix."""
        method = merge.procedure
        factors = self._factors(merge, method)
        if factors is not None:
            for low_rank in factors:
                vectors = ranked_factors(method, low_rank, _weights_of(item), merge.parameters)
                yield from zip(self._given, vectors, strict=True)
            return
        for group in self._groups(item, merge, method, None):
            vectors = method.ranked_values(group, merge.parameters)
            yield from zip(self._given, vectors, strict=True)

    @cached_property
    def _updates(self) -> dict[str, Tensor]:
        """The updates as tensors; adapters are multiplied out when a method first asks for the tensors."""
        context = self._context
        return {
            expert: dense(update, self._inputs.base, context.dtype, context.device)
            for expert, update in self._given.items()
        }

    def measured(self, merged: Tensor) -> dict[str, Json]:
        """Return ⟨W̄ − W_0, Δ_t⟩ by expert, and the stable rank and the retention of every matrix."""
        flat = merged.reshape(-1)
        dots: dict[str, Json] = {
            expert: float(torch.dot(flat, update.reshape(-1)))
            for expert, update in self._updates.items()
        }
        if self._item.matrices is None:
            return {"dots": dots}
        parts = matrices(merged, self._item.matrices)
        ranks: list[Json] = [stable_rank(matrix) for matrix in parts]
        retained: list[Json] = [
            {expert: retention(matrix, update, gram) for expert, (update, gram) in experts.items()}
            for matrix, experts in zip(parts, self._with_grams, strict=True)
        ]
        return {"dots": dots, "stable_ranks": ranks, "retention": retained}

    @cached_property
    def _with_grams(self) -> list[dict[str, tuple[Tensor, Tensor]]]:
        """For every matrix, the update of each expert and its Gram matrix; several methods share them."""
        layout = self._item.matrices
        assert layout is not None
        split = {name: matrices(update, layout) for name, update in self._updates.items()}
        count = len(next(iter(split.values())))
        return [
            {name: (parts[place], energy_gram(parts[place])) for name, parts in split.items()}
            for place in range(count)
        ]

    def _factors(self, merge: Merge, method: Method) -> list[list[LowRank]] | None:
        """Return the oriented factors of all updates, for each matrix.

        None: the method needs tensors, or there is no layout and the base was read, or some updates are
        tensors.
        """
        if not method.factored_for(merge.parameters):
            return None
        if merge.layout is None and not self._inputs.base.is_meta:
            return None
        return self._by_factors(merge.layout)

    def _by_factors(self, layout: MatrixLayout | None) -> list[list[LowRank]] | None:
        """Return the oriented factors of all updates, for each matrix; None: some updates are tensors."""
        if layout is not None and layout.parts is not None:
            return None
        stacked, transposed = (layout.stacked, layout.transposed) if layout else (False, False)
        found: dict[str, tuple[LowRank, ...]] = {}
        for expert, update in self._given.items():
            pieces = update if isinstance(update, tuple) else (update,)
            factors = tuple(matrix for matrix in pieces if isinstance(matrix, LowRank))
            if len(factors) == len(pieces) and isinstance(update, tuple) == stacked:
                found[expert] = factors
            elif update is not None:
                return None
        if not found:
            return None
        nothing = tuple(matrix.zero() for matrix in next(iter(found.values())))
        together = zip(*(found.get(expert, nothing) for expert in self._given), strict=True)
        return [[u.mT if transposed else u for u in matrix] for matrix in together]

    def base(self) -> Tensor:
        """Return W_0 in the dtype of the computation."""
        return self._inputs.base.to(self._context.device).to(self._context.dtype)

    def _bases(self, layout: MatrixLayout | None) -> Sequence[Tensor]:
        """Return the base's matrices in the orientation of the updates."""
        return [self.base()] if layout is None else matrices(self.base(), layout)

    def _groups(
        self, item: WorkItem, merge: Merge, method: Method, thresholds: Mapping[str, float] | None
    ) -> Iterator[LinearGroup]:
        layout = merge.layout
        seen: Sequence[Tensor] = ()
        if method.sees == "weights":
            base = self._inputs.base.to(self._context.device)
            seen = seen_as(merge.half, [base, *self._models.values()], self._context.dtype)
            views = [tuple(seen[1:])]
        elif layout is None:
            views = [tuple(self._updates.values())]
        else:
            views = list(zip(*(matrices(u, layout) for u in self._updates.values()), strict=True))
        weights = _weights_of(item)
        shared = self._shared.setdefault(
            (layout, weights), [{} if self._keeps else None for _ in views]
        )
        errors = [()] * len(views) if layout is None else self._rounding_of(layout, views)
        factors = (None if layout is None else self._by_factors(layout)) or [()] * len(views)
        bases = seen[:1] or (self._bases(layout) if method.needs_base else [None] * len(views))
        sizes = self._base_norms(item.tensor, layout, method, len(views))
        given, streams, limits, known = list(self._given), (), None, ()
        if method.seeded:
            streams = tuple(item.tensor.stream(expert, item.first_element) for expert in given)
        if thresholds:
            limits = tuple(thresholds[expert] for expert in given)
        if self._inputs.known:
            known = tuple(self._inputs.known[expert] for expert in given)
        each = zip(views, shared, errors, factors, bases, sizes, strict=True)
        for tensors, cache, rounding, low_rank, base, size in each:
            updates, models = ((), tensors) if method.sees == "weights" else (tensors, ())
            yield LinearGroup(
                updates,
                weights,
                models=models,
                streams=streams,
                expert_statistics=self._measured(item.tensor, method),
                thresholds=limits,
                shared=cache,
                factors=tuple(low_rank),
                rounding=rounding,
                base=base,
                known=known,
                base_norm=size,
            )

    def _rounding_of(
        self, layout: MatrixLayout, views: Sequence[Sequence[Tensor]]
    ) -> list[tuple[Rounding, ...]]:
        if layout not in self._rounding:
            dtypes = [self._rounded_to.get(expert) for expert in self._updates]
            base = self._bases(layout) if any(dtypes) else [None] * len(views)
            self._rounding[layout] = [
                rounding_of(updates, dtypes, w) for updates, w in zip(views, base, strict=True)
            ]
        return self._rounding[layout]

    def _measured(self, tensor: TensorPlan, method: Method) -> tuple[Measured, ...]:
        if not tensor.statistics:
            return ()
        found = self._inputs.measured[method.data]
        return tuple(self._fitted(found[expert], method) for expert in self._given)

    def _base_norms(
        self, tensor: TensorPlan, layout: MatrixLayout | None, method: Method, count: int
    ) -> Sequence[float | None]:
        """Return `base_norm_for` of each matrix; None if the base was not read or the norm is not used."""
        base = self._inputs.base
        if base.is_meta or not method.base_norm:
            return [None] * count
        # Computed on the device even if the base was not sent ahead, so that the rounding is the same.
        base = base.to(self._context.device)
        whole = [base] if layout is None else matrices(base, layout)
        return [base_norm_for(method, tensor, matrix) for matrix in whole]

    def _fitted(self, measured: Measured, method: Method) -> Measured:
        value = measured.value.to(self._context.device).to(self._context.dtype)
        if method.data == "gram":
            return Measured(value, measured.rows, measured.total)
        wanted = next(iter(self._updates.values()))
        if value.shape != wanted.shape:
            padded = torch.zeros_like(wanted)  # rows that the expert's table lacks
            padded[: len(value)] = value
            value = padded
        return Measured(value, measured.rows, measured.total)


@contextmanager
def naming(tensor: TensorPlan) -> Generator[None]:
    """Add the tensor's name to errors of a method in the block; the method itself knows no names."""
    try:
        yield
    except (TensorError, ResourceError) as error:
        raise type(error)(f"'{tensor.name}': {error}") from error
    except Exception as error:  # an error of a user's own method
        getattr(error, "add_note", str)(
            f"while '{tensor.name}' was merged"
        )  # Python 3.11 and later
        raise


def base_norm_for(method: Method, tensor: TensorPlan, stored: Tensor) -> float | None:
    """Return ‖W_0‖ of a stored matrix, in float64; it is summed 64 rows at a time.

    None: the method does not use the norm, or the tensor is outside the sequence of blocks.
    """
    if not method.base_norm or not tensor.info.in_blocks:
        return None
    parts = (stored[start : start + _ROWS] for start in range(0, len(stored), _ROWS))
    return sqrt(sum(square_norm(rows.to(torch.float64)) for rows in parts))


def _owned(result: Merged, updates: Mapping[str, Tensor]) -> Tensor:
    """Return a merged update that may be written over: a copy if the method returned one of the updates."""
    if any(result.delta.data_ptr() == update.data_ptr() for update in updates.values()):
        return result.delta.clone()
    return result.delta


def _weights_of(item: WorkItem) -> tuple[float, ...]:
    return tuple(operand.weight for operand in item.tensor.operands.values())
