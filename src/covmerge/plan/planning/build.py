"""Build the plan from a recipe and the headers of its checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from itertools import groupby
from math import lcm, prod

import torch

from covmerge.base.errors import InputError, RecipeError, pattern_meant
from covmerge.base.settings import UNNAMED, UNNAMED_NOTE, Hint, choose, rules_for
from covmerge.base.text import counted, some
from covmerge.base.types import Role, TensorHeader
from covmerge.base.version import __version__
from covmerge.files.checkpoints.base import Checkpoint
from covmerge.files.checkpoints.folder import weights_stem
from covmerge.files.quantised.view import scales_of_codes
from covmerge.files.tensors.views import matrix_shapes
from covmerge.maths.linalg.auto import svd_cost
from covmerge.maths.methods import registry
from covmerge.maths.methods.mergekit import IN_ORDER
from covmerge.maths.methods.registry import Unit, cost_with
from covmerge.plan.planning.adapter import AdapterPlan, plan_adapter
from covmerge.plan.planning.adapter_names import form_of
from covmerge.plan.planning.align import (
    Alignment,
    Model,
    align,
    check_same_architecture,
    stored_ties,
)
from covmerge.plan.planning.data import (
    Statistics,
    check_statistics,
    find_statistics,
    notes_on_unread_statistics,
)
from covmerge.plan.planning.forms import ModelTensor, Unwritten, head_part
from covmerge.plan.planning.operations import BASE, Copy, Merge, Operand, expert_key
from covmerge.plan.planning.quantise import Quantised, quantised
from covmerge.plan.planning.rules import Rules
from covmerge.plan.planning.types import Plan, PlannedPass
from covmerge.plan.planning.varied import as_mergekit
from covmerge.plan.planning.work import (
    TOGETHER_ELEMENTS,
    TensorPlan,
    WorkItem,
    experts_at_once,
    parts_at_once,
)
from covmerge.plan.recipe import Recipe
from covmerge.plan.recipe.varied import patterns_in

# Elementwise work goes by row blocks of about this many elements: large enough that a read is
# sequential, small enough that an embedding of any size costs little memory.
BLOCK_ELEMENTS = 1 * 2**20
# Of these as many are merged at once as stay in the cache, with all their temporaries.
_PART_ELEMENTS = 2**18
_FULL_WIDTH = 16  # bytes of all experts' updates of one element, up to which a block is that long


def build_plans(
    recipes: Sequence[Recipe],
    base: Checkpoint,
    experts: Mapping[str, Checkpoint],
    statistics: Statistics | None = None,
    *,
    whole: bool = False,
) -> list[Plan]:
    """Plan several recipes over the same checkpoints so that one reading serves all of them.

    Everything is decided that can be decided from headers. Item by item their plans have the same rows
    of the same tensor: the most that any of them must see at once.

    Args:
        recipes: what to do; their experts name `experts`, in the same order.
        base: the base checkpoint.
        experts: checkpoints by expert name.
        statistics: statistics files by expert name, for methods that use data.
        whole: whether an item is at least one matrix, so that it can be measured.

    Raises:
        InputError: inputs that do not fit together; the message names tensor, shapes and next step.
    """
    if whole and not base.is_source:
        raise InputError(
            "the recipe has no base, and what is measured are updates of one: give a base"
        )
    base_model = Model.of(base)
    models = {name: Model.of(expert) for name, expert in experts.items()}
    for name, model in models.items():
        check_same_architecture(base_model, name, model)
    inputs = _Inputs(base_model, models, statistics or {}, alone=len(recipes) == 1 and not whole)
    named = [_with_method(_with_names(recipe, experts)) for recipe in recipes]
    drafts = _of_same_tensors([_draft(recipe, chosen, inputs) for recipe, chosen in named], base)
    # Of many experts, or in float64, blocks are shorter: their temporaries must stay small.
    width = len(experts) * getattr(torch, recipes[0].dtype).itemsize
    elements = max(1, min(BLOCK_ELEMENTS, BLOCK_ELEMENTS * _FULL_WIDTH // max(1, width)))
    # The fewest ranges are those of the plan that needs the most of the tensor at once.
    ranges = [
        min((list(_row_ranges(t, elements, whole, _step(together))) for t in together), key=len)
        for together in zip(*(draft.tensors for draft in drafts), strict=True)
    ]
    return [_plan(draft, ranges) for draft in drafts]


@dataclass(frozen=True)
class _Inputs:
    """What all plans over the same checkpoints share; `alone`: there is one, and no measuring beside it."""

    base: Model
    models: Mapping[str, Model]
    statistics: Statistics
    alone: bool
    # Of recipes that differ in their method only.
    aligned: dict[str, Mapping[str, Alignment]] = field(
        default_factory=dict[str, Mapping[str, Alignment]]
    )


@dataclass(frozen=True)
class _Draft:
    """What a recipe does with each tensor, before the work is cut into items."""

    inputs: _Inputs
    recipe: Recipe
    chosen: str | None
    rules: Rules
    alignments: Mapping[str, Alignment]
    head_names: tuple[str, ...]
    tensors: tuple[TensorPlan, ...]
    adapter: AdapterPlan | None = None
    packed: Quantised | None = None


def _draft(recipe: Recipe, chosen: str | None, inputs: _Inputs) -> _Draft:
    """Decide on every tensor."""
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
            name: align(base, name, model, recipe.tensors, rules.chosen_use)
            for name, model in models.items()
        }
    alignments = inputs.aligned[key]
    head_names = _head_names(base, alignments)
    found = (
        find_statistics(recipe, tensor, statistics)
        for tensor in _plan_tensors(recipe, base, rules, models, alignments, head_names)
    )
    tensors = as_mergekit(
        tuple(found), lambda expert, operand: models[expert].dtype(str(operand.tensor))
    )
    if not base.checkpoint.is_source:
        _check_without_base(tensors)
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
            f"nothing to merge: all {len(tensors)} tensors of {base.checkpoint.source} are copied "
            "from the base under the recipe's rules."
        )
    draft = _Draft(inputs, recipe, chosen, rules, alignments, head_names, tensors)
    if recipe.output.format == "model":
        packed = quantised(recipe, tensors, base.checkpoint)
        return replace(draft, tensors=packed.tensors, packed=packed)
    adapter = plan_adapter(recipe, tensors, checkpoints, base.checkpoint.config)
    return replace(draft, tensors=adapter.tensors, adapter=adapter)


def _check_without_base(tensors: Sequence[TensorPlan]) -> None:
    """Refuse what is nothing without a base."""
    for tensor in tensors:
        merge = tensor.merge
        if merge is None:
            continue
        if merge.before or merge.after or not merge.procedure.without_base(merge.parameters):
            raise RecipeError(
                f"method '{merge.method}' merges updates of a base ('{tensor.name}'), and the recipe has "
                f"none: pass {Hint('base', 'SOURCE')}, or take a method of the models themselves, such as "
                "`linear`"
            )


def _of_same_tensors(drafts: Sequence[_Draft], base: Checkpoint) -> list[_Draft]:
    """Give each adapter's draft the tensors that only others hold, as ones that it does nothing with."""
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
    base, models = inputs.base, inputs.models
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
            *_chosen(draft),
            *(notes_on_unread_statistics(draft.recipe, inputs.statistics) if inputs.alone else ()),
            *_step_notes(draft.recipe),
            *_mask_notes(draft.tensors),
            *_unused_weights(draft.tensors),
            *_of_no_family(draft.tensors, base),
            *_of_no_tensor(draft.recipe, base, models),
            *_notes(draft),
            *(() if draft.adapter is None else draft.adapter.notes),
            *(() if draft.packed is None else draft.packed.notes),
        ),
        tied={None: stored_ties(base), **{n: a.tied for n, a in draft.alignments.items()}},
        metadata={"covmerge": __version__, "method": draft.recipe.method},
        parameters=() if draft.adapter is None else draft.adapter.parameters,
        stem=weights_stem(base.checkpoint.config),
        quantisation=None if draft.packed is None else draft.packed.settings,
        gguf=None if draft.packed is None else draft.packed.gguf,
    )
    others = [f"{one.kind} '{one.name}' is not covmerge's own: {one}" for one in plan.origins]
    return replace(plan, notes=(*plan.notes, *others))


