"""One pass over base and experts that merges nothing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, cast, get_args

import torch

from covmerge.checkpoints import Checkpoint
from covmerge.engine import MemoryPlan, NoSink, Progress, RunStats, peak_memory, plan_memory, run
from covmerge.engine.inspect import MERGED, Redo, inspect_rows, inspection_cost
from covmerge.engine.run import Worker
from covmerge.engine.worker import Context
from covmerge.errors import InputError
from covmerge.findings import Finding, Severity
from covmerge.inspection.compatibility import check_headers, check_tokenizers, lenient
from covmerge.inspection.result import Inspection, LayerView, SpectrumView
from covmerge.inspection.verdicts import findings_of
from covmerge.job import Silent, torch_threads, usable_device
from covmerge.judgement import judge
from covmerge.judgement.names import by_depth
from covmerge.measures.sums import Sums, sums_from_json
from covmerge.output import OpenCheckpoints
from covmerge.plan import Plan, WorkItem, build_plans
from covmerge.plan.align import Model
from covmerge.recipe import Expert, Recipe
from covmerge.tensors import describe_checkpoint, matrix_shapes
from covmerge.types import Json

SpectraOf = Literal["all", "some", "none"]
# Operations that "some" spectra may take together: minutes on a workstation.
_SPECTRAL_FLOPS = 1e14


@dataclass(frozen=True)
class InspectJob:
    """A recipe to look at, and the options of one run.

    Attributes:
        recipe: base, experts, what is left to the base; its method is not run.
        spectra: of which matrices singular values are taken, which is most of the work: of all, of
            some, evenly from the first to the last, where all would be long, or of none.
    """

    recipe: Recipe
    spectra: SpectraOf = "some"
    device: str = "cpu"
    threads: int | None = None
    max_memory: int | None = None
    progress: Progress | None = None

    def run(
        self,
        checkpoints: OpenCheckpoints,
        merged: Checkpoint | None = None,
        before: Redo | None = None,
    ) -> Inspection:
        """Look at the experts, and at a model that they were merged to.

        Args:
            checkpoints: base and experts.
            merged: a merged model.
            before: merges a matrix again, to show its spectrum beside that of the merged model.

        Raises:
            ResourceError: a matrix of all experts does not fit the memory.
        """
        device = usable_device(self.device)
        base = _model(checkpoints.base)
        models = {name: _model(expert) for name, expert in checkpoints.experts.items()}
        findings, fitting = check_headers(self.recipe, base, models)
        checkpoints.materialize()
        folders = {name: model.checkpoint.folder for name, model in models.items()}
        findings += check_tokenizers(checkpoints.base.folder, folders)
        layers: tuple[LayerView, ...] = ()
        cost: dict[str, Json] = {}
        if fitting:
            plan = self._plan(checkpoints, fitting, merged)
            taken, note = self._taken(plan)
            findings += note
            plan = replace(
                plan, items=tuple(self._measured(i, i.tensor.name in taken) for i in plan.items)
            )
            memory = plan_memory([plan], self.max_memory, device=device, threads=self.threads)
            worker = partial(inspect_rows, spectra=taken, before=before)
            done = self._execute(plan, checkpoints, merged, memory, device, worker)
            layers = tuple(_layers(plan, done, findings))
            cost = {
                "seconds": done.seconds,
                "read_seconds": done.read_seconds,
                "compute_seconds": done.compute_seconds,
                "peak_memory": peak_memory(),
                "expected_peak_memory": memory.peak,
            }
            if layers:
                judged = [layer.judged for layer in layers]
                fit = {name: models[name].checkpoint for name in fitting}
                findings += judge(judged, checkpoints.base, fit, plan.heads)
                findings += findings_of(layers, fitting, half=_in_half(base))
        order = list(Severity)
        return Inspection(
            base=checkpoints.base.source,
            experts={name: expert.source for name, expert in checkpoints.experts.items()},
            family=base.description.family,
            findings=tuple(sorted(findings, key=lambda finding: order.index(finding.severity))),
            layers=layers,
            run=cost,
        )

    def _plan(
        self, checkpoints: OpenCheckpoints, fitting: Sequence[str], merged: Checkpoint | None
    ) -> Plan:
        """Plan to read every tensor that all fitting experts could be merged in."""
        experts = {name: self.recipe.experts[name] for name in fitting}
        sources = {name: checkpoints.experts[name] for name in fitting}
        if merged is not None:
            experts[MERGED] = Expert(source=merged.source)
            sources[MERGED] = merged
        # Not validated: the merged model's name can be no expert's.
        recipe = lenient(self.recipe).model_copy(update={"experts": experts})
        (plan,) = build_plans([recipe], checkpoints.base, sources, whole=True)
        return plan

    def _taken(self, plan: Plan) -> tuple[frozenset[str], list[Finding]]:
        """Choose the tensors whose singular values are taken; say so where it is not all of them.

        Raises:
            InputError: another word than all, some or none.
        """
        if self.spectra not in get_args(SpectraOf):
            raise InputError(f"spectra are taken of all, some or none, not of '{self.spectra}'")
        flops: dict[str, float] = {}
        for item in plan.items:
            if item.matrices is not None:
                own = self._measured(item, spectra=True).flops
                flops[item.tensor.name] = flops.get(item.tensor.name, 0.0) + own
        names = by_depth(flops)
        total = sum(flops.values())
        if self.spectra == "none" or not names:
            return frozenset(), []
        if self.spectra == "all" or total <= _SPECTRAL_FLOPS:
            return frozenset(names), []
        count = max(1, int(len(names) * _SPECTRAL_FLOPS / total))
        chosen = frozenset(names[i * len(names) // count] for i in range(count))
        text = (
            f"singular values were taken of {count} of {len(names)} tensors, evenly from the first to "
            "the last (--spectra all takes all)"
        )
        return chosen, [Finding(Severity.NOTE, text)]

    def _measured(self, item: WorkItem, spectra: bool) -> WorkItem:
        """The same item with what inspecting it costs."""
        shape = item.shape or (1,)
        itemsize = getattr(torch, self.recipe.dtype).itemsize
        numel, count = (
            item.write_bytes // item.tensor.output.dtype.itemsize,
            len(item.tensor.sources),
        )
        shapes = [(1, numel)] if item.matrices is None else matrix_shapes(shape, item.matrices)
        spectra = spectra and item.matrices is not None
        costs = [inspection_cost(m, n, count, itemsize, spectra=spectra) for m, n in shapes]
        held = (count + 2) * numel * itemsize
        return replace(
            item,
            write_bytes=0,
            workspace=held + max(cost.workspace for cost in costs),
            flops=sum(cost.flops for cost in costs),
        )

    def _execute(
        self,
        plan: Plan,
        checkpoints: OpenCheckpoints,
        merged: Checkpoint | None,
        memory: MemoryPlan,
        device: torch.device,
        worker: Worker,
    ) -> RunStats:
        sources = checkpoints.sources()
        if merged is not None:
            sources = replace(sources, experts={**sources.experts, MERGED: merged})
        context = Context({}, plan.compute_dtype, device)
        with torch_threads(self.threads):
            (done,) = run(
                [(plan, NoSink())],
                sources,
                context,
                in_flight=memory.in_flight,
                lanes=memory.lanes,
                progress=self.progress or Silent(),
                worker=worker,
            )
        return done


def _model(checkpoint: Checkpoint) -> Model:
    return Model(checkpoint, describe_checkpoint(checkpoint))


def _layers(plan: Plan, done: RunStats, findings: list[Finding]) -> Iterator[LayerView]:
    """Join the rows of each tensor, and name its matrices; what could not be read is a finding."""
    rows: defaultdict[str, list[tuple[WorkItem, Mapping[str, Any]]]] = defaultdict(list)
    for item, stats in zip(plan.items, done.items, strict=True):
        if "fault" in stats:
            findings.append(_not_finite(item.tensor.name, cast("Mapping[str, Any]", stats)))
        elif stats:
            rows[item.tensor.name].append((item, cast("Mapping[str, Any]", stats)))
    for name in by_depth(rows):
        own = rows[name]
        if own[0][0].matrices is None:
            yield _joined([stats for _, stats in own], own[0][0])
            continue
        pieces = [(item, stats, piece) for item, stats in own for piece in stats["pieces"]]
        for place, (item, stats, piece) in enumerate(pieces):
            yield _layer(item, stats, piece, f"{name}[{place}]" if len(pieces) > 1 else name)


def _not_finite(tensor: str, stats: Mapping[str, Any]) -> Finding:
    whose: str | None = stats["of"]
    source = {None: " of the base", MERGED: " of the merged model"}.get(whose, "")
    text = f"'{tensor}'{source} {stats['fault']}"
    return Finding(Severity.FAULT, text, whose or None, (tensor,))


def _joined(stats: Sequence[Mapping[str, Any]], item: WorkItem) -> LayerView:
    total: Sums | None = None
    for part in stats:
        sums = sums_from_json(part["pieces"][0]["sums"])
        total = sums if total is None else total + sums
    assert total is not None
    tensor = item.tensor
    names, shape = tuple(stats[0]["experts"]), tensor.stored.shape
    return _view(tensor.name, tensor.name, str(tensor.role), shape, False, names, total, {})


def _layer(
    item: WorkItem, stats: Mapping[str, Any], piece: Mapping[str, Any], name: str
) -> LayerView:
    tensor, sums = item.tensor, sums_from_json(piece["sums"])
    shape = tuple(piece["shape"])
    names = tuple(stats["experts"])
    return _view(tensor.name, name, str(tensor.role), shape, True, names, sums, piece)


def _view(
    tensor: str,
    name: str,
    role: str,
    shape: tuple[int, ...],
    is_matrix: bool,
    names: tuple[str, ...],
    sums: Sums,
    piece: Mapping[str, Any],
) -> LayerView:
    experts = tuple(expert for expert in names if expert != MERGED)
    view = LayerView(tensor, name, role, shape, is_matrix, experts, sums)
    spectra = {e: SpectrumView(**given) for e, given in piece.get("spectra", {}).items()}
    if spectra:
        pairs = [(a, b) for i, a in enumerate(experts) for b in experts[i + 1 :]]
        view = replace(
            view,
            spectra={expert: spectra[expert] for expert in experts},
            overlap=dict(zip(pairs, piece["overlaps"], strict=True)),
        )
    if MERGED not in names:
        return view
    last = names.index(MERGED)
    return replace(
        view,
        merged=spectra.get(MERGED),
        before=SpectrumView(**piece["before"]) if "before" in piece else None,
        retention=piece.get("retention", {}),
        merged_cosines={e: sums.cosines[names.index(e)][last] for e in experts},
        merged_norm=sums.norms[last],
    )


def _in_half(base: Model) -> bool:
    """Whether a model is stored in half precision, for the most part."""
    stored = [header.dtype for header in base.headers.values() if header.dtype.is_floating_point]
    return sum(dtype.itemsize <= 2 for dtype in stored) > len(stored) / 2
