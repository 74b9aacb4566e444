"""Adapters in, one adapter out: the merge of the updates alone, without a weight of the base."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path

import torch
from torch import Tensor

from covmerge.checkpoints import (
    AdapterCheckpoint,
    FactorHeader,
    Staging,
    check_not_input,
    open_checkpoint,
)
from covmerge.engine import RunStats, peak_memory, tensor_stats, totals
from covmerge.errors import CheckFailed, CovmergeError, InputError, RecipeError, TensorError
from covmerge.export import AdaptedTensor, AdapterWriter, write_heads, write_manifest
from covmerge.linalg.spectral import truncated_svd
from covmerge.methods import registry
from covmerge.methods.factored import merge_factors
from covmerge.output import Fingerprints, MergeResult, OpenCheckpoints, read_heads
from covmerge.plan import Merge, Plan, TensorPlan, build_plan
from covmerge.recipe import Recipe, dump_recipe
from covmerge.types import Json, LinearGroup, LowRank, Role
from covmerge.version import __version__


@dataclass(frozen=True)
class _Task:
    """One tensor to merge: its plan, the action, and what the result will be."""

    plan: TensorPlan
    action: Merge
    adapted: AdaptedTensor
    exact: bool


def merge_to_adapter(
    recipe: Recipe,
    checkpoints: OpenCheckpoints,
    out: Path,
    *,
    device: torch.device,
    overwrite: bool = False,
) -> MergeResult:
    """Merge adapters into one, exactly or truncated to `output.rank`.

    Raises:
        InputError: an expert that is no adapter, or trained a tensor whole; a method that needs the
            updates as matrices, without a rank to truncate to.
        CheckFailed: the adapter that was written is not what was merged.
    """
    start = time.perf_counter()
    adapters = _adapters(checkpoints)
    check_not_input(out, checkpoints.paths())
    plan = build_plan(recipe, checkpoints.base, checkpoints.experts, base_unread=True)
    tasks = [_task(recipe, tensor, adapters) for tensor in plan.tensors if _is_merged(tensor)]
    stored = _dtype(recipe, adapters)
    # Without a journal a merge that is interrupted leaves nothing.
    with Staging(out, overwrite=overwrite) as staging:
        checkpoints.materialize()
        fingerprints = Fingerprints(checkpoints)
        writer = AdapterWriter(staging.folder, [task.adapted for task in tasks], stored)

        def work(task: _Task) -> dict[str, Json]:
            update, stats = _merge(recipe, task, adapters, device)
            writer.write(task.adapted, update.to(torch.device("cpu")))
            return stats

        # The matrices are too thin to share a product among cores: each core has tensors of its own.
        with ThreadPoolExecutor(
            torch.get_num_threads(), initializer=torch.set_num_threads, initargs=(1,)
        ) as pool:
            merged = list(pool.map(work, tasks))
        writer.finish([adapter.adapter_config for adapter in adapters.values()])
        write_heads(staging.folder, read_heads(plan, checkpoints))
        stats = _statistics(plan, tasks, merged)
        write_manifest(
            staging.folder,
            {
                "covmerge": __version__,
                "recipe": dump_recipe(recipe),
                "family": plan.family,
                "sources": fingerprints.result(),
                "notes": plan.notes,
                **stats,
            },
        )
        _verify(staging.folder, tasks)
        staging.commit()
    run: dict[str, Json] = {
        "seconds": time.perf_counter() - start,
        "items": len(tasks),
        "peak_memory": peak_memory(),
    }
    return MergeResult(out, None, {}, stats, run, (*plan.notes, *staging.notes))


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
    oriented = action.layout is None or not (action.layout.stacked or action.layout.parts)
    exact = oriented and method.factored_for(action.parameters)
    limit = recipe.output.rank
    if not exact and limit is None:
        raise RecipeError(
            f"'{tensor.name}': method '{method.name}' looks at the entries of the updates, so its "
            "result has full rank: say with `output.rank` (--rank) what to truncate it to, or merge "
            "to a full model"
        )
    rows, columns = headers[0].shape
    together = sum(header.rank for header in headers)
    # U holds the ones beside the left factors (`covmerge.methods.factored`).
    rank = min(columns, together, rows) if exact else min(rows, columns)
    adapted = AdaptedTensor(
        name=next(name for name in tensor.sources.values() if name is not None),
        shape=tensor.stored.shape,
        rank=min(rank, limit or rank),
        embedding=tensor.role is Role.EMBEDDING,
        transposed=headers[0].transposed,
    )
    return _Task(tensor, action, adapted, exact)


def _merge(
    recipe: Recipe,
    task: _Task,
    adapters: Mapping[str, AdapterCheckpoint],
    device: torch.device,
) -> tuple[LowRank, dict[str, Json]]:
    """Merge one tensor's updates, in the base's orientation."""
    dtype: torch.dtype = getattr(torch, recipe.dtype)
    given = {
        expert: adapters[expert].read_factors(name).to(device).to(dtype)
        for expert, name in task.plan.sources.items()
        if name is not None
    }
    first = next(iter(given.values()))
    nothing = LowRank(first.left[:, :0], first.right[:0])
    updates = [given.get(expert, nothing) for expert in task.plan.sources]
    weights = [recipe.experts[expert].weight for expert in task.plan.sources]
    norms = {
        expert: _square(update) for expert, update in zip(task.plan.sources, updates, strict=True)
    }
    for expert, square in norms.items():
        if not isfinite(square):
            raise TensorError(
                f"'{task.plan.name}': the adapter of expert '{expert}' holds NaN or Inf: fetch it "
                "again, or leave the tensor out with the rule "
                f"{{match: '{task.plan.name}', use: base}}"
            )
    smaller, sigma, stats = _run(task, updates, weights)
    energy = sigma.square()
    total = float(energy.sum())
    kept = float(energy[: task.adapted.rank].sum())
    noticed: dict[str, Json] = {
        **stats,
        "adapter_rank": smaller.rank,
        "discarded_energy": 1.0 - kept / total if total else 0.0,
        "singular_values": [float(value) for value in sigma],
    }
    entry: dict[str, Json] = {
        "updates": dict(norms),
        "merged": total,
        "rounding": 0.0,
        "matrices": [noticed],
    }
    return smaller, entry


def _run(
    task: _Task, updates: Sequence[LowRank], weights: Sequence[float]
) -> tuple[LowRank, Tensor, Mapping[str, Json]]:
    """Return the merged update at its rank, all singular values, and what the method noticed."""
    action = task.action
    method = registry.get(action.method)
    turned = action.layout is not None and action.layout.transposed
    oriented = [LowRank(u.right.mT, u.left.mT) if turned else u for u in updates]
    if task.exact:
        found = merge_factors(method, oriented, weights, action.parameters)
        delta, sigma = found.truncated(task.adapted.rank)
        stats = found.stats
    else:
        group = LinearGroup(tuple(u.dense() for u in oriented), tuple(weights))
        result = method(group, **action.parameters)
        top = truncated_svd(result.delta, task.adapted.rank, rtol=0.0)
        root = top.kept.to(top.left.dtype).sqrt()
        delta = LowRank(top.left * root, (top.right.mT * root).mT)
        sigma, stats = top.sigma, result.stats
    return (LowRank(delta.right.mT, delta.left.mT) if turned else delta), sigma, stats


def _square(update: LowRank) -> float:
    left, right = update.left.double(), update.right.double()
    return float(((left.mT @ left) * (right @ right.mT)).sum().clamp_min(0.0))


def _dtype(recipe: Recipe, adapters: Mapping[str, AdapterCheckpoint]) -> torch.dtype:
    """The stored dtype: what the recipe says, else the widest of the adapters'."""
    if recipe.output.dtype != "base":
        return getattr(torch, recipe.output.dtype)
    dtypes = {h.dtype for adapter in adapters.values() for h in adapter.low_rank.values()}
    first, *others = dtypes
    for other in others:
        first = torch.promote_types(first, other)
    return first


