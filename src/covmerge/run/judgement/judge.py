"""Findings from the sums over the updates, and the faults among them that stop a merge."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from math import hypot, sqrt
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from covmerge.base.errors import InputError
from covmerge.base.findings import LOST, UNCHANGED, Finding, Fit, Severity
from covmerge.base.settings import Hint, rules_for
from covmerge.base.text import counted, some
from covmerge.base.types import Json
from covmerge.files.checkpoints.base import Checkpoint
from covmerge.files.checkpoints.manifest import MANIFEST_NAME, read_manifest
from covmerge.files.tensors.names import find_name
from covmerge.files.tensors.views import MatrixLayout, matrices
from covmerge.maths.linalg.lapack import norm
from covmerge.plan.planning.models import Model
from covmerge.plan.planning.types import Plan
from covmerge.run.judgement.layers import LayerSums, block_of, layers_of, ranges
from covmerge.run.judgement.settings import other_settings
from covmerge.run.judgement.values import changed_integers, left_for_nan
from covmerge.run.sources import OpenCheckpoints

# Findings from norms and directions of the updates.

# Cosine between W_t and W_0 below which W_t is not trained from W_0. Fine-tunes of one base stayed above
# 0.9 in every layer that was measured; weights that were trained from another start are near 0.
STRANGER = 0.5
# ‖Δ‖ / ‖W_0‖ above which the direction tells nothing: weights times three have the base's direction too.
SCALED = 2.0
_HALF_DIGIT = 2.0**-24  # the largest relative error of rounding a number to float32
_SHOWS = 1e-3  # share of an update from which its loss is reported
_COMPARED = 2**20  # entries of each weight that show which base an adapter in memory has
UNEVEN = 10.0  # ratio of update norms above which the largest update dominates plain sums


def stranger(matrices: Sequence[LayerSums], expert: str) -> Finding | None:
    """Return a fault if an expert was trained from another base, else None."""
    known = [(cosine, m) for m in matrices if (cosine := m.cosine(expert)) is not None]
    if not known:
        return None
    middle = median(cosine for cosine, _ in known)
    relative = median(matrix.relative(expert) for _, matrix in known)
    if middle >= STRANGER and relative <= SCALED:
        return None
    return Finding(
        Severity.FAULT,
        f"is not a fine-tune of this base: its weights have a cosine of {middle:.2f} with the base's "
        f"and an update of {relative:.3g} times their norm (medians of "
        f"{counted(len(known), 'matrix', 'matrices')}; a fine-tune has more than 0.9, and "
        "far less than 1). Find the base it was trained from",
        expert,
        name="not-a-fine-tune",
    )


def trained_elsewhere(adapter: Checkpoint, base: Model, expert: str) -> Iterator[Finding]:
    """Yield a fault if the model that has an adapter in memory has other weights than the base."""
    if not base.checkpoint.decides:  # the result is an adapter, which no weights of the base affect
        return
    cosines: list[float] = []
    for name, tensor in adapter.under.items():
        header = base.headers.get(find_name(name, base.prefixes, base.headers) or "")
        if header is not None and header.shape == tensor.shape:
            rows = range(min(len(tensor), max(1, _COMPARED * len(tensor) // tensor.numel())))
            own = base.checkpoint.read(header.name, rows).float()
            other = tensor[: len(rows)].cpu().float()
            cosines.append(float((own * other).sum()) / ((norm(own) * norm(other)) or 1.0))
    if not cosines or median(cosines) >= STRANGER:
        return
    yield Finding(
        Severity.FAULT,
        f"is the adapter of another base: weights of the model that it is in have a cosine of "
        f"{median(cosines):.2f} with the base's (median of {counted(len(cosines), 'layer')}). Pass the "
        "base that it was trained over",
        expert,
        name="not-a-fine-tune",
    )


def replaced_tables(layers: Sequence[LayerSums], expert: str) -> Iterator[Finding]:
    """Warn if rows of embeddings are not the base's: a merge would mix different tokens."""
    found = {
        layer.tensor: cosine
        for layer in layers
        if layer.is_table and (cosine := layer.cosine(expert)) is not None and cosine < STRANGER
    }
    if not found:
        return
    shown = ", ".join(f"'{name}' (cosine {cosine:.2f})" for name, cosine in found.items())
    yield Finding(
        Severity.WARNING,
        f"has other rows than the base in {shown}: another vocabulary, or rows that were moved or "
        "trained anew? Merged with the base's they mix tokens; leave them to the base by "
        f"{Hint('tensors', {'embeddings': 'base'})}",
        expert,
        tuple(found),
    )


