"""The checkpoints of a merge, and the folder that one merged model becomes."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from covmerge.checkpoints import (
    MASKS_FOLDER,
    AdaptedBase,
    AdapterCheckpoint,
    Checkpoint,
    Journal,
    MaskWriter,
    ShardWriter,
    open_checkpoint,
    plan_layout,
    remove_others,
)
from covmerge.checkpoints.base import stamp_of
from covmerge.checkpoints.hashes import FileHashes
from covmerge.checkpoints.manifest import MANIFEST_NAME
from covmerge.diagnostics import DIFFERS, Check, VerifyReport, examine
from covmerge.engine import (
    DiskSink,
    MemoryPlan,
    RunStats,
    Sources,
    Span,
    check_ties,
    method_notes,
    method_warnings,
    peak_memory,
    tensor_stats,
    totals,
)
from covmerge.export import (
    Parents,
    copy_companions,
    hash_companions,
    read_parents,
    rescalers_of,
    write_card,
    write_heads,
    write_index,
    write_manifest,
    write_rescalers,
)
from covmerge.plan import Plan
from covmerge.recipe import Expert, Recipe, dump_recipe
from covmerge.statistics.file import StatisticsFile
from covmerge.tensors import conv1d_names, describe_checkpoint
from covmerge.types import Json
from covmerge.version import __version__

Source = str | Path | Mapping[str, Tensor]


@dataclass(frozen=True)
class MergeResult:
    """What a merge gave.

    Attributes:
        path: the output folder; None for a merge in memory.
        tensors: merged weights by name; None for a merge to disk.
        masks: per expert, what EMR-Merging masks; empty for every other method and for a merge to
            disk, which has them as files. The factors are `stats["rescalers"]`.
        heads: per expert, its own task head; empty for a merge to disk, which has them as files.
        recipe: what was carried out, its method named.
        stats: per tensor and in total, as in `covmerge.json`.
        run: seconds and memory of this run.
        seconds: of mathematics by tensor, of those that this run merged.
        timeline: when this run surveyed, read, computed and wrote.
        notes: what the plan and the run want a reader to know.
        warnings: what may make the result worse, and what to do.
        verification: result of re-reading the output, for a merge to disk.
    """

    path: Path | None
    tensors: dict[str, Tensor] | None
    heads: Mapping[str, Mapping[str, Tensor]]
    recipe: Recipe
    stats: Mapping[str, Any]
    run: Mapping[str, Any]
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    verification: VerifyReport | None = None
    seconds: Mapping[str, float] = field(default_factory=dict[str, float])
    timeline: tuple[Span, ...] = ()
    masks: Mapping[str, Mapping[str, Tensor]] = field(
        default_factory=dict[str, Mapping[str, Tensor]]
    )


@dataclass(frozen=True)
class OpenCheckpoints:
    """The checkpoints of a recipe, and the statistics files of its experts where it names them."""

    base: Checkpoint
    experts: Mapping[str, Checkpoint]
    statistics: Mapping[str, StatisticsFile] = field(default_factory=dict[str, StatisticsFile])

    def all(self) -> Iterator[tuple[str, Checkpoint]]:
        """The base, then the experts, each with its key in reports."""
        yield "base", self.base
        for name, checkpoint in self.experts.items():
            yield f"expert {name}", checkpoint

    def materialize(self) -> None:
        """Fetch what planning did not need."""
        for _, checkpoint in self.all():
            checkpoint.materialize()

    def paths(self) -> list[Path]:
        """Where they lie, for checks that nothing overwrites them; other sources do not exist."""
        files = [file.path for file in self.statistics.values()]
        return [*(Path(c.source).expanduser() for _, c in self.all()), *files]

    @cached_property
    def parents(self) -> Parents:
        """Who they are, as the model card tells it; the cards of repositories are fetched."""
        return read_parents(self.all())

    @cached_property
    def companions(self) -> Mapping[str, str]:
        """Hashes of the base's companion files when they were first asked for."""
        return hash_companions(self.base.folder)

    def identity(self) -> dict[str, Json]:
        """What tells these sources from others, for the digest of a plan."""
        return {
            **{key: checkpoint.identity() for key, checkpoint in self.all()},
            **{
                f"statistics {name}": [file.identity(), stamp_of(file.path.stat())]
                for name, file in self.statistics.items()
            },
            "companions": dict(self.companions),
        }

    def sources(self) -> Sources:
        """The same for the engine."""
        return Sources(self.base, self.experts, self.statistics)

    def check_ties(self, plan: Plan) -> None:
        """Check that tied tensors that are stored twice agree; not of a base that is not read.

        Raises:
            TensorError: two of them differ.
        """
        if not isinstance(self.base, AdaptedBase):
            check_ties(self.base, plan.tied[None])
        for name, expert in self.experts.items():
            check_ties(expert, plan.tied[name])