def _head_items(
    heads: Mapping[str, Mapping[str, TensorHeader]], models: Mapping[str, Model]
) -> Iterator[WorkItem]:
    """The work of keeping the experts' own task heads."""
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
    """Return the recipe with a method, and why it is that one, where it names none."""
    if recipe.method != UNNAMED:
        return recipe, None
    name, why = choose(len(recipe.experts))
    return recipe.model_copy(update={"method": name}), why


def _with_names(recipe: Recipe, experts: Mapping[str, Checkpoint]) -> Recipe:
    """Return the recipe with the form of a merged adapter's file, where it leaves that open."""
    if recipe.output.format != "adapter" or recipe.output.names is not None:
        return recipe
    output = recipe.output.model_copy(update={"names": form_of(experts)})
    return recipe.model_copy(update={"output": output})


def _chosen(draft: _Draft) -> Iterator[str]:
    if draft.chosen is not None:
        yield f"{UNNAMED_NOTE}{draft.recipe.method}, as {draft.chosen}"


def _global_passes(items: Sequence[WorkItem]) -> Iterator[PlannedPass]:
    together: dict[str, list[WorkItem]] = {}
    for _, neighbours in groupby(items, key=lambda item: id(item.tensor)):
        tensor_items = list(neighbours)
        action = tensor_items[0].tensor.merge
        if action is not None and _ranked_density(action) is not None:
            together.setdefault(action.key, []).extend(tensor_items)
    for ranked in together.values():
        action = ranked[0].tensor.merge
        assert action is not None
        density = _ranked_density(action)
        assert density is not None
        yield PlannedPass(action, density, tuple(PlannedPass.counting(ranked)))


