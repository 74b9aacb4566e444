"""Notes on a plan for the user, given before it is carried out."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

import torch

from covmerge.base.errors import pattern_meant
from covmerge.base.settings import Hint, rules_for
from covmerge.base.text import counted, some
from covmerge.base.types import Role
from covmerge.maths.methods import registry
from covmerge.plan.planning.align import Alignment
from covmerge.plan.planning.models import Model
from covmerge.plan.planning.slices import Layers
from covmerge.plan.planning.work import TensorPlan
from covmerge.plan.recipe import Recipe, Rule
from covmerge.plan.recipe.varied import patterns_in


def plan_notes(
    recipe: Recipe,
    tensors: Sequence[TensorPlan],
    base: Model,
    models: Mapping[str, Model],
    alignments: Mapping[str, Alignment],
) -> Iterator[str]:
    """Yield the notes on recipe, base and experts, in the order in which they are shown."""
    yield from _step_notes(recipe)
    yield from _mask_notes(tensors)
    yield from _unused_weights(tensors)
    yield from _of_no_family(tensors, base)
    yield from _of_no_tensor(recipe, base, models, alignments)
    yield from _of_base(tensors, base, recipe.dtype)
    yield from _averaged_vocabulary(recipe.method, tensors, models, alignments)
    yield from _rebuilt(alignments)
    yield from _of_experts(base, models, alignments)


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
    """Yield a note for parameters with defaults for some families, if the model's family is unknown."""
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


def _of_no_tensor(
    recipe: Recipe,
    base: Model,
    models: Mapping[str, Model],
    alignments: Mapping[str, Alignment],
) -> Iterator[str]:
    # An expert's name counts only where the base has no such tensor: rules go by the base's names.
    of_base = {expert: {*alignment.names.values()} for expert, alignment in alignments.items()}
    everything = {(info.name, info.role): None for info in base.description.tensors.values()} | {
        (info.name, info.role): None
        for expert, known in of_base.items()
        for info in models[expert].description.tensors.values()
        if info.name not in known
    }
    left = dict(everything)
    layers = Layers(recipe.slices, base.headers, recipe.moe)
    for rule in recipe.rules:
        applies = [tensor for tensor in everything if rule.applies_to(*tensor)]
        condition = rule.match if rule.match is not None else f"role {rule.role}"
        if not applies:
            hint = _rule_meant(rule, everything)
            yield f"the rule for '{condition}' applies to no tensor: {hint}"
        made = [n for n, _ in applies if layers.of_expert(n) or layers.of_base(n) is not None]
        if made and condition != "*":
            yield (
                f"the rule for '{condition}' does not act on {counted(len(made), 'tensor')} of the mixture "
                f"(such as '{made[0]}'): `moe` copies each from one model, or makes it"
            )
        if applies and condition != "*" and not any(tensor in left for tensor in applies):
            yield (
                f"the rule for '{condition}' decides nothing, as rules before it apply to all its tensors: "
                "if it is to decide, put it before them"
            )
        for tensor in applies:
            left.pop(tensor, None)
    for where, patterns in patterns_in(recipe.model_dump()):
        if not any(fnmatchcase(name, pattern) for name in base.headers for pattern in patterns):
            meant = pattern_meant(patterns[0], base.headers)
            said = " or ".join(f"'{pattern}'" for pattern in patterns)
            yield f"`{where}` has the pattern {said}, which matches no tensor: {meant}"


def _rule_meant(rule: Rule, tensors: Collection[tuple[str, Role]]) -> str:
    """Return advice for a rule that applies to no tensor."""
    names = list(dict.fromkeys(name for name, _ in tensors))
    if rule.match is not None and not any(fnmatchcase(name, rule.match) for name in names):
        return pattern_meant(rule.match, names)
    there = dict.fromkeys(
        str(role) for name, role in tensors if rule.match is None or fnmatchcase(name, rule.match)
    )
    return f"the roles there are {some(there, 9)}"


def _rebuilt(alignments: Mapping[str, Alignment]) -> Iterator[str]:
    """Yield a note on buffers that the model creates again, one for all experts with the same buffers."""
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


def _averaged_vocabulary(
    method: str,
    tensors: Sequence[TensorPlan],
    models: Mapping[str, Model],
    alignments: Mapping[str, Alignment],
) -> Iterator[str]:
    """Yield a note on embeddings that some experts changed on purpose but the method does not merge."""
    for setting, role in (("embeddings", Role.EMBEDDING), ("output_head", Role.OUTPUT)):
        for tensor in tensors:
            by_default = tensor.rule == f"average ({setting}: auto)"
            if tensor.info.role is not role or not by_default or method == "average":
                continue
            stored = {e: alignment.names.get(tensor.name) for e, alignment in alignments.items()}
            found = [expert for expert, name in stored.items() if name is not None]
            low_rank = any(stored[e] in models[e].checkpoint.low_rank for e in found)
            if found and (low_rank or len(found) < len(stored)):
                yield (
                    f"'{tensor.name}' is changed by {some(found, quoted=True)}, and {method} "
                    "does not merge such matrices by default: the updates are averaged over all "
                    f"{len(stored)} experts. By {Hint('tensors', {setting: 'method'})} it does"
                )


def _of_base(tensors: Sequence[TensorPlan], base: Model, dtype: str) -> Iterator[str]:
    """Yield notes on how the base was read, and on tensors of unusual kinds."""
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
        merged = tensor.merge is not None and len(tensor.operands) > 1
        if info.outside_backbone and info.role is Role.LINEAR and merged:
            yield (
                f"'{tensor.name}' lies outside the backbone and has one shape everywhere, so it is "
                "merged; if it is a task head, keep one per expert by "
                f"{rules_for(tensor.name, use='head')}"
            )


def _of_experts(
    base: Model, models: Mapping[str, Model], alignments: Mapping[str, Alignment]
) -> Iterator[str]:
    """Yield notes on how experts differ from the base, and on tensors that are left out."""
    for name, alignment in alignments.items():
        yield from (f"expert '{name}': {note}" for note in models[name].checkpoint.notes)
        if dtypes := other_dtypes(base, models[name], alignment):
            yield f"expert '{name}' {dtypes}"
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


def other_dtypes(base: Model, expert: Model, found: Alignment) -> str:
    """Say in which dtypes an expert stores tensors that the base stores in others; "": there is none."""
    dtypes = {
        str(expert.dtype(theirs)).removeprefix("torch.")
        for name, theirs in found.names.items()
        if expert.dtype(theirs) != base.headers[name].dtype
    }
    return (
        f"stores {', '.join(sorted(dtypes))} where the base stores another dtype" if dtypes else ""
    )
