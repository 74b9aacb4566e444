"""One merge from open checkpoints to a verified result: in memory, or as a folder."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from covmerge.checkpoints import (
    Checkpoint,
    Journal,
    ShardWriter,
    Staging,
    check_not_input,
    open_checkpoint,
    plan_layout,
)
from covmerge.diagnostics import VerifyReport, verify
from covmerge.engine import (
    DiskSink,
    MemoryPlan,
    MemorySink,
    Progress,
    RunStats,
    Sink,
    check_ties,
    peak_memory,
    plan_memory,
    room_for,
    run,
    tensor_stats,
    totals,
)
from covmerge.errors import CovmergeError, InputError
from covmerge.export import copy_companions, write_heads, write_index, write_manifest
from covmerge.plan import Plan, WorkItem, build_plan
from covmerge.recipe import Recipe, dump_recipe
from covmerge.types import Json
from covmerge.version import __version__


@dataclass(frozen=True)
class MergeResult:
    """What a merge gave.

    Attributes:
        path: the output folder; None for a merge in memory.
        tensors: merged weights by name; None for a merge to disk.
        heads: per expert, its own task head; empty for a merge to disk, which has them as files.
        stats: per tensor and in total, as in `covmerge.json`.
        run: seconds and memory of this run.
        notes: what the plan and the run want a reader to know.
        verification: result of re-reading the output, for a merge to disk.
    """

    path: Path | None
    tensors: dict[str, Tensor] | None
    heads: Mapping[str, Mapping[str, Tensor]]
    stats: Mapping[str, Json]
    run: Mapping[str, Json]
    notes: tuple[str, ...] = ()
    verification: VerifyReport | None = None


@dataclass(frozen=True)
class OpenCheckpoints:
    """The checkpoints of a recipe."""

    base: Checkpoint
    experts: Mapping[str, Checkpoint]

    def all(self) -> Iterator[tuple[str, Checkpoint]]:
        """The base, then the experts, each with its key in reports."""
        yield "base", self.base
        for name, checkpoint in self.experts.items():
            yield f"expert {name}", checkpoint

    def materialize(self) -> None:
        """Fetch what planning did not need."""
        for _, checkpoint in self.all():
            checkpoint.materialize()


@contextmanager
def open_checkpoints(
    base: str | Path | Mapping[str, Tensor],
    experts: Mapping[str, str | Path | Mapping[str, Tensor]],
) -> Generator[OpenCheckpoints]:
    """Open base and experts, and close all of them at the end."""
    with ExitStack() as stack:

        def opened(source: str | Path | Mapping[str, Tensor]) -> Checkpoint:
            checkpoint = open_checkpoint(source)
            stack.callback(checkpoint.close)
            return checkpoint

        yield OpenCheckpoints(opened(base), {n: opened(s) for n, s in experts.items()})


class _Silent:
    """Progress for callers that want none."""

    def start(self, plan: Plan) -> None:
        pass

    def advance(self, item: WorkItem, *, resumed: bool) -> None:
        pass

    def finish(self) -> None:
        pass


@dataclass(frozen=True)
class Job:
    """A recipe with the options of one run."""

    recipe: Recipe
    out: Path | None
    device: str = "cpu"
    threads: int | None = None
    max_memory: int | None = None
    resume: bool = False
    overwrite: bool = False
    progress: Progress | None = field(default=None)

    def run(self, checkpoints: OpenCheckpoints) -> MergeResult:
        """Plan, then merge to memory or to `out`.

        Raises:
            InputError: anything wrong with the inputs; nothing is left behind.
            CheckFailed: the output failed its verification.
        """
        device = usable_device(self.device)
        plan = build_plan(self.recipe, checkpoints.base, checkpoints.experts)
        # A merge in memory holds its whole output beside the work.
        held = plan.write_bytes if self.out is None else 0
        memory = plan_memory(plan, self.max_memory, held=held)
        work = _Work(plan, checkpoints, memory, device)
        return self._to_memory(work) if self.out is None else self._to_disk(work, self.out)

    def _to_memory(self, work: _Work) -> MergeResult:
        work.checkpoints.materialize()
        sink = MemorySink(work.plan)
        done = self._execute(work, sink)
        return MergeResult(
            path=None,
            tensors=sink.tensors,
            heads=_read_heads(work),
            stats=_stats(work.plan, done),
            run=_run_report(done, work.memory),
            notes=work.plan.notes,
        )

    def _to_disk(self, work: _Work, out: Path) -> MergeResult:
        check_not_input(out, [Path(c.source).expanduser() for _, c in work.checkpoints.all()])
        if not (self.resume or self.overwrite):
            # Before anything is downloaded. What an earlier merge holds may be the space that this
            # one will use; the writer reserves its space in any case.
            room_for(work.plan, out).check()
        with Staging(out, overwrite=self.overwrite, resume=self.resume) as staging:
            work.checkpoints.materialize()
            digest = work.plan.digest({key: c.identity() for key, c in work.checkpoints.all()})
            # A journal of another plan is an error that leaves the earlier work as it is; whatever
            # goes wrong after it leaves nothing behind.
            begin = Journal.resume if staging.resuming else Journal.create
            with begin(staging.journal, digest) as journal:
                try:
                    result = self._fill(work, staging.folder, journal)
                    # The report names the folder that the output becomes.
                    checked = verify(staging.folder, base=work.checkpoints.base)
                    checked = replace(checked, folder=out)
                    checked.raise_if_failed()
                except CovmergeError:
                    staging.discard()
                    raise
            staging.commit()
        notes = (*result.notes, *staging.notes)
        return replace(result, path=out, notes=notes, verification=checked)

    def _fill(self, work: _Work, folder: Path, journal: Journal) -> MergeResult:
        """Write everything that belongs to the output into the staging folder."""
        plan, base = work.plan, work.checkpoints.base
        layout = plan_layout(
            plan.output_headers, plan.recipe.output.shard_size, metadata=plan.metadata
        )
        writer = ShardWriter(folder, layout)
        hashes = _Fingerprints(work.checkpoints)
        done = self._execute(work, DiskSink(writer, journal))
        writer.flush()
        write_index(layout, folder)
        write_heads(folder, _read_heads(work))
        copied = copy_companions(base.folder, folder, _config_dtype(plan))
        stats = _stats(plan, done)
        notes = (*plan.notes, *copied.notes)
        write_manifest(
            folder,
            {
                "covmerge": __version__,
                "torch": torch.__version__,
                "recipe": dump_recipe(plan.recipe),
                "family": plan.family,
                "sources": hashes.result(),
                "notes": notes,
                **stats,
            },
        )
        return MergeResult(folder, None, {}, stats, _run_report(done, work.memory), notes)

    def _execute(self, work: _Work, sink: Sink) -> RunStats:
        base, experts = work.checkpoints.base, work.checkpoints.experts
        check_ties(base, work.plan.tied[None])
        for name, expert in experts.items():
            check_ties(expert, work.plan.tied[name])
        with _threads(self.threads):
            return run(
                work.plan,
                base,
                experts,
                sink,
                in_flight=work.memory.in_flight,
                device=work.device,
                progress=self.progress or _Silent(),
            )


@dataclass(frozen=True)
class _Work:
    """What a job has settled before its first tensor."""

    plan: Plan
    checkpoints: OpenCheckpoints
    memory: MemoryPlan
    device: torch.device


class _Fingerprints:
    """Hashes the sources in the background, while their pages are in the cache anyway."""

    def __init__(self, checkpoints: OpenCheckpoints) -> None:
        self._found: dict[str, Json] = {}
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._hash, args=(checkpoints,), daemon=True)
        self._thread.start()

    def _hash(self, checkpoints: OpenCheckpoints) -> None:
        try:
            for key, checkpoint in checkpoints.all():
                self._found[key] = {
                    "source": checkpoint.source,
                    "content": checkpoint.fingerprint(),
                }
        except BaseException as error:
            self._error = error

    def result(self) -> dict[str, Json]:
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._found


def _read_heads(work: _Work) -> dict[str, dict[str, Tensor]]:
    return {
        expert: {name: work.checkpoints.experts[expert].read(name) for name in kept}
        for expert, kept in work.plan.heads.items()
    }


def _config_dtype(plan: Plan) -> torch.dtype | None:
    """The dtype config.json must state, None if the weights keep the base's."""
    stored = plan.recipe.output.dtype
    return None if stored == "base" else getattr(torch, stored)


def _stats(plan: Plan, done: RunStats) -> dict[str, Json]:
    entries = tensor_stats(plan, done)
    heads = {expert: sorted(kept) for expert, kept in plan.heads.items()}
    return {"totals": totals(entries), "heads": heads, "tensors": entries}


def _run_report(done: RunStats, memory: MemoryPlan) -> dict[str, Json]:
    return {
        "seconds": done.seconds,
        "read_seconds": done.read_seconds,
        "compute_seconds": done.compute_seconds,
        "write_seconds": done.write_seconds,
        "resumed_items": done.resumed_items,
        "items": len(done.items),
        "peak_memory": peak_memory(),
        "expected_peak_memory": memory.peak,
    }


@contextmanager
def _threads(count: int | None) -> Generator[None]:
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def usable_device(name: str) -> torch.device:
    """Return a device that can hold a tensor here, or raise InputError."""
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"--device {name} cannot be used here: {reason}") from error
    return device