def _ranked_density(action: Merge) -> float | None:
    return action.procedure.ranked(action.parameters)


def _head_names(base: Model, alignments: Mapping[str, Alignment]) -> tuple[str, ...]:
    """Names in the base that belong to task heads.

    Where one tensor of a head differs in shape between experts, its neighbours outside the backbone
    belong to the same head even if their shapes agree (RoBERTa's classifier.dense).
    """
    differing = {name for alignment in alignments.values() for name in alignment.head_bases}
    if not differing:
        return ()
    return tuple(
        name
        for name, info in base.description.tensors.items()
        if name in differing or (info.outside_backbone and info.role is not Role.OUTPUT)
    )


def _plan_tensors(
    recipe: Recipe,
    base: Model,
    rules: Rules,
    models: Mapping[str, Model],
    alignments: Mapping[str, Alignment],
    head_names: tuple[str, ...],
) -> Iterator[TensorPlan]:
    skip_missing = recipe.tensors.missing == "present"
    experts = list(recipe.experts)
    scales = scales_of_codes(base.headers)
    for name, header in base.headers.items():
        info = base.description.tensors[name]
        if info.tied_to is not None and info.tied_to in base.headers:
            continue  # merged and written once, under the name it is tied to
        decision = rules.decide(header, info)
        action, rule = decision.action, decision.rule
        taking_part = rules.layers.experts(name, alignments)
        weights = {expert: rules.weight(expert, name) for expert in taking_part}
        if len(experts) == 1 and action.merge:
            # Further on than an expert's statistics a variance may be below 0.
            if info.role is Role.BUFFER and any(weight > 1.0 for weight in weights.values()):
                weights, rule = dict.fromkeys(weights, 1.0), f"{rule}, no further than the expert's"
            action, weights = _of_one(action.merge, weights, recipe)
        operands = {
            expert: models[expert].operand(
                expert_key(expert), alignments[expert].names.get(name), weight
            )
            for expert, weight in weights.items()
            if weight
        }
        if name in head_names:
            action, info = Copy(), replace(info, role=Role.HEAD)
            rule = "base (task head: each expert's own is kept under heads/)"
        elif action.merge:
            action, rule = _for_experts(
                action.merge, rule, operands, experts, skip_missing=skip_missing
            )
        if isinstance(action, Copy) and name in scales:
            scale = scales[name]
            of_scale = rules.decide(base.headers[scale], base.description.tensors[scale]).action
            if of_scale.merge:  # whatever a rule says of the codes alone
                action = replace(action, compared=True, scale=scale)
        if isinstance(action, Copy) and action.compared:
            action, operands = _compared(action, header, operands, models)
        output = replace(header, dtype=_output_dtype(recipe, header))
        if skip_missing:
            operands = {expert: o for expert, o in operands.items() if o.tensor is not None}
        masked = action.merge is not None and action.merge.writes_masks
        masks = tuple(recipe.experts) if masked else ()
        yield TensorPlan(
            header,
            output,
            info,
            action,
            rule,
            operands,
            Operand(BASE, name),
            ModelTensor(masks=masks),
            matrices=rules.matrices(header, info),
            ties=tuple(other for other, to in base.description.tied.items() if to == name),
        )


