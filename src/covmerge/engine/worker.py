"""The one worker function: a work item's tensors in, merged rows and statistics out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor

from covmerge.checkpoints import Checkpoint
from covmerge.errors import TensorError
from covmerge.linalg.lapack import norm
from covmerge.methods import registry
from covmerge.plan import Merge, WorkItem
from covmerge.tensors import matrices, write_matrices
from covmerge.types import Json, LinearGroup


@dataclass(frozen=True)
class Inputs:
    """Stored rows of one work item: the base's, and per expert its own or None."""

    base: Tensor
    experts: Mapping[str, Tensor | None]


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

    base = inputs.base.to(device).to(dtype)
    updates: dict[str, Tensor] = {}
    for expert, stored in inputs.experts.items():
        if stored is not None:
            updates[expert] = _update(stored, base, device)
        elif tensor.absent == "unchanged":
            updates[expert] = torch.zeros_like(base)
    squares = {expert: _square(update) for expert, update in updates.items()}
    _check_finite(item, inputs, squares)

    merged, matrix_stats = _merge(tensor.action, base, updates, weights)
    square_merged = _square(merged)
    if not _is_finite(square_merged):
        raise TensorError(
            f"'{tensor.name}': method '{tensor.action.method}' gave NaN or Inf from finite updates of "
            f"norms {_norms(squares)}. Please report this tensor; `average` merges it meanwhile."
        )
    exact = base.add_(merged)
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
    action: Merge, base: Tensor, updates: Mapping[str, Tensor], weights: Mapping[str, float]
) -> tuple[Tensor, list[Json]]:
    """Run the method on the tensor itself, or on each of its matrices."""
    method = registry.get(action.method)
    ordered = tuple(weights[expert] for expert in updates)
    if action.layout is None:
        group = LinearGroup(tuple(updates.values()), ordered, base)
        return method(group, **action.parameters).delta, []
    bases = matrices(base, action.layout)
    views = [matrices(update, action.layout) for update in updates.values()]
    results = [
        method(LinearGroup(tuple(group), ordered, own), **action.parameters)
        for own, *group in zip(bases, *views, strict=True)
    ]
    merged = torch.empty_like(base)
    write_matrices(merged, action.layout, [result.delta for result in results])
    return merged, [dict(result.stats) for result in results]


def _square(tensor: Tensor) -> float:
    """‖·‖²_F: what adds up over the items of a tensor."""
    return norm(tensor) ** 2


def _is_finite(value: float) -> bool:
    return value - value == 0.0


def _check_finite(item: WorkItem, inputs: Inputs, squares: Mapping[str, float]) -> None:
    """Name the first input with NaN or Inf; norms tell cheaply whether there is one."""
    if all(map(_is_finite, squares.values())):
        return
    start = 0 if item.rows is None else item.rows.start
    named = [("the base", inputs.base), *((f"expert '{e}'", t) for e, t in inputs.experts.items())]
    for source, stored in named:
        if stored is None:
            continue
        bad = ~torch.isfinite(stored.float())
        if bad.any():
            where = [int(axis) for axis in bad.nonzero()[0]] or [0]
            where[0] += start
            raise TensorError(
                f"'{item.tensor.name}' of {source} holds {int(bad.sum())} NaN or Inf values, the first "
                f"at {where}. Fetch the checkpoint again, or leave the tensor to the base with the "
                f"rule {{match: '{item.tensor.name}', use: base}}."
            )
    raise TensorError(
        f"'{item.tensor.name}': an update overflows the compute dtype; "
        "compute in float64 (--dtype float64)."
    )


def _norms(squares: Mapping[str, float]) -> str:
    return ", ".join(f"{expert}: {sqrt(square):.3g}" for expert, square in squares.items())
