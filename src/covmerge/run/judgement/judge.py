"""Everything that the sums over the updates give away, and what of it stops a merge."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence

from covmerge.base.errors import InputError
from covmerge.base.findings import LOST, UNCHANGED, Finding, Fit, Severity
from covmerge.base.settings import Hint
from covmerge.base.text import counted, some
from covmerge.base.types import Json
from covmerge.files.checkpoints.base import Checkpoint
from covmerge.files.tensors.describe import describe_checkpoint
from covmerge.plan.planning.align import Model
from covmerge.plan.planning.operations import Merge
from covmerge.plan.planning.types import Plan
from covmerge.run.judgement.integers import changed_integers
from covmerge.run.judgement.layers import Layer, layers_of
from covmerge.run.judgement.not_finite import left_for_nan
from covmerge.run.judgement.packed import packed_in_memory
from covmerge.run.judgement.swaps import find_swaps
from covmerge.run.judgement.verdicts import (
    foreign_layers,
    replaced_tables,
    stranger,
    uneven,
    untouched,
)
from covmerge.run.sources import OpenCheckpoints


def judge(
    layers: Sequence[Layer],
    base: Checkpoint,
    experts: Mapping[str, Checkpoint],
    heads: Collection[str],
) -> Iterator[Finding]:
    """Say what the sums give away.

    Adapters have no weights of their own, so there is nothing to hold against the base's: that one
    was trained over another base, no number of it says.

    Args:
        layers: of all experts.
        base: the base, to compare with layers that are not its own.
        experts: by name.
        heads: experts with a task head of their own.
    """
    matrices = [layer for layer in layers if layer.is_matrix]
    for name, expert in experts.items():
        if not expert.is_adapter:
            unfit = stranger(matrices, name)
            foreign = [] if unfit else foreign_layers(matrices, name)
            if unfit:
                yield unfit
            if foreign:
                yield from find_swaps(foreign, _model(base), _model(expert))
            tables = None if unfit else replaced_tables(layers, name)
            if tables:
                yield tables
        yield from untouched(layers, name, has_head=name in heads)
    different = uneven(layers, list(experts))
    if different:
        yield different


def check_fit(plan: Plan, done: Sequence[Mapping[str, Json]], checkpoints: OpenCheckpoints) -> Fit:
    """Judge the experts by what a run measured.

    Args:
        plan: what was carried out.
        done: the statistics of its items.
        checkpoints: base and experts.

    Raises:
        InputError: a merge of these experts is worthless, and the recipe does not `allow` it.
    """
    if not checkpoints.base.is_source:  # there is nothing that they should be fine-tunes of
        first = next(iter(checkpoints.experts))
        findings = list(changed_integers(plan, done, f"expert '{first}'"))
    else:
        layers = list(layers_of(plan, done))
        findings = list(judge(layers, checkpoints.base, checkpoints.experts, plan.heads))
        findings = [finding for finding in findings if finding.severity is not Severity.NOTE]
        findings += changed_integers(plan, done, "the base")
        findings += left_for_nan(plan, checkpoints.experts)
        findings += packed_in_memory(plan, checkpoints.base)
        findings += _without_method(plan)
    faults = [finding for finding in findings if finding.severity is Severity.FAULT]
    stopping = [fault for fault in faults if fault.name not in plan.recipe.allow]
    if stopping:
        raise InputError(
            "\n".join((*map(_named, stopping), _way_on(stopping, len(checkpoints.experts))))
        )
    warnings = (str(finding) for finding in findings if finding.severity is Severity.WARNING)
    allowed = (f"{fault.name}, which is allowed: {fault}" for fault in faults)
    notes = (str(finding) for finding in findings if finding.severity is Severity.NOTE)
    return Fit((*allowed, *warnings), tuple(notes))


def _without_method(plan: Plan) -> Iterator[Finding]:
    """Warn where the recipe's method had nothing to merge, as no tensor is known for a matrix."""
    merged = [tensor for tensor in plan.tensors if isinstance(tensor.operation, Merge)]
    used = {tensor.operation.method for tensor in merged if isinstance(tensor.operation, Merge)}
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


def _named(fault: Finding) -> str:
    return str(fault) if fault.name is None else f"{fault.name}: {fault}"


def _way_on(stopping: Sequence[Finding], experts: int) -> str:
    stopped = "The merge is stopped and nothing is kept of it. `covmerge inspect` shows more"
    if any(fault.name in (None, LOST) for fault in stopping):
        return stopped
    if sum(fault.name == UNCHANGED for fault in stopping) == experts:
        return f"{stopped}. No expert differs from the base: pass models that were trained from it"
    names = list(dict.fromkeys(str(fault.name) for fault in stopping))
    return f"{stopped}; if this is meant, go on with {Hint('allow', names)}"


def _model(checkpoint: Checkpoint) -> Model:
    return Model(checkpoint, describe_checkpoint(checkpoint))
