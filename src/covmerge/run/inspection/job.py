"""Inspection of base and experts in one pass that merges nothing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import combinations
from math import prod
from operator import add
from pathlib import Path
from typing import Any, Literal, cast, get_args

import torch

from covmerge.base.errors import InputError
from covmerge.base.findings import Finding, Severity
from covmerge.base.memory import peak_memory
from covmerge.base.settings import PREFERRED, UNNAMED, Hint, choose
from covmerge.files.adapters.checkpoint import AdapterCheckpoint
from covmerge.files.checkpoints.base import PEFT_FORM, Checkpoint
from covmerge.files.quantised.view import open_plain
from covmerge.files.tensors.views import matrix_shapes
from covmerge.maths.measures.rounding import Lost
from covmerge.maths.measures.sums import sums_from_json
from covmerge.maths.measures.table_rows import TableRows
from covmerge.plan.planning.align import align, check_same_architecture
from covmerge.plan.planning.build import build_plans
from covmerge.plan.planning.forms import Unwritten
from covmerge.plan.planning.models import Model
from covmerge.plan.planning.operations import MERGED, Inspect, Merge, Operand
from covmerge.plan.planning.rules import Rules
from covmerge.plan.planning.types import Plan
from covmerge.plan.planning.work import WorkItem
from covmerge.plan.recipe import Recipe
from covmerge.plan.recipe.varied import is_varied
from covmerge.run.engine.inspect_rows import inspect_cost
from covmerge.run.engine.layer import Context
from covmerge.run.engine.options import RunOptions
from covmerge.run.engine.outputs import NoOutput
from covmerge.run.engine.run import RunResult, run
from covmerge.run.engine.thread_count import torch_threads
from covmerge.run.engine.threads import Threads
from covmerge.run.experts import check_tokenizers
from covmerge.run.inspection.result import Inspection, InspectionFigures, LayerView, SpectrumView
from covmerge.run.inspection.verdicts import check_headers, findings_of, lenient
from covmerge.run.judgement.judge import judge, owned_by
from covmerge.run.judgement.layers import by_depth
from covmerge.run.judgement.settings import other_settings
from covmerge.run.judgement.values import changed_integers
from covmerge.run.sources import OpenCheckpoints


@contextmanager
def open_merged(folder: Path, base: Checkpoint) -> Generator[Checkpoint]:
    """Open an output of covmerge under the names of its base, and close it at the end."""
    output = open_plain(folder)
    if isinstance(output, AdapterCheckpoint) and output.form != PEFT_FORM:
        output = output.named_as(base.headers)
    try:
        yield output
    finally:
        output.close()


SpectraOf = Literal["all", "some", "none"]
# Limit on the operations that "some" spectra take in all: minutes on a workstation.
_SPECTRAL_FLOPS = 1e14
_LEAST_SPECTRA = 4  # the report draws the spectra of this many layers


@dataclass(frozen=True)
class InspectJob:
    """An inspection of a recipe's base and experts, with the options of its run.

    Attributes:
        spectra: which tensors' singular values are taken, as in `covmerge.inspect`.
        spectral_flops: about how many operations "some" spectra take; None: 1e14, minutes on a workstation.
        quadratics: whether to measure how much any weighted sum of the updates would keep of each expert.
    """

    recipe: Recipe
    spectra: SpectraOf = "some"
    options: RunOptions = field(default_factory=RunOptions)
    spectral_flops: float | None = None
    quadratics: bool = False

    def run(
        self,
        checkpoints: OpenCheckpoints,
        merged: Checkpoint | None = None,
        before: Merge | None = None,
    ) -> Inspection:
        """Inspect the experts, and a model that they were merged to if one is given.

        The merge `before` is done again; its spectra are shown beside those of the merged model.
        """
        options = self.options
        base = Model.of(checkpoints.base)
        models = {name: Model.of(expert, name) for name, expert in checkpoints.experts.items()}
        findings, fitting = check_headers(self.recipe, base, models)
        checkpoints.materialize()
        folders = {name: model.checkpoint.folder for name, model in models.items()}
        if checkpoints.text.vocabulary is None:
            findings += check_tokenizers(checkpoints.base.folder, folders)
        findings += other_settings(checkpoints)
        layers: tuple[LayerView, ...] = ()
        cost: InspectionFigures = {}
        if fitting:
            plan = self._plan(checkpoints, fitting)
            taken, note = self._taken(plan)
            findings += note
            plan = self._inspection_plan(plan, taken, base, models, merged, before)
            memory = options.memory([plan])
            sources = checkpoints.sources(merged)
            with torch_threads(options.threads):
                (done,) = run(
                    [(plan, NoOutput())],
                    sources,
                    Context(plan.compute_dtype, options.torch_device),
                    executor=Threads(
                        in_flight=memory.in_flight, lanes=memory.lanes, kept_above=memory.kept_above
                    ),
                    progress=options.shown_progress,
                )
            plain = [name for name in fitting if models[name].checkpoint.quantisation is None]
            as_stored = plain if checkpoints.base.quantisation is None else []
            layers = tuple(_layers(plan, done, findings, as_stored))
            cost = {
                "seconds": done.times["seconds"],
                "read_seconds": done.times["read_seconds"],
                "compute_seconds": done.times["compute_seconds"],
                "peak_memory": peak_memory(),
                "expected_peak_memory": memory.peak,
            }
            findings += changed_integers(plan, done.items, "the base")
            findings += self._chosen(len(fitting))
            if layers:
                judged = [layer.judged for layer in layers]
                fit = {name: models[name].checkpoint for name in fitting}
                findings += judge(judged, checkpoints.base, fit, owned_by(plan, checkpoints))
                findings += findings_of(layers, fitting, checkpoints.adapters, half=_in_half(base))
        order = list(Severity)
        return Inspection(
            base=checkpoints.base.source,
            experts={name: expert.source for name, expert in checkpoints.experts.items()},
            adapters=tuple(checkpoints.adapters),
            family=base.description.family,
            findings=tuple(sorted(findings, key=lambda finding: order.index(finding.severity))),
            layers=layers,
            run=cost,
        )

    def _plan(self, checkpoints: OpenCheckpoints, fitting: Sequence[str]) -> Plan:
        """Return a plan of merging the fitting experts, which says which tensors are read."""
        experts = {name: self.recipe.experts[name] for name in fitting}
        experts = {  # tensors where a weight is 0 are inspected too
            name: expert.model_copy(update={"weight": 1.0}) if is_varied(expert.weight) else expert
            for name, expert in experts.items()
        }
        sources = {name: checkpoints.experts[name] for name in fitting}
        recipe = lenient(self.recipe).model_copy(update={"experts": experts})
        (plan,) = build_plans([recipe], checkpoints.base, sources, whole=True)
        return plan

    def _inspection_plan(
        self,
        plan: Plan,
        taken: Collection[str],
        base: Model,
        models: Mapping[str, Model],
        merged: Checkpoint | None,
        before: Merge | None,
    ) -> Plan:
        """Return the plan that inspects the tensors that `plan` merges, and those of the merged model."""
        result = None if merged is None else Model.of(merged, MERGED)
        found = {} if result is None else self._operands_of(result, base)
        experts = len(plan.recipe.experts)
        count = experts + (merged is not None)
        # The merge whose effect is predicted.
        attempt = Merge(PREFERRED, {}, None) if merged is None and experts > 1 else None
        inspected = {
            tensor.name: replace(
                tensor,
                operation=Inspect(
                    found.get(tensor.name),
                    tensor.name in taken,
                    before,
                    attempt,
                    self.quadratics,
                    tuple(plan.recipe.experts),
                ),
                operands={
                    name: operand
                    for name, operand in tensor.operands.items()
                    if operand.tensor is not None or models[name].checkpoint.gives(tensor.name)
                },
                form=Unwritten(),
            )
            for tensor in plan.tensors
            if tensor.merge is not None
        }
        items: list[WorkItem] = []
        for item in plan.items:
            if item.tensor.operation.compared:
                unwritten = replace(item.tensor, form=Unwritten())
                items.append(replace(item, tensor=unwritten, write_bytes=0))
            if item.tensor.key not in inspected:
                continue
            tensor, size = inspected[item.tensor.key], item.read_bytes
            if result is not None and (name := found[tensor.name].tensor) is not None:
                size += result.stored_bytes(name, prod(item.shape))
            inspection_item = replace(item, tensor=tensor, read_bytes=size)
            taking = tensor.key in taken
            items.append(self._measured(inspection_item, spectra=taking, models=count))
        return replace(plan, items=tuple(items))

    def _chosen(self, count: int) -> list[Finding]:
        """Say which method a merge would choose, if the recipe names none."""
        if self.recipe.method != UNNAMED:
            return []
        name, why = choose(count)
        return [Finding(Severity.NOTE, f"a merge that names no method takes {name}, as {why}")]

    def _operands_of(self, model: Model, base: Model) -> dict[str, Operand]:
        """Return the tensors of a merged model, by the base's names."""
        recipe = lenient(self.recipe)
        check_same_architecture(base, model)
        rules = Rules(recipe, base.description.family, base.headers)
        names = align(base, model, recipe.tensors, rules.chosen_use).names
        return {name: model.operand(MERGED, names.get(name)) for name in base.headers}

    def _taken(self, plan: Plan) -> tuple[frozenset[str], list[Finding]]:
        """Choose the tensors whose singular values are taken; add a note if these are only some.

        Raises:
            InputError: `spectra` is not all, some or none.
        """
        if self.spectra not in get_args(SpectraOf):
            raise InputError(f"spectra are taken of all, some or none, not of '{self.spectra}'")
        flops: dict[str, float] = {}
        models = len(plan.recipe.experts)
        for item in plan.items:
            if item.matrices is not None:
                cost = self._measured(item, spectra=True, models=models).flops
                flops[item.tensor.name] = flops.get(item.tensor.name, 0.0) + cost
        names = by_depth(flops)
        total = sum(flops.values())
        if self.spectra == "none" or not names:
            return frozenset(), []
        allowed = _SPECTRAL_FLOPS if self.spectral_flops is None else self.spectral_flops
        if self.spectra == "all" or total <= allowed:
            return frozenset(names), []
        count = min(len(names), max(_LEAST_SPECTRA, int(len(names) * allowed / total)))
        chosen = frozenset(names[i * len(names) // count] for i in range(count))
        how = Hint("spectra", "all")
        if self.spectral_flops is not None:
            how = "`covmerge report OUT --spectra all`"
        text = (
            f"singular values were taken of {count} of {len(names)} tensors, evenly from the first to "
            f"the last ({how} takes all)"
        )
        return chosen, [Finding(Severity.NOTE, text)]

    def _measured(self, item: WorkItem, *, spectra: bool, models: int) -> WorkItem:
        """Return the item with the cost of inspecting its rows of this many models."""
        shape = item.shape or (1,)
        itemsize = getattr(torch, self.recipe.dtype).itemsize
        numel = prod(shape)
        shapes = [(1, numel)] if item.matrices is None else matrix_shapes(shape, item.matrices)
        spectra = spectra and item.matrices is not None
        quadratics = self.quadratics and item.matrices is not None
        costs = [
            inspect_cost(m, n, models, itemsize, spectra=spectra, quadratics=quadratics)
            for m, n in shapes
        ]
        operation = item.tensor.operation
        attempt = operation.attempt if isinstance(operation, Inspect) else None
        if spectra and attempt is not None:
            method = attempt.procedure
            cost_of = method.cost_for(attempt.parameters)
            costs += [cost_of(m, n, models, itemsize) for m, n in shapes]
        held = (models + 2) * numel * itemsize
        return replace(
            item,
            write_bytes=0,
            workspace=held + max(cost.workspace for cost in costs),
            flops=sum(cost.flops for cost in costs),
        )


def _layers(
    plan: Plan, done: RunResult, findings: list[Finding], as_stored: Collection[str]
) -> Iterator[LayerView]:
    """Join the rows of each tensor, and name its matrices; add a finding for each tensor with a fault.

    The weights of the experts in `as_stored` are read as they are stored: like the base, they are not
    quantised.
    """
    rows: defaultdict[str, list[tuple[WorkItem, Mapping[str, Any]]]] = defaultdict(list)
    for item, stats in zip(plan.items, done.items, strict=True):
        if "fault" in stats:
            findings.append(_not_finite(item.tensor.name, cast("Mapping[str, Any]", stats)))
        elif "pieces" in stats:
            rows[item.tensor.name].append((item, cast("Mapping[str, Any]", stats)))
    for name in by_depth(rows):
        parts = [(item, stats, piece) for item, stats in rows[name] for piece in stats["pieces"]]
        item, stats, _ = parts[0]
        if item.matrices is None:
            yield _view(item, name, stats, [piece for *_, piece in parts], as_stored)
            continue
        for place, (item, stats, piece) in enumerate(parts):
            matrix = f"{name}[{place}]" if len(parts) > 1 else name
            yield _view(item, matrix, stats, [piece], as_stored)


def _not_finite(tensor: str, stats: Mapping[str, Any]) -> Finding:
    whose: str | None = stats["of"]
    merged = stats["of_merged"]
    source = " of the merged model" if merged else " of the base" if whose is None else ""
    text = f"'{tensor}'{source} {stats['fault']}"
    return Finding(Severity.FAULT, text, None if merged else whose, (tensor,))


def _view(
    item: WorkItem,
    name: str,
    stats: Mapping[str, Any],
    pieces: Sequence[Mapping[str, Any]],
    as_stored: Collection[str],
) -> LayerView:
    """Return the measurements of a matrix, or of a whole tensor, whose rows may be in several pieces."""
    tensor, experts, first = item.tensor, tuple(stats["experts"]), pieces[0]
    sums = reduce(add, (sums_from_json(piece["sums"]) for piece in pieces))
    rows: dict[str, TableRows] = {}
    lost: dict[str, Lost] = {}
    for piece in pieces:
        for expert, given in piece.get("rows", {}).items():
            rows[expert] = rows.get(expert, TableRows(0, 0, 0, 0)) + TableRows(**given)
        for expert, given in piece["lost"].items():
            if expert in as_stored:
                lost[expert] = lost.get(expert, Lost()) + Lost(**given)
    of_merged = {key: SpectrumView(**first[key]) for key in ("after", "before") if key in first}
    # The merged model is the last in the sums.
    cosines = {expert: of_all[-1] for expert, of_all in zip(experts, sums.cosines, strict=False)}
    return LayerView(
        tensor=tensor.name,
        name=name,
        role=str(tensor.info.role),
        shape=tensor.stored.shape if item.matrices is None else tuple(first["shape"]),
        is_matrix=item.matrices is not None,
        experts=experts,
        sums=sums,
        absent=tuple(stats["absent"]),
        lost=lost,
        rows=rows,
        spectra={e: SpectrumView(**given) for e, given in first.get("spectra", {}).items()},
        overlap=dict(zip(combinations(experts, 2), first.get("overlaps", ()), strict=False)),
        foreseen=first.get("foreseen", {}),
        merged=of_merged.get("after"),
        before=of_merged.get("before"),
        retention=first.get("retention", {}),
        merged_cosines=cosines if stats["merged"] else {},
        merged_norm=sums.norms[-1] if stats["merged"] else None,
        quadratics=dict(zip(experts, first.get("quadratics", ()), strict=False)),
    )


def _in_half(base: Model) -> bool:
    """Return whether more than half of a model's floating-point tensors have at most 2 bytes a number."""
    stored = [header.dtype for header in base.headers.values() if header.dtype.is_floating_point]
    return sum(dtype.itemsize <= 2 for dtype in stored) > len(stored) / 2
