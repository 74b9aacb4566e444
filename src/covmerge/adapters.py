"""Adapters in, one adapter out: the merge of the updates alone, without a weight of the base."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import pad

from covmerge.checkpoints import AdapterCheckpoint, FactorHeader, Staging, check_not_input
from covmerge.diagnostics import verify_adapter
from covmerge.engine import Progress, peak_memory
from covmerge.errors import InputError, RecipeError, TensorError
from covmerge.export import AdaptedTensor, AdapterWriter, write_heads, write_manifest
from covmerge.linalg.spectral import truncated_svd
from covmerge.methods import Method, registry
from covmerge.methods.factored import merge_factors
from covmerge.output import (
    Fingerprints,
    MergeResult,
    OpenCheckpoints,
    manifest,
    merge_stats,
    read_heads,
)
from covmerge.plan import Merge, Plan, TensorPlan, build_plan
from covmerge.recipe import Recipe
from covmerge.types import Json, LinearGroup, LowRank, Role


@dataclass(frozen=True)
class _Task:
    """One tensor to merge.

    Attributes:
        plan: its plan.
        action: the plan's action, a merge.
        adapted: what the result will be.
        exact: whether the method is exact on factors; else its result is truncated.
        nbytes: stored bytes of the factors.
    """

    plan: TensorPlan
    action: Merge
    adapted: AdaptedTensor
    exact: bool
    nbytes: int


def merge_to_adapter(
    recipe: Recipe,
    checkpoints: OpenCheckpoints,
    out: Path,
    *,
    device: torch.device,
    progress: Progress,
    overwrite: bool = False,
) -> MergeResult:
    """Merge adapters into one, exactly or truncated to `output.rank`.

    Raises:
        InputError: an expert that is no adapter, or trained a tensor whole; a method that needs more
            than the updates of one tensor, or a rank to truncate its result to.
        CheckFailed: the adapter that was written is not what was merged.
    """
    start = time.perf_counter()
    adapters = _adapters(checkpoints)
    check_not_input(out, checkpoints.paths())
    plan = build_plan(
        recipe, checkpoints.base, checkpoints.experts, checkpoints.statistics, base_unread=True
    )
    tasks = [_task(recipe, tensor, adapters) for tensor in plan.tensors if _is_merged(tensor)]
    notes = [*plan.notes, *_left_out(plan)]
    # Without a journal a merge that is interrupted leaves nothing.
    with Staging(out, overwrite=overwrite) as staging:
        checkpoints.materialize()
        stored = _dtype(recipe, adapters)
        writer = AdapterWriter(staging.folder, [task.adapted for task in tasks], stored)
        with Fingerprints(checkpoints) as fingerprints:
            merged = _work(recipe, tasks, adapters, writer, device, progress)
            writer.finish([adapter.adapter_config for adapter in adapters.values()])
            write_heads(staging.folder, read_heads(plan, checkpoints))
            stats = merge_stats(_adapted(plan, tasks), merged)
            write_manifest(staging.folder, manifest(plan, fingerprints, notes, stats))
        report = replace(verify_adapter(staging.folder), folder=out)
        report.raise_if_failed()
        staging.commit()
    run: dict[str, Json] = {
        "seconds": time.perf_counter() - start,
        "items": len(tasks),
        "peak_memory": peak_memory(),
    }
    return MergeResult(out, None, {}, stats, run, (*notes, *staging.notes), report)


def _adapters(checkpoints: OpenCheckpoints) -> dict[str, AdapterCheckpoint]:
    found: dict[str, AdapterCheckpoint] = {}
    for name, checkpoint in checkpoints.experts.items():
        if not isinstance(checkpoint, AdapterCheckpoint):
            raise InputError(
                f"expert '{name}' ({checkpoint.source}) is a full model: an adapter can only be made "
                "of adapters. Leave out `output.format: adapter` (--as adapter) for a full model"
            )
        found[name] = checkpoint
    return found


def _is_merged(tensor: TensorPlan) -> bool:
    return isinstance(tensor.action, Merge) and any(tensor.sources.values())


def _left_out(plan: Plan) -> list[str]:
    """Say which updates the recipe's rules leave to the base."""
    copied = [
        t for t in plan.tensors if not isinstance(t.action, Merge) and any(t.sources.values())
    ]
    return [f"'{tensor.name}' is not in the adapter: {tensor.rule}" for tensor in copied]