def untouched(
    layers: Sequence[LayerSums],
    expert: str,
    own: str | None,
    notes: Sequence[str],
    rounding: float = 0.0,
) -> Iterator[Finding]:
    """Say which tensors an expert left as in the base: all of them, whole blocks, or some.

    `own` is the expert's own part of the output, as `owned_by` returns it; only this part may have been
    trained. `notes` are from opening the expert, such as which of its tensors were not read. Up to a
    ‖Δ_t‖ / ‖W_0‖ of `rounding`, the expert may have only rounded the base's weights.
    """
    own_layers = [layer for layer in layers if expert in layer.squares]
    same = [layer for layer in own_layers if _is_as_the_base(layer, expert, rounding)]
    tensors = tuple(dict.fromkeys(layer.tensor for layer in same))
    if len(same) == len(own_layers):
        if own:
            text = f"equals the base in all that is merged: only {own} its own"
            yield Finding(Severity.WARNING, text, expert)
        elif any(layer.norm(expert) for layer in same):
            yield Finding(
                Severity.WARNING,
                "differs from the base by no more than the rounding of its weights, in every tensor: was "
                "it trained, or saved? Methods for matrices may take such layers as unchanged",
                expert,
            )
        else:
            unread = f" ({'; '.join(notes)})" if notes else ""
            text = f"equals the base in every tensor{unread}: was it trained, or saved?"
            yield Finding(Severity.FAULT, text, expert, name=UNCHANGED)
        return
    blocks: dict[int, list[LayerSums]] = {}
    for layer in layers:
        block = block_of(layer.name)
        if block is not None and layer.is_matrix:
            blocks.setdefault(block, []).append(layer)
    frozen = [
        block
        for block, inside in blocks.items()
        if any(expert in layer.squares for layer in inside)
        and all(_is_as_the_base(layer, expert, rounding) for layer in inside)
    ]
    if frozen and len(blocks) > 1:
        named = tuple(dict.fromkeys(layer.tensor for b in frozen for layer in blocks[b]))
        yield Finding(
            Severity.WARNING,
            f"did not change block {ranges(frozen)} of {len(blocks)}: frozen in training, or lost "
            "when it was saved?",
            expert,
            named,
        )
        tensors = tuple(tensor for tensor in tensors if block_of(tensor) not in frozen)
    if tensors:
        yield Finding(
            Severity.NOTE,
            f"left {counted(len(tensors), 'more tensor' if frozen else 'tensor')} as in the base "
            f"({tensors[0]}{', ...' if len(tensors) > 1 else ''})",
            expert,
            tensors,
        )


def _is_as_the_base(layer: LayerSums, expert: str, rounding: float) -> bool:
    # Entries of a vector may be alike, and so may their errors: each is at most √3 standard deviations.
    most = rounding if layer.is_matrix else sqrt(3) * rounding
    return layer.norm(expert) <= most * sqrt(layer.base)


def uneven(layers: Sequence[LayerSums], experts: Sequence[str]) -> Iterator[Finding]:
    """Warn if the experts' updates have very different norms."""
    norms = {expert: hypot(*(layer.norm(expert) for layer in layers)) for expert in experts}
    moved = {expert: norm for expert, norm in norms.items() if norm}
    if len(moved) < 2:
        return
    most, least = max(moved, key=moved.__getitem__), min(moved, key=moved.__getitem__)
    if moved[most] <= UNEVEN * moved[least]:
        return
    yield Finding(
        Severity.WARNING,
        f"updates are of very different size: '{most}' moved {moved[most] / moved[least]:.0f} "
        f"times as far as '{least}' ({moved[most]:.3g} and {moved[least]:.3g}); averaging and "
        "other plain sums follow the largest",
    )


# Experts of a mixture that a module in memory holds packed, and the model's folder holds one by one.

_GATE_AND_UP = re.compile(r"\.experts\.gate_up_proj$")


