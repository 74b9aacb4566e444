"""Merge updates into one adapter, exactly or truncated to a rank."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from math import isfinite
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import pad

from covmerge.adapters.names import naming_of
from covmerge.adapters.tasks import Task, describe_left_out, plan_tasks
from covmerge.checkpoints import (
    AdaptedBase,
    AdapterCheckpoint,
    Staging,
    check_not_input,
    remove_others,
)
from covmerge.engine import (
    Change,
    Context,
    Layer,
    Progress,
    Sizes,
    peak_memory,
    read_inputs,
    run_surveys,
    survey_bytes,
)
from covmerge.errors import TensorError
from covmerge.export import (
    AdaptedTensor,
    AdapterWriter,
    WholeTensor,
    write_card,
    write_heads,
)
from covmerge.judgement import check_fit
from covmerge.linalg.lapack import norm
from covmerge.linalg.spectral import truncated_svd
from covmerge.methods.factored import MergedFactors
from covmerge.output import (
    Fingerprints,
    MergeResult,
    OpenCheckpoints,
    manifest,
    merge_stats,
    read_heads,
    seal,
    told_of,
)
from covmerge.plan import Merge, Plan, WorkItem, build_plan
from covmerge.recipe import Recipe
from covmerge.types import Json, LowRank

# So many singular values of each layer are kept for the reader: enough to choose a rank by.
_SPECTRUM = 256


def merge_to_adapter(
    recipe: Recipe,
    checkpoints: OpenCheckpoints,
    out: Path,
    *,
    device: torch.device,
    progress: Progress,
    overwrite: bool = False,
) -> MergeResult:
    """Merge experts into one adapter, exactly or truncated to `output.rank`.

    Of adapters alone the base's weights are not read, except for what they trained whole.

    Raises:
        InputError: anything wrong with the inputs, or something asked for that an adapter cannot
            hold; nothing is left behind.
        CheckFailed: the adapter that was written is not what was merged.
    """
    start = time.perf_counter()
    check_not_input(out, checkpoints.paths())
    adapters = [e for e in checkpoints.experts.values() if isinstance(e, AdapterCheckpoint)]
    given = checkpoints.base
    if len(adapters) == len(checkpoints.experts):
        checkpoints = replace(checkpoints, base=AdaptedBase(checkpoints.base, adapters))
    plan = build_plan(recipe, checkpoints.base, checkpoints.experts, checkpoints.statistics)
    naming = naming_of(plan, checkpoints.experts)
    tasks = plan_tasks(recipe, plan, checkpoints.experts, naming)
    # Without a journal a merge that is interrupted leaves nothing.
    with Staging(out, overwrite=overwrite) as staging:
        checkpoints.materialize()
        parents = checkpoints.parents  # before the work, while the Hub is there
        # Of tensors that are held whole the base's weights decide the result.
        whole = any(isinstance(task.place, WholeTensor) for task in tasks)
        decisive = replace(checkpoints, base=given) if whole else checkpoints
        decisive.check_ties(plan)
        writer = AdapterWriter(
            staging.folder,
            [task.place for task in tasks if isinstance(task.place, AdaptedTensor)],
            [task.place for task in tasks if isinstance(task.place, WholeTensor)],
            [naming.of(tensor) for tensor in plan.tensors],
            _dtype(recipe, plan, adapters),
        )
        with Fingerprints(decisive) as fingerprints:
            fingerprints.follow(1.0)  # adapters are small
            work = _Work(recipe, plan, checkpoints, writer, device, progress)
            done = work.run(tasks)
            merged = _of_tasks(plan, tasks)
            fit = check_fit(merged, done, checkpoints)
            stats = merge_stats(merged, done)
            warnings, noticed = told_of(plan, stats, fit)
            changed = {
                t.item.tensor.name for t, own in zip(tasks, done, strict=True) if own["merged"]
            }
            notes = [
                *plan.notes,
                *noticed,
                *filter(None, [naming.note]),
                *_bases_that_differ(adapters),
                *describe_left_out(plan, tasks, changed),
                *parents.notes,
            ]
            told = manifest(plan, fingerprints, notes, warnings, stats)
            # What was laid in meanwhile may be a link, through which something else would be written.
            removed = remove_others(staging.folder, [writer.file_name])
            written = [
                *writer.finish([adapter.adapter_config for adapter in adapters], checkpoints.base),
                *write_heads(staging.folder, read_heads(plan, checkpoints)),
                write_card(staging.folder, plan, parents, checkpoints.base.config, told),
            ]
        files = [path.relative_to(staging.folder).as_posix() for path in written]
        sealed = seal(staging.folder, told, files, out=out, removed=removed)
        staging.commit()
    run: dict[str, Json] = {
        "seconds": time.perf_counter() - start,
        "items": len(tasks),
        "peak_memory": peak_memory(),
    }
    return MergeResult(
        path=out,
        tensors=None,
        heads={},
        recipe=plan.recipe,
        stats=stats,
        run=run,
        notes=(*notes, *sealed.notes, *staging.notes),
        warnings=warnings,
        verification=sealed.report,
    )


def _bases_that_differ(adapters: Sequence[AdapterCheckpoint]) -> list[str]:
    named = sorted({adapter.base_model or "none" for adapter in adapters})
    if len(named) < 2:
        return []
    return [
        f"the adapters name different bases ({', '.join(named)}), so the merged one names none: load "
        "it over a base of your choice"
    ]


def _of_tasks(plan: Plan, tasks: Sequence[Task]) -> Plan:
    """The plan of the tensors that are worked on, each in one item."""
    items = tuple(task.item for task in tasks)
    return replace(plan, tensors=tuple(item.tensor for item in items), items=items)


def _dtype(recipe: Recipe, plan: Plan, adapters: Sequence[AdapterCheckpoint]) -> torch.dtype:
    """Dtype of the factors: what the recipe says, else the widest of the adapters', or the base's."""
    if recipe.output.dtype != "base":
        return getattr(torch, recipe.output.dtype)
    stored = {header.dtype for adapter in adapters for header in adapter.low_rank.values()}
    if not stored:
        stored = {t.stored.dtype for t in plan.tensors if isinstance(t.action, Merge)}
    first, *others = stored
    for other in others:
        first = torch.promote_types(first, other)
    return first


class _Work:
    """The merge of all tensors of one adapter."""

    def __init__(
        self,
        recipe: Recipe,
        plan: Plan,
        checkpoints: OpenCheckpoints,
        writer: AdapterWriter,
        device: torch.device,
        progress: Progress,
    ) -> None:
        self._plan = plan
        self._sources = checkpoints.sources()
        self._writer = writer
        self._progress = progress
        self._reporting = threading.Lock()
        weights = {name: expert.weight for name, expert in recipe.experts.items()}
        self._context = Context(weights, plan.compute_dtype, device)

    def run(self, tasks: Sequence[Task]) -> list[dict[str, Json]]:
        """Merge and write every tensor; return what there is to say of each."""
        plans = [self._plan]
        self._progress.start(survey_bytes(plans) + sum(task.item.read_bytes for task in tasks))
        try:
            updates = replace(self._sources, updates_only=True)
            found = run_surveys(
                plans,
                updates,
                self._context,
                self._progress.advance,
                lanes=torch.get_num_threads(),
                in_flight=2 * max(task.item.read_bytes for task in tasks),
            )
            self._context = replace(self._context, thresholds=found)
            thin = [task for task in tasks if task.thin]
            # Factors are too thin to share a product among cores: each core has tensors of its own.
            with ThreadPoolExecutor(
                torch.get_num_threads(), initializer=torch.set_num_threads, initargs=(1,)
            ) as pool:
                done = dict(zip((t.item.key for t in thin), pool.map(self._one, thin), strict=True))
            done |= {task.item.key: self._one(task) for task in tasks if not task.thin}
            return [done[task.item.key] for task in tasks]
        finally:
            self._progress.finish()

    def _one(self, task: Task) -> dict[str, Json]:
        item, place = task.item, task.place
        added = isinstance(place, WholeTensor)  # to the base, which is not needed otherwise
        inputs = read_inputs([item], replace(self._sources, updates_only=not added))
        action = item.tensor.action
        # Of a tensor that the base lends to a module that is held whole.
        stats: dict[str, Json] = {
            **Sizes({}, {}, 0.0).as_json(),
            "merged": 0.0,
            "rounding": 0.0,
        }
        if isinstance(action, Merge):
            layer = Layer([item], inputs, self._context)
            (thresholds,) = self._context.thresholds
            if isinstance(place, WholeTensor):
                result = layer.merge(item, action, thresholds)
                self._writer.write_whole(place, result.rows)
                stats = result.stats
            else:
                change = layer.change(item, action, thresholds)
                stats = {**layer.sizes.as_json(), **self._update(item, action, place, change)}
        elif isinstance(place, WholeTensor):
            self._writer.write_whole(place, inputs.base.to(place.stored.dtype))
        if isinstance(place, WholeTensor):
            stats["adapter"] = {"tensor": place.names[0], "ties": place.names[1:]}
        with self._reporting:
            self._progress.advance(item.tensor.name, item.read_bytes)
        return stats

    def _update(
        self, item: WorkItem, action: Merge, place: AdaptedTensor | None, change: Change
    ) -> dict[str, Json]:
        noticed: dict[str, Json] = {"matrices": change.matrices} if change.matrices else {}
        if place is None:
            assert isinstance(change.delta, Tensor)
            left_out: dict[str, Json] = {"merged": norm(change.delta) ** 2, "rounding": 0.0}
            return {**noticed, **left_out, "left_out": True}
        transposed = action.layout is not None and action.layout.transposed
        delta, sigma = _factored(change.delta, place.rank, transposed=transposed)
        rounded = delta.to(self._writer.dtype)
        energy = sigma.double().square()
        total, kept = float(energy.sum()), float(energy[: place.rank].sum())
        lost = _rounding(delta, rounded)
        if not isfinite(total + lost):
            raise TensorError(
                f"'{item.tensor.name}': method '{action.method}' gave NaN or Inf from finite updates, "
                f"or factors that {self._writer.dtype} cannot hold: store them in another dtype "
                "(--out-dtype float32), or merge by `average`"
            )
        self._writer.write(place, rounded.to(torch.device("cpu")))
        return {
            **noticed,
            "merged": total,
            "rounding": lost,
            "adapter": {
                "tensor": place.name,
                "rank": place.rank,
                "discarded_energy": 1.0 - kept / total if total else 0.0,
                "singular_values": [float(value) for value in sigma[:_SPECTRUM]],
            },
        }


def _factored(
    delta: Tensor | MergedFactors, rank: int, *, transposed: bool
) -> tuple[LowRank, Tensor]:
    """Return the best approximation of a rank in the stored orientation, and all singular values."""
    if isinstance(delta, MergedFactors):
        found, sigma = delta.truncated(rank)
        return (found.mT if transposed else found), sigma
    top = truncated_svd(delta.reshape(len(delta), -1), rank, rtol=0.0, equals=False)
    root = top.kept.to(top.left.dtype).sqrt()
    # A result of lower rank than its place in the file: terms that are zero.
    spare = (0, rank - len(root))
    return LowRank(pad(top.left * root, spare), pad(top.right.mT * root, spare).mT), top.sigma


def _rounding(exact: LowRank, rounded: LowRank) -> float:
    """‖LR − L̃R̃‖²_F ≈ Σ_j σ_j (‖L_j − L̃_j‖² + ‖R_j − R̃_j‖²), where LᵀL = RRᵀ = diag(σ).

    What is left out are products of errors that do not know of each other; a Gram matrix of all
    would be a third of the work on a layer.
    """
    if rounded.left.dtype == exact.left.dtype:
        return 0.0
    back = rounded.to(exact.left.dtype)
    sigma = exact.right.square().sum(dim=1)
    left = (exact.left - back.left).square().sum(dim=0)
    right = (exact.right - back.right).square().sum(dim=1)
    return float((sigma * (left + right)).sum(dtype=torch.float64))
