"""The one worker function: a work item's tensors in, merged rows and statistics out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import repeat
from math import isfinite, sqrt

import torch
from torch import Tensor

from covmerge.checkpoints import Checkpoint
from covmerge.errors import TensorError
from covmerge.linalg.lapack import norm
from covmerge.methods import Method, registry
from covmerge.plan import Merge, WorkItem
from covmerge.tensors import matrices, write_matrices
from covmerge.types import Json, LinearGroup


@dataclass(frozen=True)
class Inputs:
    """Stored rows of one work item: the base's, and per expert its own or None.

    The computation empties `experts` as it goes, so that stored rows and their updates are not all
    alive together.
    """

    base: Tensor
    experts: dict[str, Tensor | None]


def read_inputs(item: WorkItem, base: Checkpoint, experts: Mapping[str, Checkpoint]) -> Inputs:
    """Read what an item needs, in the stored dtypes."""
    tensor = item.tensor
    own = base.read(tensor.name, item.rows)
    if not isinstance(tensor.action, Merge):
        return Inputs(own, {})
    rows: dict[str, Tensor | None] = {}
    for expert, name in tensor.sources.items():
        rows[expert] = None if name is None else _read_rows(experts[expert], name, item.rows)
    return Inputs(own, rows)


def _read_rows(expert: Checkpoint, name: str, rows: range | None) -> Tensor:
    """Read rows of an expert, whose table may be shorter or longer than the base's."""
    if rows is None:
        return expert.read(name)
    held = expert.headers[name].shape[0]
    return expert.read(name, range(min(rows.start, held), min(rows.stop, held)))


def compute(
    item: WorkItem,
    inputs: Inputs,
    weights: Mapping[str, float],
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[Tensor, dict[str, Json]]:
    """Merge the rows of one item.

    Returns:
        The merged rows in the output dtype, on the CPU, and the item's statistics: squared norms,
        which add up over the items of a tensor, and what the method noticed, a matrix.

    Raises:
        TensorError: NaN or Inf in the inputs, or in the result.
    """
    tensor = item.tensor
    if not isinstance(tensor.action, Merge):
        return inputs.base.to(tensor.output.dtype), {}

    method = registry.get(tensor.action.method)
    base = inputs.base.to(device).to(dtype)
    updates: dict[str, Tensor] = {}
    squares: dict[str, float] = {}
    for expert in list(inputs.experts):
        stored = inputs.experts.pop(expert)
        if stored is not None:
            updates[expert] = _update(stored, base, device)
        elif tensor.absent == "unchanged":
            updates[expert] = torch.zeros_like(base)
        else:
            continue
        squares[expert] = _square(updates[expert])
        if stored is not None and not isfinite(squares[expert]):
            _name_what_is_not_finite(item, inputs.base, expert, stored)
        del stored
    given_base = base if method.needs_base else None
    del base  # formed again for the sum: a method's workspace is the peak
    merged, matrix_stats = _merge(tensor.action, method, given_base, updates, weights)
    del updates, given_base
    square_merged = _square(merged)
    if not isfinite(square_merged):
        raise TensorError(
            f"'{tensor.name}': method '{method.name}' gave NaN or Inf from finite updates of norms "
            + ", ".join(f"{expert}: {sqrt(square):.3g}" for expert, square in squares.items())
            + ". Please report this tensor; `average` merges it meanwhile."
        )
    exact = merged.add_(inputs.base.to(device).to(dtype))
    result = exact.to(tensor.output.dtype)
    stats: dict[str, Json] = {
        "updates": squares,
        "merged": square_merged,
        "rounding": _square(exact.sub_(result.to(dtype))) if result.dtype != dtype else 0.0,
    }
    if matrix_stats:
        stats["matrices"] = matrix_stats
    return result.cpu(), stats


def _update(stored: Tensor, base: Tensor, device: torch.device) -> Tensor:
    """Δ_t = W_t − W_0; rows that the expert's table lacks count as unchanged."""
    update = stored.to(device).to(base.dtype)
    if update.shape == base.shape:
        # A fresh tensor from the reader, or one just cast: nobody else sees the subtraction.
        return update.sub_(base)
    padded = torch.zeros_like(base)
    torch.sub(update, base[: len(update)], out=padded[: len(update)])
    return padded


def _merge(
    action: Merge,
    method: Method,
    base: Tensor | None,
    updates: Mapping[str, Tensor],
    weights: Mapping[str, float],
) -> tuple[Tensor, list[Json]]:
    """Run the method on the tensor itself, or on each of its matrices."""
    ordered = tuple(weights[expert] for expert in updates)
    if action.layout is None:
        group = LinearGroup(tuple(updates.values()), ordered, base)
        return method(group, **action.parameters).delta, []
    layout = action.layout
    views = zip(*(matrices(update, layout) for update in updates.values()), strict=True)
    bases = repeat(None) if base is None else matrices(base, layout)
    results = [
        method(LinearGroup(group, ordered, own), **action.parameters)
        for group, own in zip(views, bases, strict=False)
    ]
    stats: list[Json] = [dict(result.stats) for result in results]
    if len(results) == 1 and not layout.transposed and results[0].delta.is_contiguous():
        return results[0].delta.view_as(next(iter(updates.values()))), stats
    merged = torch.empty_like(next(iter(updates.values())))
    write_matrices(merged, layout, [result.delta for result in results])
    return merged, stats


def _square(tensor: Tensor) -> float:
    """‖·‖²_F: what adds up over the items of a tensor."""
    return norm(tensor) ** 2


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
