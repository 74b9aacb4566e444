"""Building the plan from a recipe and the headers of its checkpoints.

`decide.py` decides what happens to each tensor. This module divides the work into items; `costs.py`
counts their memory and operations. `notes.py` has the notes for the user.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from math import lcm, prod
from typing import Any

import torch

from covmerge.base.errors import InputError, RecipeError
from covmerge.base.settings import UNNAMED, UNNAMED_NOTE, Hint, choose
from covmerge.base.types import Role, TensorHeader
from covmerge.base.version import __version__
from covmerge.files.checkpoints.base import Checkpoint
from covmerge.files.checkpoints.folder import weights_stem
from covmerge.maths.methods import registry
from covmerge.maths.methods.registry import Unit
from covmerge.plan.planning.adapter import plan_adapter
from covmerge.plan.planning.adapter_names import form_of
from covmerge.plan.planning.align import Alignment, align, check_same_architecture, stored_ties
from covmerge.plan.planning.costs import Costs, shape_of
from covmerge.plan.planning.data import (
    Statistics,
    check_statistics,
    find_statistics,
    notes_on_missing_statistics,
    notes_on_unread_statistics,
)
from covmerge.plan.planning.decide import check_without_base, head_names_of, plan_tensors
from covmerge.plan.planning.forms import ModelTensor, Unwritten, head_part
from covmerge.plan.planning.models import Model
from covmerge.plan.planning.notes import plan_notes
from covmerge.plan.planning.operations import Copy, Merge, Operand, expert_key
from covmerge.plan.planning.quantise import quantised
from covmerge.plan.planning.rules import Rules
from covmerge.plan.planning.types import Formed, Plan, PlannedPass
from covmerge.plan.planning.varied import as_mergekit
from covmerge.plan.planning.work import TOGETHER_ELEMENTS, TensorPlan, WorkItem
from covmerge.plan.recipe import Recipe

# Elementwise work uses row blocks of about this many elements. They are large enough for sequential
# reads, and small enough that an embedding of any size needs little memory.
BLOCK_ELEMENTS = 1 * 2**20
# As many elements of a block are merged at once as fit into the cache, with all temporaries.
_PART_ELEMENTS = 2**18
_FULL_WIDTH = 16  # bytes of all experts' updates of an element up to which blocks are that long


def build_plans(
    recipes: Sequence[Recipe],
    base: Checkpoint,
    experts: Mapping[str, Checkpoint],
    statistics: Statistics | None = None,
    *,
    whole: bool = False,
) -> list[Plan]:
    """Plan several recipes over the same checkpoints, so that one reading serves all of them.

    All decisions that need only headers are made. The plans have the same items: each item has the
    same rows of the same tensor, as many as any of the plans must process at once. If they are to be
    `whole`, each has at least one whole matrix, so that it can be measured. The recipes name the experts
    in one order.

    Raises:
        InputError: inputs do not fit together; the message has the tensor, the shapes and a next step.
    """
    if whole and not base.is_source:
        raise InputError(
            "the recipe has no base, and what is measured are updates of one: give a base. For a report, "
            "merge again with one"
        )
    base_model = Model.of(base)
    models = {name: Model.of(expert, name) for name, expert in experts.items()}
    for model in models.values():
        check_same_architecture(base_model, model)
    inputs = _Inputs(base_model, models, statistics or {}, alone=len(recipes) == 1 and not whole)
    named = [_with_method(_with_names(recipe, experts)) for recipe in recipes]
    drafts = _of_same_tensors([_draft(recipe, chosen, inputs) for recipe, chosen in named], base)
    # The plan that needs the most rows at once has the fewest ranges.
    ranges = [
        min(
            (
                list(_row_ranges(d, t, whole, _step(together)))
                for d, t in zip(drafts, together, strict=True)
            ),
            key=len,
        )
        for together in zip(*(draft.tensors for draft in drafts), strict=True)
    ]
    return [_plan(draft, ranges) for draft in drafts]


@dataclass(frozen=True)
class _Inputs:
    """The inputs of all plans over the same checkpoints; `alone`: there is one plan and no measuring."""

    base: Model
    models: Mapping[str, Model]
    statistics: Statistics
    alone: bool
    # By the keys of a recipe that decide it: recipes may differ only in their method.
    aligned: dict[str, Mapping[str, Alignment]] = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class _Draft:
    """A recipe's decision for each tensor, before the work is divided into items."""

    inputs: _Inputs
    recipe: Recipe
    chosen: str | None
    alignments: Mapping[str, Alignment]
    head_names: tuple[str, ...]
    formed: Formed
    tensors: tuple[TensorPlan, ...]  # those of `formed`, and others that only other drafts have

    @property
    def costs(self) -> Costs:
        itemsize = getattr(torch, self.recipe.dtype).itemsize
        return Costs(self.inputs.models, self.inputs.statistics, itemsize, self.inputs.alone)


