"""Write and check the output files of one merge: a model or an adapter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any, cast

import torch

from covmerge.base.diagnostics import MergeSummary, TensorDiagnostics, summarise
from covmerge.base.findings import Fit
from covmerge.base.memory import peak_memory
from covmerge.base.text import counted, some
from covmerge.base.types import Json
from covmerge.base.version import __version__
from covmerge.files.checkpoints.base import PEFT_FORM, Checkpoint
from covmerge.files.checkpoints.folder import CONFIG
from covmerge.files.checkpoints.hashes import FileHashes
from covmerge.files.checkpoints.manifest import MANIFEST_NAME
from covmerge.files.checkpoints.open import open_store
from covmerge.files.quantised.gguf import check_rope
from covmerge.files.quantised.view import dequantised, is_quantised
from covmerge.files.stores.local import LocalFolder
from covmerge.files.stores.store import Store
from covmerge.maths.measures.retention import times_as_long
from covmerge.maths.methods import COMMON_SUMMARIES
from covmerge.maths.methods.emr import rescalers_of
from covmerge.plan.moe.gates import late_warnings
from covmerge.plan.planning.forms import AdapterFactors, AdapterTensor
from covmerge.plan.planning.types import Plan
from covmerge.plan.recipe import dump_recipe
from covmerge.plan.statistics.file import probe
from covmerge.run.engine.budget import MemoryPlan
from covmerge.run.engine.entries import account_of_losses, diagnostics_in, tensor_entries, totals
from covmerge.run.engine.hashing import ReadFiles, read_files
from covmerge.run.engine.run import RunResult
from covmerge.run.experts import alike_by_content
from covmerge.run.export.adapter import (
    bases_that_differ,
    changed_and_left_out,
    write_adapter_config,
)
from covmerge.run.export.card import write_card
from covmerge.run.export.companions import Companions, copy_companions
from covmerge.run.export.config import ConfigChanges, write_config
from covmerge.run.export.expert_models import BASE_PROBE, write_rescalers
from covmerge.run.export.files import (
    files_of,
    open_output,
    plan_parts,
    write_indices,
    write_manifest,
)
from covmerge.run.result import MergedFolder, RunFigures, Stats
from covmerge.run.sources import OpenCheckpoints
from covmerge.run.verification import DIFFERS, Check, Verification, examine

# Report merged updates that are much too long, and what to do about them.

_BLOWN_UP = 2.0  # above this ratio to the sum of the experts' norms, a warning replaces the note


def account_of_lengths(
    entries: Mapping[str, Mapping[str, Any]], diagnostics: Sequence[TensorDiagnostics] = ()
) -> MergeSummary:
    """Return a note or a warning on merged updates that are longer than the experts' updates together.

    Where the method's diagnostics give the length in the outputs and it is not too long, the tensor is
    reported as harmless.
    """
    outputs = {
        one.tensor: max(lengths)
        for one in diagnostics
        if (lengths := [m.length_in_outputs for m in one.matrices]) and None not in lengths
    }
    ratios = {
        name: times
        for name, entry in entries.items()
        if "merged_norm" in entry
        and (times := times_as_long(entry["merged_norm"], entry["update_norm"].values())) > 1.0
    }
    meant = {name: times for name, times in ratios.items() if outputs.get(name, 2.0) <= 1.0}
    long = {name: times for name, times in ratios.items() if name not in meant}
    account = MergeSummary()
    if long:
        text = f"{_longest(long)}: take a smaller scale where the method has one, or another method"
        blown_up = max(long.values()) > _BLOWN_UP
        account += MergeSummary(warnings=(text,)) if blown_up else MergeSummary(notes=(text,))
    if meant:
        most = max(outputs[name] for name in meant)
        text = (
            f"{_longest(meant)}, but not what it adds to the outputs: on the inputs that it looked at that "
            f"is at most {most:.2g} times as long as the experts' together there. It is longer where these "
            "inputs hardly ever go; on inputs very unlike them outputs may be too"
        )
        account += MergeSummary(notes=(text,))
    return account


def _longest(ratios: Mapping[str, float]) -> str:
    longest = max(ratios, key=lambda name: ratios[name])
    return (
        f"the merged update is longer than the experts' together in {counted(len(ratios), 'tensor')} "
        f"({some(list(ratios), 2)}), {ratios[longest]:.3g} times in '{longest}'"
    )


class OutputFiles:
    """The output files of one merged model or adapter, written while the engine runs."""

    def __init__(self, store: LocalFolder, plan: Plan, checkpoints: OpenCheckpoints) -> None:
        """Reserve disk space for all files of weights, and copy the base's companion files.

        Of an earlier run's files, only the files of weights are kept; all others are removed.

        Raises:
            ResourceError: the disk is full.
            CheckpointError: a companion file of the base changed after the merge was planned, or a GGUF
                file does not say enough to make a config.
        """
        self._store = store
        self._plan = plan
        self._checkpoints = checkpoints
        self._parents = checkpoints.parents  # read now, as the Hub may be out of reach at the end
        self._layouts = plan_parts(plan)
        self._files = files_of(self._layouts)
        self._removed = store.remove_others(self._files)
        linked = [name for name in self._removed if name in self._files]
        self._linked = (f"merged anew, as a link lay there: {some(linked)}",) if linked else ()
        self.output = open_output(store, self._layouts)
        self._copied = Companions()
        if not self._is_adapter:  # an adapter is loaded over a base that has companion files
            base, stored = checkpoints.base, plan.recipe.output.dtype
            changes = ConfigChanges(
                None if stored == "base" else getattr(torch, stored),
                base.order,
                plain=not is_quantised(base),
                quantisation=plan.quantisation,
                tokens=checkpoints.text.files,
                untied=base.untied is not None,
                other=None if checkpoints.views.moe is None else base.config,
            )
            self._copied = copy_companions(base.folder, store, changes, checkpoints.companions)
            # The config may be in a GGUF file, or in memory.
            if base.config is not None and CONFIG not in self._copied.copied:
                if plan.gguf is None:
                    check_rope(base)
                of_weights = ConfigChanges(changes.dtype, quantisation=changes.quantisation)
                write_config(store, base.config, of_weights)
                self._copied = self._copied.with_config(held=base.is_held)
        self._files += self._copied.copied

    def finish(
        self,
        done: RunResult,
        sources: Mapping[str, Json],
        memory: MemoryPlan,
        out: Store,
        *,
        fit: Fit,
        may_equal_base: bool = False,
        compared: bool = True,
        read: ReadFiles = read_files,
    ) -> MergedFolder:
        """Write config, indices, model card and manifest beside the weights, and check the output."""
        plan, base, store = self._plan, self._checkpoints.base, self._store
        self.output.flush()
        # A file added meanwhile may be a link; writing through it would change a file elsewhere.
        self._removed += store.remove_others(self._files)
        stats, account = merge_stats(plan, done.items)
        beside = self._write_config() if self._is_adapter else self._write_beside(stats)
        warnings = (*fit.warnings, *account.warnings)
        notes = (
            *plan.notes,
            *account.notes,
            *fit.notes,
            *self._copied.notes,
            *(self._adapter_notes(stats) if self._is_adapter else ()),
            *self._router_notes(),
            *self._parents.notes,
        )
        vocabulary = self._checkpoints.text.vocabulary
        record: dict[str, Json] = {
            "covmerge": __version__,
            "torch": torch.__version__,
            "recipe": dump_recipe(plan.recipe),
            "chosen": plan.chosen,
            **({"extensions": [one.as_json() for one in plan.origins]} if plan.origins else {}),
            "family": plan.family,
            "sources": sources,
            "notes": list(notes),
            "warnings": list(warnings),
            **({} if vocabulary is None else {"vocabulary": vocabulary.as_json()}),
            **({} if base.untied is None else {"untied": dict(base.untied)}),
            **cast("Mapping[str, Json]", stats),
            **({BASE_PROBE: probe(base)} if "rescalers" in stats else {}),
        }
        beside.append(write_card(store, plan, self._parents, base.config, record))
        alike = alike_by_content(cast("Mapping[str, Any]", sources))
        notes += tuple(note for note in alike if note not in notes)
        record["notes"] = list(notes)
        files = [*self._files, *beside]
        self._removed += store.remove_others(files)
        against = None if self._is_adapter or not compared else base
        report = self._sealed(record, files, out, against, may_equal_base, read)
        return MergedFolder(
            path=out.folder,
            recipe=plan.recipe,
            stats=stats,
            run=run_figures(done, memory),
            diagnostics=account.rows,
            notes=(*notes, *self._linked, *_strays(self._removed, files)),
            warnings=warnings,
            verification=report,
            seconds=tensor_seconds(plan, done),
            timeline=done.spans,
        )

    def _sealed(
        self,
        record: Mapping[str, Json],
        files: Sequence[str],
        out: Store,
        base: Checkpoint | None,
        may_equal_base: bool,
        read: ReadFiles,
    ) -> Verification:
        """Check the output in one reading, and write covmerge.json with the hashes of all its files.

        Raises:
            CheckFailed: the output failed its verification.
        """
        checks, found = examine(self._store, record, sorted(files), base=base, read=read)
        lost = [f"{name} {problem}" for name, problem in found.items() if isinstance(problem, str)]
        if lost:
            checks = (Check("files", ok=False, detail="; ".join(lost)), *checks)
        report = Verification(out.folder or out, checks)
        if not (may_equal_base and report.failed == (DIFFERS,)):
            report.raise_if_failed()
        hashes = {name: one.as_json() for name, one in found.items() if isinstance(one, FileHashes)}
        write_manifest(self._store, {**record, "files": hashes})
        return report

    @property
    def _is_adapter(self) -> bool:
        return self._plan.recipe.output.format == "adapter"

    def _write_beside(self, stats: Stats) -> list[str]:
        """Write the index of each sharded model, and the rescaling factors that belong to masks."""
        beside = write_indices(self._layouts, self._store)
        if "rescalers" in stats:
            beside.append(write_rescalers(self._store, stats["rescalers"]))
        return beside

    def _write_config(self) -> list[str]:
        """Write the adapter config that PEFT needs; other adapter formats need no separate config."""
        if self._plan.recipe.output.names != PEFT_FORM:
            return []
        forms = [tensor.form for tensor in self._plan.tensors]
        return [
            write_adapter_config(
                self._store,
                [form.place for form in forms if isinstance(form, AdapterFactors)],
                [form.place for form in forms if isinstance(form, AdapterTensor)],
                self._plan.parameters,
                [adapter.adapter_config for adapter in self._checkpoints.adapters.values()],
                self._checkpoints.base,
            )
        ]

    def _router_notes(self) -> Sequence[str]:
        moe = self._checkpoints.views.moe
        if moe is None or not moe.late:
            return ()
        with closing(open_store(str(self._store), self._store)) as output:
            return late_warnings(dequantised(output), moe)

    def _adapter_notes(self, stats: Mapping[str, Any]) -> Iterator[str]:
        yield from bases_that_differ(list(self._checkpoints.adapters.values()))
        changed = {n for n, entry in stats["tensors"].items() if entry.get("merged_norm")}
        yield from changed_and_left_out(self._plan, changed)


def _strays(removed: Sequence[str], files: Sequence[str]) -> tuple[str, ...]:
    strange = sorted({*removed} - {*files, MANIFEST_NAME})
    if not strange:
        return ()
    return (
        "removed from the unfinished output, as this merge had not written it: "
        + some(strange, 10),
    )


def merge_stats(plan: Plan, done: Sequence[Mapping[str, Json]]) -> tuple[Stats, MergeSummary]:
    """Return the statistics of a finished merge for covmerge.json, and their summary as text."""
    entries = tensor_entries(plan, done)
    rows = diagnostics_in(plan, entries)
    account = summarise(rows, always=COMMON_SUMMARIES) + account_of_lengths(entries, rows)
    heads = {expert: sorted(names) for expert, names in plan.heads.items()}
    factors = rescalers_of(rows)
    counted = totals(entries, account.totals)
    account += account_of_losses(counted)
    stats: Stats = {"totals": counted, "heads": heads, "tensors": entries}
    if factors:
        stats["rescalers"] = factors
    return stats, account


def tensor_seconds(plan: Plan, done: RunResult) -> dict[str, float]:
    """Return seconds of mathematics by tensor, without tensors that an earlier run merged."""
    found: dict[str, float] = {}
    for item, seconds in zip(plan.items, done.item_seconds, strict=True):
        if seconds is not None:
            found[item.tensor.name] = found.get(item.tensor.name, 0.0) + seconds
    return found


def run_figures(done: RunResult, memory: MemoryPlan) -> RunFigures:
    """Return seconds, memory and work counts of a run."""
    figures: RunFigures = {
        **done.times,
        "resumed_items": done.resumed_items,
        "items": len(done.items),
        "peak_memory": peak_memory(),
        "expected_peak_memory": memory.peak,
        "workers": memory.workers,
    }
    if memory.why:
        figures["workers_because"] = memory.why
    return figures