@contextmanager
def open_checkpoints(
    base: Source, experts: Mapping[str, Source], statistics: Mapping[str, str | Path]
) -> Generator[OpenCheckpoints]:
    """Open base, experts and statistics files, and close all of them at the end."""
    with ExitStack() as stack:

        def opened(source: Source) -> Checkpoint:
            checkpoint = open_checkpoint(source)
            stack.callback(checkpoint.close)
            return checkpoint

        def measured(path: str | Path) -> StatisticsFile:
            file = StatisticsFile.open(path)
            stack.callback(file.close)
            return file

        start = opened(base)
        models = {name: opened(source) for name, source in experts.items()}
        adapters = {n: m for n, m in models.items() if isinstance(m, AdapterCheckpoint)}
        if adapters:
            conv1d = conv1d_names(describe_checkpoint(start))
            models |= {
                n: adapter.named_as(start.headers, conv1d) for n, adapter in adapters.items()
            }
        yield OpenCheckpoints(
            start,
            models,
            {name: measured(path) for name, path in statistics.items()},
        )


def statistics_of(experts: Mapping[str, Expert]) -> dict[str, str]:
    """The statistics files that a recipe names, by expert."""
    return {name: e.statistics for name, e in experts.items() if e.statistics is not None}


class ModelFolder:
    """A folder that becomes one merged model, written while the engine runs."""

    def __init__(self, folder: Path, plan: Plan, checkpoints: OpenCheckpoints) -> None:
        """Reserve the space of all shards, and copy what is not merged.

        Of an earlier run only the weights and masks are kept.

        Raises:
            ResourceError: the disk is full.
            CheckpointError: a companion file of the base changed since the merge was planned.
        """
        self._folder = folder
        self._plan = plan
        self._checkpoints = checkpoints
        self._parents = checkpoints.parents  # before the work, while the Hub is there
        self._layout = plan_layout(
            plan.output_headers, plan.recipe.output.shard_size, metadata=plan.metadata
        )
        masked = [tensor.output for tensor in plan.tensors if tensor.writes_masks]
        experts = list(plan.recipe.experts) if masked else []
        self._files = [shard.file_name for shard in self._layout.shards]
        self._files += [f"{MASKS_FOLDER}/{expert}.safetensors" for expert in experts]
        self._removed = remove_others(folder, self._files)
        self._writer = ShardWriter(folder, self._layout)
        self._masks = MaskWriter(folder, masked, experts) if masked else None
        self._copied = copy_companions(
            checkpoints.base.folder, folder, _config_dtype(plan), known=checkpoints.companions
        )
        self._files += self._copied.copied

    def sink(self, journal: Journal | None = None) -> DiskSink:
        """Where the engine puts the rows of this model."""
        return DiskSink(self._writer, journal, self._masks)

    def finish(
        self,
        done: RunStats,
        fingerprints: Fingerprints,
        memory: MemoryPlan,
        out: Path,
        *,
        warnings: Sequence[str] = (),
        may_equal_base: bool = False,
    ) -> MergeResult:
        """Write all that belongs to the model beside its weights, and check it.

        Args:
            done: what the engine did.
            fingerprints: hashes of the sources.
            memory: what was expected of it.
            out: the folder that the output becomes.
            warnings: what the fit of the experts gave.
            may_equal_base: a model that equals the base is no failure.

        Raises:
            CheckFailed: the output failed its verification.
        """
        plan, base, folder = self._plan, self._checkpoints.base, self._folder
        self._writer.flush()
        # What was laid in meanwhile may be a link, through which something else would be written.
        self._removed += remove_others(folder, self._files)
        index = write_index(self._layout, folder)
        heads = write_heads(folder, read_heads(plan, self._checkpoints))
        stats = merge_stats(plan, done.items)
        if self._masks is not None:
            self._masks.flush()
            heads += (write_rescalers(folder, cast("Mapping[str, float]", stats["rescalers"])),)
        told_warnings, noticed = told_of(plan, stats, warnings)
        notes = (*plan.notes, *noticed, *self._copied.notes, *self._parents.notes)
        told = manifest(plan, fingerprints, notes, told_warnings, stats)
        card = write_card(folder, plan, self._parents, base.config, told)
        beside = [path for path in (index, *heads, card) if path is not None]
        sealed = seal(
            folder,
            told,
            [*self._files, *(path.relative_to(folder).as_posix() for path in beside)],
            out=out,
            base=base,
            may_equal_base=may_equal_base,
            removed=self._removed,
        )
        return MergeResult(
            out,
            None,
            {},
            plan.recipe,
            stats,
            run_report(done, memory),
            (*notes, *sealed.notes),
            told_warnings,
            sealed.report,
            seconds=tensor_seconds(plan, done),
            timeline=done.spans,
        )