def _draft(recipe: Recipe, chosen: str | None, inputs: _Inputs) -> _Draft:
    base, models, statistics = inputs.base, inputs.models, inputs.statistics
    checkpoints = {name: model.checkpoint for name, model in models.items()}
    check_statistics(recipe, checkpoints, statistics)
    try:
        rules = Rules(recipe, base.description.family, base.headers)
    except RecipeError as error:
        if chosen is None or not recipe.parameters:
            raise
        raise RecipeError(
            f"{error} No method is named, and {recipe.method} was chosen, as {chosen}. Name the method "
            f"that the parameters are for: {Hint('method', 'NAME')}"
        ) from error
    key = recipe.model_dump_json(include={"tensors", "rules"})
    if key not in inputs.aligned:
        inputs.aligned[key] = {
            name: align(base, model, recipe.tensors, rules.chosen_use)
            for name, model in models.items()
        }
    alignments = inputs.aligned[key]
    head_names = head_names_of(base, alignments)
    found = (
        find_statistics(recipe, tensor, statistics)
        for tensor in plan_tensors(recipe, base, rules, models, alignments, head_names)
    )
    tensors = as_mergekit(
        tuple(found), lambda expert, operand: models[expert].dtype(str(operand.tensor))
    )
    if not base.checkpoint.is_source:
        check_without_base(tensors)
    wanted = registry.get(recipe.method).data
    if wanted != "none" and not any(tensor.statistics for tensor in tensors):
        held = next((file.names(wanted)[0] for file in statistics.values()), None)
        raise InputError(
            f"method '{recipe.method}': the statistics name none of the tensors that it merges (they "
            f"name '{held}'): were they collected on models with other names, or do the recipe's "
            "rules leave nothing to the method?"
        )
    if not any(tensor.merge for tensor in tensors):
        raise InputError(
            f"nothing to merge: by the recipe's rules every tensor of {base.checkpoint.source} is copied "
            "from the base"
        )
    if recipe.output.format == "model":
        formed = quantised(recipe, tensors, base.checkpoint)
    else:
        formed = plan_adapter(recipe, tensors, checkpoints, base.checkpoint.config)
    return _Draft(inputs, recipe, chosen, alignments, head_names, formed, formed.tensors)


def _of_same_tensors(drafts: Sequence[_Draft], base: Checkpoint) -> list[_Draft]:
    """Give each draft the tensors that only other drafts have, with an operation that writes nothing."""
    held = {tensor.name: tensor for draft in drafts for tensor in draft.tensors}
    order = [name for name in base.headers if name in held]

    def tensors(draft: _Draft) -> Iterator[TensorPlan]:
        drafted = {tensor.name: tensor for tensor in draft.tensors}
        for name in order:
            rule = "base (it is not in the adapter)"
            idle = {"operation": Copy(), "form": Unwritten(), "base": None, "rule": rule}
            yield drafted[name] if name in drafted else replace(held[name], **idle)

    return [replace(draft, tensors=tuple(tensors(draft))) for draft in drafts]


