"""Build the plan from a recipe and the headers of its checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod

import torch

from covmerge.checkpoints import Checkpoint
from covmerge.errors import InputError
from covmerge.methods import registry
from covmerge.plan.align import Alignment, Model, align, check_same_architecture
from covmerge.plan.rules import Rules
from covmerge.plan.types import Copy, Merge, Plan, TensorPlan, WorkItem
from covmerge.recipe import Recipe
from covmerge.tensors import describe, matrix_shapes
from covmerge.types import Role, TensorHeader
from covmerge.version import __version__

# Elementwise work goes by row blocks of about this many elements: large enough that a read is
# sequential, small enough that an embedding of any size costs little memory.
BLOCK_ELEMENTS = 1 * 2**20


def build_plan(recipe: Recipe, base: Checkpoint, experts: Mapping[str, Checkpoint]) -> Plan:
    """Decide everything that can be decided from headers.

    Args:
        recipe: what to do; its experts name `experts`, in the same order.
        base: the base checkpoint.
        experts: checkpoints by expert name.

    Raises:
        InputError: inputs that do not fit together; the message names tensor, shapes and next step.
    """
    base_model = Model(base, describe(base.headers, base.config))
    family = base_model.description.family
    rules = Rules(recipe, family)
    alignments: dict[str, Alignment] = {}
    models: dict[str, Model] = {}
    for name, checkpoint in experts.items():
        model = Model(checkpoint, describe(checkpoint.headers, checkpoint.config))
        check_same_architecture(base_model, name, model)
        alignments[name] = align(base_model, name, model, recipe.tensors, rules.chosen_use)
        models[name] = model

    head_names = _head_names(base_model, alignments)
    tensors = tuple(_plan_tensors(recipe, base_model, rules, alignments, head_names))
    if not any(isinstance(tensor.action, Merge) for tensor in tensors):
        raise InputError(
            f"nothing to merge: all {len(tensors)} tensors of {base.source} are copied from the base "
            "under the recipe's rules."
        )
    items = tuple(item for tensor in tensors for item in _work_items(recipe, tensor, models))
    heads: dict[str, dict[str, TensorHeader]] = {}
    for name, alignment in alignments.items():
        own = [*alignment.heads, *(alignment.names[n] for n in head_names if n in alignment.names)]
        if own:
            heads[name] = {head: models[name].headers[head] for head in own}
    return Plan(
        recipe=recipe,
        tensors=tensors,
        items=items,
        heads=heads,
        family=family,
        notes=(
            *_unused_rules(recipe, base_model, models),
            *_notes(base_model, models, alignments, tensors),
        ),
        tied={
            label: {
                name: info.tied_to
                for name, info in model.description.tensors.items()
                if info.tied_to is not None and info.tied_to in model.headers
            }
            for label, model in ((None, base_model), *models.items())
        },
        metadata={"covmerge": __version__, "method": recipe.method},
    )


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
    alignments: Mapping[str, Alignment],
    head_names: tuple[str, ...],
) -> Iterator[TensorPlan]:
    absent = "skipped" if recipe.tensors.missing == "present" else "unchanged"
    for name, header in base.headers.items():
        info = base.description.tensors[name]
        if info.tied_to is not None and info.tied_to in base.headers:
            continue  # merged and written once, under the name it is tied to
        decision = rules.decide(header, info)
        action, rule, role = decision.action, decision.rule, info.role
        sources = {expert: a.names.get(name) for expert, a in alignments.items()}
        if name in head_names:
            action, role = Copy(), Role.HEAD
            rule = "base (task head: each expert's own is kept under heads/)"
        elif isinstance(action, Merge) and not any(sources.values()):
            action, rule = Copy(), "base (no expert has it)"
        output = TensorHeader(name, header.shape, _output_dtype(recipe, header))
        yield TensorPlan(header, output, role, info.why, action, rule, sources, absent)


def _output_dtype(recipe: Recipe, header: TensorHeader) -> torch.dtype:
    if recipe.output.dtype == "base" or not header.dtype.is_floating_point:
        return header.dtype
    return getattr(torch, recipe.output.dtype)


def _work_items(
    recipe: Recipe, tensor: TensorPlan, models: Mapping[str, Model]
) -> Iterator[WorkItem]:
    for rows in _row_ranges(tensor):
        shape = tensor.output.shape if rows is None else (len(rows), *tensor.output.shape[1:])
        yield _work_item(recipe, tensor, rows, shape, models)


def _row_ranges(tensor: TensorPlan) -> Iterator[range | None]:
    """Rows that can be worked on by themselves: any where elementwise, one matrix of a stack."""
    action, rows = tensor.action, tensor.output.shape[:1]
    if not isinstance(action, Merge) or action.layout is None:
        yield from tensor.output.row_blocks(BLOCK_ELEMENTS)
    elif action.layout.stacked:
        yield from (range(index, index + 1) for index in range(*rows))
    else:
        yield range(*rows)


def _work_item(
    recipe: Recipe,
    tensor: TensorPlan,
    rows: range | None,
    shape: tuple[int, ...],
    models: Mapping[str, Model],
) -> WorkItem:
    numel = prod(shape)
    stored = numel * tensor.stored.dtype.itemsize
    write = numel * tensor.output.dtype.itemsize
    if isinstance(tensor.action, Copy):
        return WorkItem(tensor, rows, stored, write, workspace=0, flops=0.0)

    present = [(expert, name) for expert, name in tensor.sources.items() if name is not None]
    raw = stored + sum(
        numel * models[expert].headers[name].dtype.itemsize for expert, name in present
    )
    itemsize = getattr(torch, recipe.dtype).itemsize
    count = max(1, len(tensor.sources) if tensor.absent == "unchanged" else len(present))
    method = registry.get(tensor.action.method)
    layout = tensor.action.layout
    shapes = [(1, numel)] if layout is None else matrix_shapes(shape, layout)
    costs = [method.cost(d_out, d_in, count, itemsize) for d_out, d_in in shapes]
    # The worker holds updates and merged update in the compute dtype, and the base beside one of them.
    held = (count + 2) * numel * itemsize
    return WorkItem(
        tensor,
        rows,
        read_bytes=raw,
        write_bytes=write,
        workspace=held + max(cost.workspace for cost in costs),
        flops=sum(cost.flops for cost in costs),
    )


def _unused_rules(recipe: Recipe, base: Model, models: Mapping[str, Model]) -> Iterator[str]:
    everything = [
        info for model in (base, *models.values()) for info in model.description.tensors.values()
    ]
    for rule in recipe.rules:
        if not any(rule.applies_to(info.name, info.role) for info in everything):
            condition = rule.match if rule.match is not None else f"role {rule.role}"
            yield f"the rule for '{condition}' applies to no tensor: check its spelling"


def _notes(
    base: Model,
    models: Mapping[str, Model],
    alignments: Mapping[str, Alignment],
    tensors: tuple[TensorPlan, ...],
) -> Iterator[str]:
    yield from base.description.notes
    yield from base.checkpoint.notes
    tied = [n for n, i in base.description.tensors.items() if i.tied_to in base.headers]
    if tied:
        yield f"tied tensors are merged and written once; left out: {', '.join(tied)}"
    for tensor in tensors:
        info = base.description.tensors[tensor.name]
        if info.outside_backbone and info.role is Role.LINEAR and isinstance(tensor.action, Merge):
            yield (
                f"'{tensor.name}' lies outside the backbone and has one shape everywhere, so it is "
                "merged; if it is a task head, add a rule with `use: head` to keep one per expert"
            )
    for name, alignment in alignments.items():
        yield from (f"expert '{name}': {note}" for note in models[name].checkpoint.notes)
        dtypes = {
            str(models[name].headers[found].dtype).removeprefix("torch.")
            for own, found in alignment.names.items()
            if models[name].headers[found].dtype != base.headers[own].dtype
        }
        if dtypes:
            yield f"expert '{name}' stores {', '.join(sorted(dtypes))} where the base stores another dtype"
        if alignment.missing:
            yield f"expert '{name}' lacks {len(alignment.missing)} tensors of the base"
        for resized, rows in alignment.resized.items():
            yield (
                f"expert '{name}': '{resized}' has {rows} rows, the base {base.headers[resized].shape[0]}; "
                "the rows of the base are merged"
            )
        for reason in sorted(set(alignment.ignored.values())):
            left_out = [n for n, why in alignment.ignored.items() if why == reason]
            yield f"expert '{name}': {len(left_out)} tensors left out, {reason} ({left_out[0]}, ...)"
