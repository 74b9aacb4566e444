"""The decision on each tensor of the output: merged, copied or kept as a head, with which experts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from covmerge.base.errors import RecipeError
from covmerge.base.settings import Hint
from covmerge.base.types import Role, TensorHeader
from covmerge.files.quantised.view import scales_of_codes
from covmerge.maths.methods import registry
from covmerge.maths.methods.mergekit import IN_ORDER
from covmerge.plan.planning.align import Alignment
from covmerge.plan.planning.forms import ModelTensor
from covmerge.plan.planning.models import Model
from covmerge.plan.planning.operations import BASE, Copy, Merge, Operand, expert_key
from covmerge.plan.planning.rules import Rules
from covmerge.plan.planning.work import TensorPlan
from covmerge.plan.recipe import Recipe


def plan_tensors(
    recipe: Recipe,
    base: Model,
    rules: Rules,
    models: Mapping[str, Model],
    alignments: Mapping[str, Alignment],
    head_names: tuple[str, ...],
) -> Iterator[TensorPlan]:
    """Yield the plan of each tensor that the base stores: its operation and its experts."""
    skip_missing = recipe.tensors.missing == "present"
    experts = list(recipe.experts)
    scales = scales_of_codes(base.headers)
    for name, header in base.headers.items():
        info = base.description.tensors[name]
        if info.tied_to is not None and info.tied_to in base.headers:
            continue  # merged and written once, under the name that it is tied to
        action, rule = rules.decide(header, info)
        taking_part = rules.layers.experts(name, alignments)
        weights = {expert: rules.weight(expert, name) for expert in taking_part}
        if len(experts) == 1 and action.merge:
            # Beyond an expert's own statistics, a variance may become negative.
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
            of_scale, _ = rules.decide(base.headers[scale], base.description.tensors[scale])
            if of_scale.merge:  # a rule for the codes alone does not change this
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
            _base_operand(name, base, operands, models),
            ModelTensor(masks=masks),
            matrices=rules.matrices(header, info),
            ties=tuple(other for other, to in base.description.tied.items() if to == name),
        )


def _base_operand(
    name: str, base: Model, operands: Mapping[str, Operand], models: Mapping[str, Model]
) -> Operand:
    """Return the base's tensor; without a base the expert's that stands for it, which is read once."""
    owner = base.checkpoint.owner(name)
    for expert, operand in operands.items():
        if models[expert].checkpoint is owner and operand.tensor == name:
            return operand
    return Operand(BASE, name)


def head_names_of(base: Model, alignments: Mapping[str, Alignment]) -> tuple[str, ...]:
    """Return names in the base of tensors that belong to task heads.

    If one tensor of a head has different shapes in different experts, its neighbours outside the
    backbone belong to the same head even if their shapes agree (RoBERTa's classifier.dense).
    """
    differing = {name for alignment in alignments.values() for name in alignment.head_bases}
    if not differing:
        return ()
    return tuple(
        name
        for name, info in base.description.tensors.items()
        if name in differing or (info.outside_backbone and info.role is not Role.OUTPUT)
    )


def check_without_base(tensors: Sequence[TensorPlan]) -> None:
    """Raise if a method merges updates of a base and the recipe has no base."""
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


def _compared(
    copy: Copy, header: TensorHeader, operands: Mapping[str, Operand], models: Mapping[str, Model]
) -> tuple[Copy, dict[str, Operand]]:
    """Return a copy compared with the experts' tensors, and the operands of the same shape."""
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
    """Return the merge of a single expert, whose weight becomes the scale of the merged update.

    Many methods divide by the sum of weights, so a single weight would have no effect.
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
    """Return the merge for the experts that take part in a tensor, or a copy if there are too few."""
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
        few = f"{len(present)} experts have it, and {method.name} merges {method.experts_text}"
        return Copy(), f"base ({few})"
    return replace(merge, parameters=method.for_experts(merge.parameters, experts, present)), rule


def _output_dtype(recipe: Recipe, header: TensorHeader) -> torch.dtype:
    as_it_is = header.complex or not header.dtype.is_floating_point
    if recipe.output.dtype == "base" or as_it_is:
        return header.dtype
    return getattr(torch, recipe.output.dtype)