def _plan(draft: _Draft, ranges: Sequence[Sequence[range | None]]) -> Plan:
    inputs = draft.inputs
    base, models, method = inputs.base, inputs.models, draft.recipe.method
    items = tuple(
        item
        for tensor, tensor_ranges in zip(draft.tensors, ranges, strict=True)
        for item in _work_items(draft, tensor, tensor_ranges)
    )
    heads: dict[str, dict[str, TensorHeader]] = {}
    for name, alignment in draft.alignments.items():
        placed = (alignment.names[n] for n in draft.head_names if n in alignment.names)
        expert_heads = [*alignment.heads, *placed]
        if expert_heads:
            heads[name] = {h: replace(models[name].headers[h], module=None) for h in expert_heads}
    plan = Plan(
        recipe=draft.recipe,
        tensors=draft.tensors,
        items=(*items, *_head_items(heads, models)),
        global_passes=tuple(_global_passes(items)),
        heads=heads,
        family=base.description.family,
        chosen=draft.chosen,
        notes=(
            *([] if draft.chosen is None else [f"{UNNAMED_NOTE}{method}, as {draft.chosen}"]),
            *notes_on_missing_statistics(draft.tensors),
            *(notes_on_unread_statistics(draft.recipe, inputs.statistics) if inputs.alone else ()),
            *plan_notes(draft.recipe, draft.tensors, base, models, draft.alignments),
            *draft.formed.notes,
        ),
        tied={None: stored_ties(base), **{n: a.tied for n, a in draft.alignments.items()}},
        metadata={"covmerge": __version__, "method": method},
        parameters=draft.formed.parameters,
        stem=weights_stem(base.checkpoint.config),
        quantisation=draft.formed.settings,
        gguf=draft.formed.gguf,
    )
    others = [f"{one.kind} '{one.name}' is not covmerge's own: {one}" for one in plan.origins]
    return replace(plan, notes=(*plan.notes, *others))


def _head_items(
    heads: Mapping[str, Mapping[str, TensorHeader]], models: Mapping[str, Model]
) -> Iterator[WorkItem]:
    for expert, headers in heads.items():
        for name, header in headers.items():
            tensor = TensorPlan(
                stored=header,
                output=header,
                info=replace(models[expert].description.tensors[name], role=Role.HEAD),
                operation=Copy(),
                rule="kept for its expert",
                operands={},
                base=Operand(expert_key(expert), name),
                form=ModelTensor(head_part(expert)),
            )
            for rows in header.row_blocks(BLOCK_ELEMENTS):
                size = header.nbytes if rows is None else header.nbytes_of(rows)
                yield WorkItem(tensor, rows, size, size, workspace=0, flops=0.0)


def _with_method(recipe: Recipe) -> tuple[Recipe, str | None]:
    """Return the recipe with a method, and the reason for the method if the recipe named none."""
    if recipe.method != UNNAMED:
        return recipe, None
    name, why = choose(len(recipe.experts))
    return recipe.model_copy(update={"method": name}), why


def _with_names(recipe: Recipe, experts: Mapping[str, Checkpoint]) -> Recipe:
    """Return the recipe with the format of a merged adapter's file, if it left that open."""
    if recipe.output.format != "adapter" or recipe.output.names is not None:
        return recipe
    output = recipe.output.model_copy(update={"names": form_of(experts)})
    return recipe.model_copy(update={"output": output})


def _global_passes(items: Sequence[WorkItem]) -> Iterator[PlannedPass]:
    together: dict[str, list[WorkItem]] = {}
    found: dict[str, tuple[Merge, float]] = {}
    for _, neighbours in groupby(items, key=lambda item: id(item.tensor)):
        tensor_items = list(neighbours)
        merge = tensor_items[0].tensor.merge
        density = None if merge is None else merge.procedure.ranked(merge.parameters)
        if merge is not None and density is not None:
            found.setdefault(merge.key, (merge, density))
            together.setdefault(merge.key, []).extend(tensor_items)
    for key, (merge, density) in found.items():
        yield PlannedPass(merge, density, tuple(PlannedPass.counting(together[key])))


def _step(together: Sequence[TensorPlan]) -> int | None:
    """Return the number of rows that all plans can write together; None: all rows."""
    steps = [tensor.form.rows_together for tensor in together]
    return None if None in steps else lcm(*filter(None, steps))