def _compared(
    copy: Copy,
    header: TensorHeader,
    operands: Mapping[str, Operand],
    models: Mapping[str, Model],
) -> tuple[Copy, dict[str, Operand]]:
    """A copy that is held against the experts' tensors, and those of them that have the base's shape."""
    shapes = {
        expert: models[expert].headers[name].shape
        for expert, operand in operands.items()
        if (name := operand.tensor) is not None and name in models[expert].headers
    }
    reshaped = tuple(expert for expert, shape in shapes.items() if shape != header.shape)
    alike = {expert: operands[expert] for expert in shapes if expert not in reshaped}
    return replace(copy, reshaped=reshaped), alike


def _of_one(
    merge: Merge, weights: Mapping[str, float], recipe: Recipe
) -> tuple[Merge, Mapping[str, float]]:
    """The merge of an expert that is alone: its weight is the share of the merged update.

    Many methods divide by the sum of the weights, which would make it nothing.
    """
    weight = next(iter(weights.values()), 1.0)
    if weight in (0.0, 1.0):
        return merge, weights
    why = ""
    if recipe.base is None:
        why = "there is no base that its update is a difference to"
    elif merge.writes_masks:
        why = f"'{merge.method}' writes what gives the expert back as it was"
    if why:
        (expert,) = weights
        raise RecipeError(
            f"the weight {weight:g} of '{expert}', which is alone, is the share of its update, and {why}: "
            "leave out its weight"
        )
    return replace(merge, scale=weight), dict.fromkeys(weights, 1.0)


def _for_experts(
    merge: Merge,
    rule: str,
    operands: Mapping[str, Operand],
    experts: Sequence[str],
    *,
    skip_missing: bool,
) -> tuple[Merge | Copy, str]:
    """A merge of those experts that take part in a tensor; a copy where they are too few."""
    method = registry.get(merge.method)
    if not operands:
        return Copy(), "base (all weights are 0)"
    if not method.takes(len(operands)):
        raise RecipeError(
            f"method '{method.name}' merges {method.experts_text}, and the recipe has {len(operands)} "
            f"({', '.join(operands)}): choose another method"
        )
    present = [expert for expert, operand in operands.items() if operand.tensor is not None]
    if not present and merge.parameters.get("drawn") != IN_ORDER:
        return Copy(), "base (no expert has it)"  # else it draws random numbers all the same
    if not skip_missing:
        present = list(operands)
    elif not method.takes(len(present)):
        return (
            Copy(),
            f"base ({len(present)} experts have it, and {method.name} merges {method.experts_text})",
        )
    return replace(merge, parameters=method.for_experts(merge.parameters, experts, present)), rule