def _statistics(
    plan: Plan, tasks: Sequence[_Task], merged: Sequence[Mapping[str, Json]]
) -> dict[str, Json]:
    """Statistics as those of a full merge, of the tensors that the adapter updates."""
    by_name = {item.tensor.name: item for item in plan.items}
    items = tuple(by_name[task.plan.name] for task in tasks)
    part = replace(plan, tensors=tuple(task.plan for task in tasks), items=items)
    done = RunStats(tuple(merged), 0.0, 0.0, 0.0, 0.0, 0.0, 0)
    entries = tensor_stats(part, done)
    heads = {expert: sorted(kept) for expert, kept in plan.heads.items()}
    return {"totals": totals(entries), "heads": heads, "tensors": entries}


def _verify(folder: Path, tasks: Sequence[_Task]) -> None:
    """Read the adapter back: every tensor, its shape, finite values.

    Raises:
        CheckFailed: it is not what was merged.
    """
    wanted = {task.adapted.name: task.adapted.rank for task in tasks}
    try:
        written = open_checkpoint(folder)
        assert isinstance(written, AdapterCheckpoint)
        found = {name: header.rank for name, header in written.low_rank.items()}
        finite = all(isfinite(_square(written.read_factors(name))) for name in found)
        written.close()
    except CovmergeError as error:
        raise CheckFailed(f"the merged adapter cannot be read back: {error}") from error
    if found != wanted or not finite:
        raise CheckFailed(
            f"the merged adapter has {len(found)} updates, {len(wanted)} were merged"
            + ("" if finite else ", and some are not finite")
        )