def packed_in_memory(plan: Plan, base: Checkpoint) -> Iterator[Finding]:
    """Warn if gate and up are merged as one matrix, while the model's folder has them as two."""
    if not base.is_held or base.config is None or plan.recipe.tensors.fused == "split":
        return
    packed = [
        tensor.name
        for tensor in plan.tensors
        if _GATE_AND_UP.search(tensor.name)
        and tensor.merge is not None
        and not tensor.merge.procedure.takes_any_shape
    ]
    if packed and _is_apart_in_files(base.config.get("model_type")):
        yield Finding(
            Severity.WARNING,
            f"'{packed[0]}' holds gate and up of all experts, which are merged as one matrix; the folder "
            "of this model has them apart, and its merge is another: to have the same, pass "
            f"{Hint('tensors', {'fused': 'split'})}",
        )


def _is_apart_in_files(model_type: object) -> bool:
    """Return whether transformers packs gate and up when it loads a model of this type."""
    found: list[Any] = []
    with suppress(Exception):  # a version without such a table, or without this model
        conversion: Any = importlib.import_module("transformers.conversion_mapping")
        found = conversion.get_checkpoint_conversion_mapping(model_type) or []
    return any("gate_up_proj" in name for one in found for name in one.target_patterns)


# Layers swapped when the expert was saved: which other layer of the base does a layer hold?

_LOOKED_UP = 8  # most layers of an expert whose true place is searched for
_ALIKE = 0.9  # cosine with another layer of the base above which the layer is that one


def find_swaps(
    matrices: Sequence[LayerSums], base: Checkpoint, expert: Checkpoint, of: str
) -> Iterator[Finding]:
    """Say which layers of an expert are not the base's, and which other layers of the base they hold.

    A layer that holds no other layer of the base was trained anew, or its weights are lost. It gives a
    warning only, as the user must know whether it harms the merge.
    """
    known = ((matrix.tensor, matrix.cosine(of)) for matrix in matrices)
    foreign = [(name, cosine) for name, cosine in known if cosine is not None and cosine < STRANGER]
    if not foreign:
        return
    start, model = Model.of(base), Model.of(expert)
    for name, cosine in foreign[:_LOOKED_UP]:
        yield _find_in_base(name, cosine, start, model, of)
    if len(foreign) > _LOOKED_UP:
        text = f"{len(foreign)} layers in all are not the base's"
        yield Finding(Severity.WARNING, text, of, tuple(name for name, _ in foreign))


def _find_in_base(name: str, off: float, base: Model, expert: Model, of: str) -> Finding:
    parts = _parts(expert, name)
    found: list[str] = []
    for label, part in parts.items():
        for other in _candidates(name, base):
            for place, candidate in _parts(base, other).items():
                if (other, place) == (name, label) or candidate.shape != part.shape:
                    continue
                cosine = float((candidate * part).sum()) / ((norm(candidate) * norm(part)) or 1.0)
                if cosine > _ALIKE:
                    where = f"'{other}'" + (f" ({place})" if place else "")
                    what = f"its {label} is" if label else "it is"
                    found.append(f"{what} the base's {where} (cosine {cosine:.2f})")
    text = f"'{name}' is not the base's (cosine {off:.2f} with it)"
    if found:
        text += f": {'; '.join(found)}. Swapped when it was saved?"
        return Finding(Severity.FAULT, text, of, (name,), "swapped-tensors")
    text += (
        ": a layer of its own? No merge can bring it together with the others'; leave it to the base "
        f"by {rules_for(name)}, or to each expert by one with `head`"
    )
    return Finding(Severity.WARNING, text, of, (name,))


def _candidates(name: str, base: Model) -> list[str]:
    """Return up to 64 tensors of the base of the same shape, those of the same block first."""
    shape, block = base.headers[name].shape, block_of(name)
    same = [n for n, header in base.headers.items() if header.shape == shape]
    siblings = [n for n in same if block_of(n) == block]
    return [*siblings, *(n for n in same if n not in siblings)][:64]


def _parts(model: Model, name: str) -> dict[str, Tensor]:
    """Return the projections of a fused tensor by name; for another tensor the whole of it, under ""."""
    info = model.description.tensors.get(name)
    if info is None:
        return {}
    tensor = model.checkpoint.read(name).float()
    layout: MatrixLayout = info.layout
    if info.parts is None or layout.stacked:
        return {"": tensor}
    split = replace(layout, parts=info.parts)
    return dict(zip(info.parts.names, matrices(tensor, split), strict=True))