def manifest(
    plan: Plan,
    fingerprints: Fingerprints,
    notes: Sequence[str],
    warnings: Sequence[str],
    stats: Mapping[str, Json],
) -> dict[str, Json]:
    """What covmerge.json says of a merge."""
    return {
        "covmerge": __version__,
        "torch": torch.__version__,
        "recipe": dump_recipe(plan.recipe),
        "chosen": plan.chosen,
        "family": plan.family,
        "sources": fingerprints.result(),
        "notes": list(notes),
        "warnings": list(warnings),
        **stats,
    }


@dataclass(frozen=True)
class Sealed:
    """An output that was checked, with a manifest that has the hashes of its files.

    Attributes:
        report: of the checks.
        notes: what a user should be told.
    """

    report: VerifyReport
    notes: tuple[str, ...]


def seal(
    folder: Path,
    told: Mapping[str, Json],
    files: Sequence[str],
    *,
    out: Path,
    base: Checkpoint | None = None,
    may_equal_base: bool = False,
    removed: Sequence[str] = (),
) -> Sealed:
    """Check what was written, in one reading, and write covmerge.json with the hashes of all of it.

    Args:
        folder: where the output was written.
        told: what covmerge.json says beside the hashes.
        files: what was written, as paths in the folder; what else lies there is removed.
        out: the folder that the output becomes, for the report.
        base: what the output is compared with.
        may_equal_base: an output that equals the base is no failure.
        removed: what was removed already, for the notes.

    Raises:
        CheckFailed: the output failed its verification.
    """
    removed = [*removed, *remove_others(folder, files)]
    checks, found = examine(folder, told, sorted(files), base=base)
    lost = [f"{name} {problem}" for name, problem in found.items() if isinstance(problem, str)]
    if lost:
        checks = (Check("files", ok=False, detail="; ".join(lost)), *checks)
    report = VerifyReport(out, checks)
    if not (may_equal_base and report.failed == (DIFFERS,)):
        report.raise_if_failed()
    hashes = {name: one.as_json() for name, one in found.items() if isinstance(one, FileHashes)}
    write_manifest(folder, {**told, "files": hashes})
    return Sealed(report, _strays(removed, files))


def _strays(removed: Sequence[str], files: Sequence[str]) -> tuple[str, ...]:
    """A note on what was removed from unfinished work, but for what is of the merge itself."""
    strange = sorted({*removed} - {*files, MANIFEST_NAME})
    if not strange:
        return ()
    return (
        "removed from the unfinished output, as this merge had not written it: "
        + ", ".join(strange[:10])
        + (f" and {len(strange) - 10} more" if strange[10:] else ""),
    )