def _task(recipe: Recipe, tensor: TensorPlan, adapters: Mapping[str, AdapterCheckpoint]) -> _Task:
    action = tensor.action
    assert isinstance(action, Merge)
    headers: list[FactorHeader] = []
    for expert, name in tensor.sources.items():
        if name is None:
            continue
        if name not in adapters[expert].low_rank:
            raise TensorError(
                f"'{tensor.name}': expert '{expert}' trained it whole, which an adapter cannot hold "
                "once it is merged. Merge to a full model, or add the rule "
                f"{{match: '{tensor.name}', use: head}} to keep it per expert."
            )
        headers.append(adapters[expert].low_rank[name])
    method = registry.get(action.method)
    _check_method(tensor, action, method, recipe.output.rank)
    exact = method.factored_for(action.parameters)
    rows, columns = headers[0].shape
    together = sum(header.rank for header in headers)
    rank = min(rows, columns, together) if exact else min(rows, columns)
    adapted = AdaptedTensor(
        name=next(name for name in tensor.sources.values() if name is not None),
        shape=tensor.stored.shape,
        rank=min(rank, recipe.output.rank or rank),
        embedding=tensor.role is Role.EMBEDDING,
        transposed=headers[0].transposed,
    )
    nbytes = sum(h.rank * sum(h.shape) * h.dtype.itemsize for h in headers)
    return _Task(tensor, action, adapted, exact, nbytes)


def _check_method(tensor: TensorPlan, action: Merge, method: Method, rank: int | None) -> None:
    """Refuse what one tensor's updates are not enough for.

    Raises:
        RecipeError: the message says what would do.
    """
    layout = action.layout
    needs = {
        "a pass over all tensors (trim: tensor does without)": method.surveyed(action.parameters)
        is not None,
        "statistics of data": method.data != "none",
        "masks beside the model": method.writes_masks,
        "the parts of a fused tensor by themselves": layout is not None
        and layout.parts is not None,
        "a stack of matrices": layout is not None and layout.stacked,
    }
    for need, given in needs.items():
        if given:
            raise RecipeError(
                f"'{tensor.name}': method '{method.name}' needs {need}, which an adapter is not made "
                "by: merge to a full model (--as model)"
            )
    if rank is None and not method.factored_for(action.parameters):
        raise RecipeError(
            f"'{tensor.name}': method '{method.name}' looks at the entries of the updates, so its "
            "result has full rank: say with `output.rank` (--rank) what to truncate it to, or merge "
            "to a full model"
        )


def _work(
    recipe: Recipe,
    tasks: Sequence[_Task],
    adapters: Mapping[str, AdapterCheckpoint],
    writer: AdapterWriter,
    device: torch.device,
    progress: Progress,
) -> list[dict[str, Json]]:
    """Merge and write every tensor; return what there is to say of each."""
    reporting = threading.Lock()

    def one(task: _Task) -> dict[str, Json]:
        update, stats = _merge(recipe, task, adapters, writer.dtype, device)
        writer.write(task.adapted, update)
        with reporting:
            progress.advance(task.plan.name, task.nbytes)
        return stats

    progress.start(sum(task.nbytes for task in tasks))
    try:
        # The matrices are too thin to share a product among cores: each core has tensors of its own.
        with ThreadPoolExecutor(
            torch.get_num_threads(), initializer=torch.set_num_threads, initargs=(1,)
        ) as pool:
            return list(pool.map(one, tasks))
    finally:
        progress.finish()