def judge(
    layers: Sequence[LayerSums],
    base: Checkpoint,
    experts: Mapping[str, Checkpoint],
    owned: Mapping[str, str],
) -> Iterator[Finding]:
    """Yield the findings that follow from the sums.

    An adapter in a file has no full weights to compare with the base's. Nothing in its tensors tells
    whether it was trained over another base. `owned`: see `owned_by`.
    """
    matrices = [layer for layer in layers if layer.is_matrix]
    for name, expert in experts.items():
        if expert.under:
            yield from trained_elsewhere(expert, Model.of(base), name)
        if not expert.is_adapter:
            if unfit := stranger(matrices, name):
                yield unfit
            else:
                yield from find_swaps(matrices, base, expert, name)
                yield from replaced_tables(layers, name)
        rounding = _largest_rounding(base, expert)
        yield from untouched(layers, name, owned.get(name), expert.notes, rounding)
    yield from uneven(layers, list(experts))


def _largest_rounding(base: Checkpoint, expert: Checkpoint) -> float:
    """Return the largest ‖Δ‖ / ‖W_0‖ of a matrix that rounding to the expert's dtype can give.

    The error of a weight w has a standard deviation of at most eps·|w| / √12. The result is 0 if some
    tensor of the base is as coarse as the expert's, because such weights are not rounded again.
    """
    if expert.is_adapter:
        return 0.0
    eps, of_base = (
        [torch.finfo(h.dtype).eps for h in each.headers.values() if h.dtype.is_floating_point]
        for each in (expert, base)
    )
    if not eps or not of_base or min(eps) <= max(of_base):
        return 0.0
    return min(eps) / sqrt(12)


def owned_by(plan: Plan, checkpoints: OpenCheckpoints) -> dict[str, str]:
    """Return by expert a phrase for its own part of the output: a task head, or rows of tokens."""
    vocabulary = checkpoints.text.vocabulary
    givers: Collection[str] = () if vocabulary is None else vocabulary.givers
    rows, head = "rows of its tokens are", "its task head is"
    return {**dict.fromkeys(givers, rows), **dict.fromkeys(plan.heads, head)}


def check_fit(
    plan: Plan,
    done: Sequence[Mapping[str, Json]],
    checkpoints: OpenCheckpoints,
    *,
    written: bool = True,
) -> Fit:
    """Judge the experts by the measurements of a run.

    `written` says whether files of the base, such as config.json, are copied beside the output.

    Raises:
        InputError: a merge of these experts is worthless, and the recipe does not `allow` it.
    """
    if not checkpoints.base.is_source:  # no base that the experts should be fine-tunes of
        first = next(iter(checkpoints.experts))
        findings = list(changed_integers(plan, done, f"expert '{first}'"))
    else:
        layers = list(layers_of(plan, done))
        owned = owned_by(plan, checkpoints)
        findings = list(judge(layers, checkpoints.base, checkpoints.experts, owned))
        findings = [finding for finding in findings if finding.severity is not Severity.NOTE]
        findings += changed_integers(plan, done, "the base")
        findings += left_for_nan(plan, checkpoints.experts)
        findings += packed_in_memory(plan, checkpoints.base)
        findings += _without_method(plan)
        findings += _untrained_heads(plan, layers, checkpoints.experts)
        findings += _coarse(plan, layers)
    as_model = written and plan.recipe.output.format == "model"
    findings += other_settings(checkpoints, as_model=as_model)
    faults = [finding for finding in findings if finding.severity is Severity.FAULT]
    stopping = [fault for fault in faults if fault.name not in plan.recipe.allow]
    if stopping:
        way = _way_on(stopping, len(checkpoints.experts))
        if any(fault.name == UNCHANGED for fault in stopping) and _in_float64(plan):
            way += (
                ". In float32 updates of less than 6e-8 of a weight are 0: if these are, compute in "
                f"float64 ({Hint('dtype', 'float64')})"
            )
        named = (
            str(fault) if fault.name is None else f"{fault.name}: {fault}" for fault in stopping
        )
        raise InputError("\n".join((*named, way)))
    warnings = (str(finding) for finding in findings if finding.severity is Severity.WARNING)
    allowed = (f"{fault.name}, which is allowed: {fault}" for fault in faults)
    notes = (str(finding) for finding in findings if finding.severity is Severity.NOTE)
    return Fit((*allowed, *warnings), tuple(notes))