class Fingerprints:
    """Hashes the sources in the background, in step with their reader.

    It reads the files for itself, in their order, but never a larger share of a source than the
    merge has read. Files in the base's order are then in the page cache when their turn comes, also
    where the sources are larger than the memory; of another order, some are read from the disk twice.
    """

    def __init__(self, checkpoints: OpenCheckpoints) -> None:
        self._checkpoints = checkpoints
        self._changed = threading.Condition()
        self._share = 0.0
        self._stopped = False
        sources = len(list(checkpoints.all()))
        self._pool = ThreadPoolExecutor(sources, thread_name_prefix="covmerge-hash")

    def __enter__(self) -> Fingerprints:
        """Begin."""
        try:
            self._hashing = {
                key: (checkpoint.source, self._pool.submit(checkpoint.fingerprint, self._pace))
                for key, checkpoint in self._checkpoints.all()
            }
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Stop: a run that failed does not wait for hashes."""
        self._stop()
        self._pool.shutdown()

    def follow(self, share: float) -> None:
        """So much of the sources has been read, and may be hashed."""
        with self._changed:
            self._share = share
            self._changed.notify_all()

    def result(self) -> dict[str, Json]:
        """Wait for the hashes."""
        self.follow(1.0)
        found: dict[str, Json] = {
            key: {"source": source, "content": hashing.result()}
            for key, (source, hashing) in self._hashing.items()
        }
        for name, file in self._checkpoints.statistics.items():
            found[f"statistics {name}"] = {"source": str(file.path), "content": file.identity()}
        return found

    def _pace(self, share: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or share <= self._share)
            if self._stopped:
                raise CancelledError("hashing the sources was stopped")

    def _stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()


def read_heads(plan: Plan, checkpoints: OpenCheckpoints) -> dict[str, dict[str, Tensor]]:
    """Read the task head of every expert that has one of its own."""
    return {
        expert: {name: checkpoints.experts[expert].read(name) for name in kept}
        for expert, kept in plan.heads.items()
    }


def _config_dtype(plan: Plan) -> torch.dtype | None:
    """The dtype config.json must state, None if the weights keep the base's."""
    stored = plan.recipe.output.dtype
    return None if stored == "base" else getattr(torch, stored)


def merge_stats(plan: Plan, done: Sequence[Mapping[str, Json]]) -> dict[str, Json]:
    """Statistics of a finished merge: totals, heads, and each tensor."""
    entries = tensor_stats(plan, done)
    heads = {expert: sorted(kept) for expert, kept in plan.heads.items()}
    factors = rescalers_of(entries)
    rescaled = {"rescalers": factors} if factors else {}
    return {"totals": totals(entries), "heads": heads, **rescaled, "tensors": entries}


def told_of(
    plan: Plan, stats: Mapping[str, Any], warnings: Sequence[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return warnings and notes of a merge: of its experts, and of what the method noticed."""
    entries = stats["tensors"]
    return (*warnings, *method_warnings(plan, entries)), method_notes(entries)


def tensor_seconds(plan: Plan, done: RunStats) -> dict[str, float]:
    """Seconds of mathematics by tensor; those that an earlier run merged are left out."""
    found: dict[str, float] = {}
    for item, seconds in zip(plan.items, done.item_seconds, strict=True):
        if seconds is not None:
            found[item.tensor.name] = found.get(item.tensor.name, 0.0) + seconds
    return found


def run_report(done: RunStats, memory: MemoryPlan) -> dict[str, Json]:
    """Seconds and memory of a run."""
    return {
        "seconds": done.seconds,
        "survey_seconds": done.survey_seconds,
        "read_seconds": done.read_seconds,
        "compute_seconds": done.compute_seconds,
        "write_seconds": done.write_seconds,
        "resumed_items": done.resumed_items,
        "items": len(done.items),
        "peak_memory": peak_memory(),
        "expected_peak_memory": memory.peak,
    }