def _output_dtype(recipe: Recipe, header: TensorHeader) -> torch.dtype:
    as_it_is = header.complex or not header.dtype.is_floating_point
    if recipe.output.dtype == "base" or as_it_is:
        return header.dtype
    return getattr(torch, recipe.output.dtype)


def _step(together: Sequence[TensorPlan]) -> int | None:
    """How many rows of a tensor are written together, by all plans; None: all of them."""
    steps = [tensor.form.rows_together for tensor in together]
    return None if None in steps else lcm(*filter(None, steps))


def _row_ranges(
    tensor: TensorPlan, elements: int, whole: bool, step: int | None
) -> Iterator[range | None]:
    """Ranges of rows that can be worked on by themselves, each of so many rows or a multiple of it."""
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
        yield from tensor.output.row_blocks(elements, step)
    else:
        yield range(shape[0]) if shape else None


def _work_items(
    draft: _Draft, tensor: TensorPlan, ranges: Sequence[range | None]
) -> Iterator[WorkItem]:
    """The work on a tensor; what as many rows take is found once, as a large model has 10⁵ items."""
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
    """The work on some rows."""
    models, alone = draft.inputs.models, draft.inputs.alone
    shape = tensor.output.shape if rows is None else (len(rows), *tensor.output.shape[1:])
    numel = prod(shape)
    itemsize = getattr(torch, draft.recipe.dtype).itemsize
    stored = 0 if tensor.base is None else numel * tensor.stored.dtype.itemsize
    write = tensor.written_bytes(rows)
    present = [
        (expert, operand.tensor)
        for expert, operand in tensor.operands.items()
        if operand.tensor is not None
    ]
    raw = stored + sum(models[expert].stored_bytes(name, numel) for expert, name in present)
    merge = tensor.merge
    if merge is None:
        space = tensor.form.workspace(numel, itemsize)
        read = raw if tensor.operation.compared else stored
        return WorkItem(tensor, rows, read, write, workspace=space, flops=0.0)

    count = max(1, len(tensor.operands))
    thin = draft.adapter is not None and tensor.name in draft.adapter.thin
    if thin:
        return _thin_item(tensor, rows, raw, write, models, itemsize)
    method = merge.procedure
    layout = merge.layout
    dense = not any(name in models[expert].checkpoint.low_rank for expert, name in present)
    at_once = _rows_at_once(tensor, merge, shape) if alone and dense else None
    tensor_pass = at_once is None and alone and dense and _needs_tensor_pass(tensor, shape)
    if tensor_pass:
        at_once = _rows_of_a_part(shape)
    part = shape if at_once is None else (min(at_once, shape[0]), *shape[1:])
    if layout is None:
        shapes = [(part[0] if len(part) > 1 else 1, prod(part[1:] if len(part) > 1 else part))]
    else:
        shapes = list(matrix_shapes(shape, layout))
    cost_of = cost_with(method, method.cost, merge.parameters)
    encoding = tensor.form.cost
    costs = [cost_of(*dims, count, itemsize) + encoding(*dims, itemsize) for dims in shapes]
    # The worker holds updates and merged update in the compute dtype, and the base beside one of them.
    # Beside other plans a method that sees weights has the updates there too.
    twice = count if method.sees == "weights" and not alone else 0
    # Where the loss of half-precision steps is measured there is a second result, and what they differ by.
    again = 0 if merge.half is None or tensor_pass else 1
    held = (count + twice + 2 + method.needs_base + 3 * again) * prod(part) * itemsize
    # The statistics of an element go by rows, a Gram matrix whole; each is cast once.
    measured = sum(
        numel
        if method.data == "fisher"
        else draft.inputs.statistics[expert].header(method.data, name).numel
        for expert, name in tensor.statistics.items()
    )
    workspace = held + measured * itemsize + max(cost.workspace for cost in costs)
    if tensor_pass:
        assert method.tensor_pass is not None
        first_pass = method.tensor_pass
        entry_bytes = first_pass.entry_bytes(merge.parameters)
        merging = parts_at_once(numel) * (workspace + raw * prod(part) // numel)
        merging += count * numel // 8
        held = entry_bytes > 0
        at_a_time = 1 if first_pass.together else experts_at_once(numel, count, held=held)
        workspace = max(int(entry_bytes * numel * at_a_time), merging)
    return WorkItem(
        tensor,
        rows,
        read_bytes=raw,
        write_bytes=write,
        workspace=workspace + tensor.form.workspace(numel, itemsize),
        flops=(1 + again) * sum(cost.flops for cost in costs) * (numel / max(1, prod(part))),
        eigen_flops=sum(cost.eigen for cost in costs) * (numel / max(1, prod(part))),
        statistics_bytes=measured * torch.float32.itemsize,
        at_once=at_once,
        tensor_pass=tensor_pass,
        pass_bytes=_pass_bytes(tensor, stored, models, numel) if tensor_pass else 0,
    )


def _pass_bytes(tensor: TensorPlan, stored: int, models: Mapping[str, Model], numel: int) -> int:
    """Bytes that a tensor pass reads: of each expert by itself beside the base, or of all together."""
    assert tensor.merge is not None
    method, given = tensor.merge.procedure, tensor.merge.parameters
    assert method.tensor_pass is not None
    experts = list(tensor.operands)
    sizes = {
        expert: 0 if operand.tensor is None else models[expert].stored_bytes(operand.tensor, numel)
        for expert, operand in tensor.operands.items()
    }
    if method.tensor_pass.together:
        return method.tensor_pass.readings(given) * (stored + sum(sizes.values()))
    return sum(
        method.tensor_pass.readings(method.for_experts(given, experts, [expert])) * (stored + size)
        for expert, size in sizes.items()
    )


def _thin_item(
    tensor: TensorPlan,
    rows: range | None,
    read: int,
    write: int,
    models: Mapping[str, Model],
    itemsize: int,
) -> WorkItem:
    """The work on factors: their bases, the method on the cores, and factors again."""
    assert tensor.merge is not None
    operands = [(e, o.tensor) for e, o in tensor.operands.items() if o.tensor is not None]
    rank = sum(models[expert].checkpoint.low_rank[name].rank for expert, name in operands) + 1
    d_out, d_in = tensor.stored.shape[0], prod(tensor.stored.shape[1:])
    method, given = tensor.merge.procedure, tensor.merge.parameters
    sides = method.sides_for(given)
    core = (d_out if sides == "inputs" else rank, d_in if sides == "outputs" else rank)
    cost = cost_with(method, method.cost, given)(*core, len(tensor.operands), 8)
    # Factors, their bases and the merged ones; a QR of r columns takes 2dr² operations.
    factors = (d_out + d_in) * rank
    return WorkItem(
        tensor,
        rows,
        read_bytes=read,
        write_bytes=write,
        workspace=4 * factors * itemsize + cost.workspace + svd_cost(*core, rank, 8).workspace,
        flops=6.0 * factors * rank + cost.flops,
        eigen_flops=cost.eigen,
        thin=True,
    )


def _rows_at_once(tensor: TensorPlan, action: Merge, shape: tuple[int, ...]) -> int | None:
    """Rows of an elementwise merge that are worked on together; None: all of them."""
    method = action.procedure
    by_rows = _goes_by_rows(method.unit_for(action.parameters), shape)
    # What a method says of its masks is of a whole item.
    if not by_rows or not shape or action.writes_masks or not tensor.form.in_parts:
        return None
    return _rows_of_a_part(shape)


def _rows_of_a_part(shape: tuple[int, ...]) -> int:
    return max(1, _PART_ELEMENTS // max(1, prod(shape[1:])))


def _needs_tensor_pass(tensor: TensorPlan, shape: tuple[int, ...]) -> bool:
    """Whether a tensor that must be known whole is read twice: smaller ones cost less memory than time."""
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
    """Whether what becomes of a row depends on no other; a vector is one row."""
    return unit == "element" or (unit == "row" and len(shape) > 1)


def _step_notes(recipe: Recipe) -> Iterator[str]:
    for when in ("before", "after"):
        names = [name for entry in getattr(recipe, when) for name in entry]
        if names:
            yield f"steps {when} the method: {', '.join(names)}"


def _mask_notes(tensors: Sequence[TensorPlan]) -> Iterator[str]:
    if any(tensor.form.masks for tensor in tensors):
        yield (
            "the merged weights alone serve no task: each expert's model is made of them, its mask and "
            "its factor by covmerge.load_expert(OUT, EXPERT, BASE)"
        )


def _unused_weights(tensors: Sequence[TensorPlan]) -> Iterator[str]:
    """Name the experts that were given a weight of which a method takes no notice."""
    found: dict[str, dict[str, None]] = {}
    for tensor in tensors:
        merge = tensor.merge
        if merge is not None and not registry.get(merge.method).weighted:
            given = (expert for expert, operand in tensor.operands.items() if operand.weight != 1)
            found.setdefault(merge.method, {}).update(dict.fromkeys(given))
    for method, experts in found.items():
        if experts:
            given = some(experts, quoted=True)
            yield f"{method} takes no notice of weights: that of {given} has no part in the merge"


def _of_no_family(tensors: Sequence[TensorPlan], base: Model) -> Iterator[str]:
    """Name the parameters that a method has for some families, where it is not known which this is."""
    if base.description.family is not None:
        return
    merges = [tensor.merge for tensor in tensors if tensor.merge is not None]
    for name in dict.fromkeys(merge.method for merge in merges):
        method = registry.get(name)
        taken = next(merge.parameters for merge in merges if merge.method == name)
        for parameter in method.parameters:
            of_families = [
                f"{family} {defaults[parameter.name]:g}"
                for family, defaults in method.family_defaults.items()
                if parameter.name in defaults
            ]
            if of_families and taken[parameter.name] == parameter.default:
                yield (
                    f"no config.json names the model's family, by which the {parameter.name} of {name} "
                    f"goes ({', '.join(of_families)}): {parameter.default:g} was taken"
                )


def _of_no_tensor(recipe: Recipe, base: Model, models: Mapping[str, Model]) -> Iterator[str]:
    everything = [
        info for model in (base, *models.values()) for info in model.description.tensors.values()
    ]
    for rule in recipe.rules:
        if not any(rule.applies_to(info.name, info.role) for info in everything):
            condition = rule.match if rule.match is not None else f"role {rule.role}"
            yield f"the rule for '{condition}' applies to no tensor: check its spelling"
    for where, patterns in patterns_in(recipe.model_dump()):
        if not any(fnmatchcase(name, pattern) for name in base.headers for pattern in patterns):
            meant = pattern_meant(patterns[0], base.headers)
            said = " or ".join(f"'{pattern}'" for pattern in patterns)
            yield f"`{where}` has the pattern {said}, which matches no tensor: {meant}"


def _rebuilt(alignments: Mapping[str, Alignment]) -> Iterator[str]:
    """Name buffers that the model makes again, once for all experts that have the same."""
    found: dict[tuple[str, ...], list[str]] = {}
    for name, alignment in alignments.items():
        if alignment.rebuilt:
            found.setdefault(tuple(alignment.rebuilt), []).append(name)
    for names, experts in found.items():
        who, have = ("expert", "has") if len(experts) == 1 else ("experts", "have")
        yield (
            f"{who} {some(experts, quoted=True)} {have} "
            f"{counted(len(names), 'buffer')} not as the base has ({some(names, 1, quoted=True)}), no "
            "weights, as the model makes them again when it is loaded: the output has the base's"
        )


def _averaged_vocabulary(draft: _Draft) -> Iterator[str]:
    """Name vocabulary matrices that some experts changed on purpose, and the method does not see."""
    for setting, role in (("embeddings", Role.EMBEDDING), ("output_head", Role.OUTPUT)):
        for tensor in draft.tensors:
            by_default = tensor.rule == f"average ({setting}: auto)"
            if tensor.info.role is not role or not by_default or draft.recipe.method == "average":
                continue
            stored = {
                e: alignment.names.get(tensor.name) for e, alignment in draft.alignments.items()
            }
            found = [expert for expert, name in stored.items() if name is not None]
            low_rank = any(stored[e] in draft.inputs.models[e].checkpoint.low_rank for e in found)
            if found and (low_rank or len(found) < len(stored)):
                yield (
                    f"'{tensor.name}' is changed by {some(found, quoted=True)}, and {draft.recipe.method} "
                    "does not merge such matrices by default: the updates are averaged over all "
                    f"{len(stored)} experts. By {Hint('tensors', {setting: 'method'})} it does"
                )


def _notes(draft: _Draft) -> Iterator[str]:
    base, models = draft.inputs.base, draft.inputs.models
    tensors, dtype = draft.tensors, draft.recipe.dtype
    yield from base.description.notes
    yield from base.checkpoint.notes
    order = base.checkpoint.order
    if order is not None:
        yield f"the output has {len(order)} layers, stacked of slices; config.json says so"
    complex_ones = [t.name for t in tensors if t.stored.complex]
    if complex_ones:
        yield (
            f"{counted(len(complex_ones), 'tensor is', 'tensors are')} complex "
            f"({some(complex_ones, 1, quoted=True)}): real and imaginary parts are merged as numbers by "
            "methods of any shape, else as other tensors that are no matrices, and keep their dtype"
        )
    double = [t.name for t in tensors if t.stored.dtype == torch.float64]
    if double and dtype != "float64":
        yield (
            f"{counted(len(double), 'tensor is', 'tensors are')} stored in float64 and computed in float32 "
            f"({some(double, 1)}): {Hint('dtype', 'float64')} keeps all digits"
        )
    tied = [n for n, i in base.description.tensors.items() if i.tied_to in base.headers]
    if tied:
        yield f"tied tensors are one, which is merged and written once: {', '.join(tied)}"
    for tensor in tensors:
        info = base.description.tensors[tensor.name]
        if info.outside_backbone and info.role is Role.LINEAR and tensor.merge:
            yield (
                f"'{tensor.name}' lies outside the backbone and has one shape everywhere, so it is "
                "merged; if it is a task head, keep one per expert by "
                f"{rules_for(tensor.name, use='head')}"
            )
    yield from _averaged_vocabulary(draft)
    yield from _rebuilt(draft.alignments)
    for name, alignment in draft.alignments.items():
        yield from (f"expert '{name}': {note}" for note in models[name].checkpoint.notes)
        dtypes = {
            str(models[name].dtype(found)).removeprefix("torch.")
            for base_name, found in alignment.names.items()
            if models[name].dtype(found) != base.headers[base_name].dtype
        }
        if dtypes:
            yield f"expert '{name}' stores {', '.join(sorted(dtypes))} where the base stores another dtype"
        if alignment.missing:
            yield f"expert '{name}' lacks {counted(len(alignment.missing), 'tensor')} of the base"
        for resized, rows in alignment.resized.items():
            yield (
                f"expert '{name}': '{resized}' has {rows} rows, the base {base.headers[resized].shape[0]}; "
                "the rows of the base are merged"
            )
        for reason in sorted(set(alignment.ignored.values())):
            left_out = [n for n, why in alignment.ignored.items() if why == reason]
            count = counted(len(left_out), "tensor")
            yield f"expert '{name}': {count} left out, {reason} ({left_out[0]}, ...)"