def _merge(
    recipe: Recipe,
    task: _Task,
    adapters: Mapping[str, AdapterCheckpoint],
    stored: torch.dtype,
    device: torch.device,
) -> tuple[LowRank, dict[str, Json]]:
    """Merge one tensor's updates, in the base's orientation and the stored dtype, on the CPU."""
    dtype: torch.dtype = getattr(torch, recipe.dtype)
    given = {
        expert: adapters[expert].read_factors(name).to(device).to(dtype)
        for expert, name in task.plan.sources.items()
        if name is not None
    }
    nothing = next(iter(given.values())).zero()
    updates = {expert: given.get(expert, nothing) for expert in task.plan.sources}
    squares = {expert: update.square_norm() for expert, update in updates.items()}
    for expert, square in squares.items():
        if not isfinite(square):
            raise TensorError(
                f"'{task.plan.name}': the adapter of expert '{expert}' holds NaN or Inf: fetch it "
                "again, or leave the tensor out with the rule "
                f"{{match: '{task.plan.name}', use: base}}"
            )
    weights = [recipe.experts[expert].weight for expert in updates]
    exact, sigma, stats = _run(task, list(updates.values()), weights)
    rounded = exact.to(stored)
    energy = sigma.square()
    total, kept = float(energy.sum()), float(energy[: task.adapted.rank].sum())
    noticed: dict[str, Json] = {
        **stats,
        "adapter_tensor": task.adapted.name,
        "adapter_rank": rounded.rank,
        "discarded_energy": 1.0 - kept / total if total else 0.0,
        "singular_values": [float(value) for value in sigma],
    }
    entry: dict[str, Json] = {
        "updates": dict(squares),
        "merged": total,
        "rounding": _difference(exact, rounded.to(dtype)).square_norm(),
        "matrices": [noticed],
    }
    return rounded.to(torch.device("cpu")), entry


def _difference(first: LowRank, second: LowRank) -> LowRank:
    return LowRank(
        torch.cat([first.left, second.left], dim=1), torch.cat([first.right, -second.right])
    )


def _run(
    task: _Task, updates: Sequence[LowRank], weights: Sequence[float]
) -> tuple[LowRank, Tensor, Mapping[str, Json]]:
    """Return the merged update at its rank, all singular values, and what the method noticed."""
    action = task.action
    method = registry.get(action.method)
    turned = action.layout is not None and action.layout.transposed
    oriented = [update.mT for update in updates] if turned else updates
    if task.exact:
        found = merge_factors(method, oriented, weights, action.parameters)
        delta, sigma = found.truncated(task.adapted.rank)
        stats = found.stats
    else:
        streams = tuple(task.plan.stream(expert) for expert in task.plan.sources)
        group = LinearGroup(tuple(u.dense() for u in oriented), tuple(weights), streams=streams)
        result = method(group, **action.parameters)
        top = truncated_svd(result.delta, task.adapted.rank, rtol=0.0)
        root = top.kept.to(top.left.dtype).sqrt()
        # A result of lower rank than its place in the file: terms that are zero.
        spare = (0, task.adapted.rank - len(root))
        delta = LowRank(pad(top.left * root, spare), pad(top.right.mT * root, spare).mT)
        sigma, stats = top.sigma, result.stats
    return (delta.mT if turned else delta), sigma, stats


def _dtype(recipe: Recipe, adapters: Mapping[str, AdapterCheckpoint]) -> torch.dtype:
    """The stored dtype: what the recipe says, else the widest of the adapters'."""
    if recipe.output.dtype != "base":
        return getattr(torch, recipe.output.dtype)
    dtypes = {h.dtype for adapter in adapters.values() for h in adapter.low_rank.values()}
    first, *others = dtypes
    for other in others:
        first = torch.promote_types(first, other)
    return first


def _adapted(plan: Plan, tasks: Sequence[_Task]) -> Plan:
    """The plan of the adapter's tensors alone, each in one item."""
    by_name = {item.tensor.name: item for item in plan.items}
    items = tuple(by_name[task.plan.name] for task in tasks)
    return replace(plan, tensors=tuple(task.plan for task in tasks), items=items)