def _row_ranges(
    draft: _Draft, tensor: TensorPlan, whole: bool, step: int | None
) -> Iterator[range | None]:
    """Yield ranges of rows that can be processed separately, in multiples of `step` rows."""
    if step is None:
        yield range(tensor.output.shape[0]) if tensor.output.shape else None
        return
    action, shape = tensor.merge, tensor.output.shape
    unit: Unit = "element"
    if action is not None:
        unit = action.procedure.unit_for(action.parameters)
        layout = action.layout
        if whole and layout is None and tensor.matrices is not None and unit != "tensor":
            unit, layout = "matrix", tensor.matrices
        if layout is not None and layout.stacked and step == 1:
            yield from (range(index, index + 1) for index in range(shape[0]))
            return
    if _goes_by_rows(unit, shape):
        yield from tensor.output.row_blocks(_block_elements(draft, tensor), step)
    else:
        yield range(shape[0]) if shape else None


def _block_elements(draft: _Draft, tensor: TensorPlan) -> int:
    """Return the number of elements in a block of rows; fewer for many experts or float64."""
    summed = draft.inputs.alone and draft.costs.summed(tensor)
    experts = 1 if summed else len(draft.inputs.models)
    width = max(1, experts) * draft.costs.itemsize
    return max(1, min(BLOCK_ELEMENTS, BLOCK_ELEMENTS * _FULL_WIDTH // width))


def _work_items(
    draft: _Draft, tensor: TensorPlan, ranges: Sequence[range | None]
) -> Iterator[WorkItem]:
    """Yield a tensor's work items; costs are computed once per number of rows: there may be 10⁵ items."""
    known: dict[int, WorkItem] = {}
    for rows in ranges:
        alike = None if rows is None else known.get(len(rows))
        if alike is not None:
            yield replace(alike, rows=rows, write_bytes=tensor.written_bytes(rows))
            continue
        item = _work_item(draft, tensor, rows)
        if rows is not None:
            known[len(rows)] = item
        yield item


def _work_item(draft: _Draft, tensor: TensorPlan, rows: range | None) -> WorkItem:
    """Return the work item of some rows: how many are merged at once, and whether they are read twice."""
    merge, inputs, costs = tensor.merge, draft.inputs, draft.costs
    if merge is None:
        return costs.of_copy(tensor, rows)
    if tensor.name in draft.formed.thin:
        return costs.of_factors(tensor, rows)
    shape = shape_of(tensor, rows)
    dense = not any(
        operand.tensor in inputs.models[expert].checkpoint.low_rank
        for expert, operand in tensor.operands.items()
    )
    in_parts = inputs.alone and dense
    at_once = _rows_at_once(tensor, merge, shape) if in_parts else None
    tensor_pass = in_parts and at_once is None and _needs_tensor_pass(tensor, shape)
    if tensor_pass:
        at_once = _rows_of_a_part(shape)
    return costs.of_merge(tensor, rows, at_once, tensor_pass=tensor_pass)


def _rows_at_once(tensor: TensorPlan, action: Merge, shape: tuple[int, ...]) -> int | None:
    """Return the number of rows of an elementwise merge that are processed together; None: all rows."""
    method = action.procedure
    by_rows = _goes_by_rows(method.unit_for(action.parameters), shape)
    # A method's diagnostics of masks are those of a whole item.
    if not by_rows or not shape or action.writes_masks or not tensor.form.in_parts:
        return None
    return _rows_of_a_part(shape)


def _rows_of_a_part(shape: tuple[int, ...]) -> int:
    return max(1, _PART_ELEMENTS // max(1, prod(shape[1:])))


def _needs_tensor_pass(tensor: TensorPlan, shape: tuple[int, ...]) -> bool:
    """Return whether a tensor needed whole is read twice; smaller ones are held, as memory is cheaper."""
    merge = tensor.merge
    return (
        merge is not None
        and (first_pass := merge.procedure.tensor_pass) is not None
        and first_pass.applies(merge.parameters)
        and merge.procedure.unit_for(merge.parameters) == "tensor"
        and tensor.form.in_parts
        and not tensor.form.format
        and not merge.writes_masks
        and len(shape) > 1
        and prod(shape) > BLOCK_ELEMENTS
        and not (first_pass.together and prod(shape) * len(tensor.operands) <= TOGETHER_ELEMENTS)
    )


def _goes_by_rows(unit: Unit, shape: tuple[int, ...]) -> bool:
    """Return whether a row's result depends on no other row; a vector is one row."""
    return unit == "element" or (unit == "row" and len(shape) > 1)