def _untrained_heads(
    plan: Plan, layers: Sequence[LayerSums], experts: Mapping[str, Checkpoint]
) -> Iterator[Finding]:
    """Warn of an expert that is a merged model, whose task head is its base's and was never trained."""
    for name, expert in experts.items():
        of_heads = _heads_beside(expert.folder)
        merged = {
            tensor.name
            for tensor in plan.tensors
            if tensor.merge is not None
            and (operand := tensor.operands.get(name)) is not None
            and operand.tensor in of_heads
        }
        taken = dict.fromkeys(x.tensor for x in layers if x.tensor in merged and x.norm(name))
        if taken:
            yield Finding(
                Severity.WARNING,
                f"is a merge with the task head of its base in {some(taken, 2, quoted=True)}, which nobody "
                f"trained: each expert's own is in its heads/. To have that of the base here, add "
                f"{rules_for(*taken)}",
                name,
                tuple(taken),
            )


def _heads_beside(folder: Path | None) -> set[str]:
    """Return the names of the tensors of task heads in an output of covmerge; none for other folders."""
    found: dict[str, Any] = {}
    if folder is not None and (folder / MANIFEST_NAME).is_file():
        with suppress(InputError):  # not the manifest of a merge
            found = read_manifest(folder)
    heads: Mapping[str, Sequence[str]] = found.get("heads") or {}
    return {name for own in heads.values() for name in own}


def _without_method(plan: Plan) -> Iterator[Finding]:
    """Warn if all tensors were averaged, because none was recognised as a layer's matrix."""
    merged = [tensor for tensor in plan.tensors if tensor.merge is not None]
    used = {tensor.merge.method for tensor in plan.tensors if tensor.merge is not None}
    method = plan.recipe.method
    if used == {"average"} and method != "average" and len(plan.recipe.experts) > 1:
        matrices = [tensor.name for tensor in merged if len(tensor.output.shape) == 2]
        if matrices and not plan.recipe.rules:
            rule = {"match": matrices[0], "use": "method"}
            yield Finding(
                Severity.WARNING,
                f"'{method}' merged nothing: no tensor is known for a layer's matrix, so all "
                f"{counted(len(merged), 'tensor')} are averaged. If {some(matrices, 1, quoted=True)} are "
                f"such, add rules such as {json.dumps(rule)}",
            )


def _in_float64(plan: Plan) -> set[str]:
    """Return the tensors that are written in float64 but not computed in float64."""
    merged = {tensor.name for tensor in plan.tensors if tensor.output.dtype is torch.float64}
    return set() if plan.compute_dtype is torch.float64 else merged


def _coarse(plan: Plan, layers: Sequence[LayerSums]) -> Iterator[Finding]:
    """Warn if weights in float64 are merged in float32, and an update visibly loses precision."""
    fine = _in_float64(plan)
    lost = {
        (layer.tensor, expert): _HALF_DIGIT * hypot(1, sqrt(layer.base) / layer.norm(expert))
        for layer in layers
        for expert in layer.squares
        if layer.tensor in fine and layer.norm(expert)
    }
    if lost and (most := max(lost.values())) >= _SHOWS:
        name, expert = max(lost, key=lambda key: lost[key])
        yield Finding(
            Severity.WARNING,
            f"weights in float64 are merged in float32, which loses {most:.2%} of the update of '{expert}' "
            f"in '{name}': compute in float64 ({Hint('dtype', 'float64')})",
        )


def _way_on(stopping: Sequence[Finding], experts: int) -> str:
    stopped = "The merge is stopped and nothing is kept of it. `covmerge inspect` shows more"
    if any(fault.name in (None, LOST) for fault in stopping):
        return stopped
    if sum(fault.name == UNCHANGED for fault in stopping) == experts:
        return f"{stopped}. No expert differs from the base: pass models that were trained from it"
    names = list(dict.fromkeys(str(fault.name) for fault in stopping))
    return f"{stopped}; if this is meant, go on with {Hint('allow', names)}"
