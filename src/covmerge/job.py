"""One merge from open checkpoints to a verified result: in memory, or as a folder."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from covmerge.adapters import merge_to_adapter
from covmerge.checkpoints import Journal, Staging, check_not_input
from covmerge.engine import (
    Context,
    MemoryPlan,
    MemorySink,
    Progress,
    RunStats,
    Sink,
    plan_memory,
    room_for,
    run,
)
from covmerge.errors import InputError
from covmerge.judgement import check_fit
from covmerge.output import (
    Fingerprints,
    MergeResult,
    ModelFolder,
    OpenCheckpoints,
    merge_stats,
    read_heads,
    run_report,
    told_of,
)
from covmerge.plan import Plan, build_plan
from covmerge.recipe import Recipe


class Silent:
    """Progress for callers that want none."""

    def start(self, total: int) -> None:
        """Work begins."""

    def advance(self, what: str, size: int, *, resumed: bool = False) -> None:
        """Some of it is done."""

    def finish(self) -> None:
        """Work is over."""


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
        if self.recipe.output.format == "adapter":
            return self._to_adapter(checkpoints, device)
        plan = build_plan(
            self.recipe, checkpoints.base, checkpoints.experts, checkpoints.statistics
        )
        # A merge in memory holds its whole output beside the work.
        held = plan.write_bytes if self.out is None else 0
        memory = plan_memory(
            [plan], self.max_memory, device=device, threads=self.threads, held=held
        )
        work = _Work(plan, checkpoints, memory, device)
        return self._to_memory(work) if self.out is None else self._to_disk(work, self.out)

    def _to_adapter(self, checkpoints: OpenCheckpoints, device: torch.device) -> MergeResult:
        if self.out is None:
            raise InputError("an adapter is written to a folder: give an output folder")
        if self.resume:
            raise InputError(
                "a merge to an adapter leaves nothing to resume when it is interrupted: run it again "
                "without --resume"
            )
        if self.max_memory is not None:
            raise InputError(
                "a merge to an adapter holds the factors of a few tensors, and has no memory plan: "
                "run it without --max-memory"
            )
        with torch_threads(self.threads):
            return merge_to_adapter(
                self.recipe,
                checkpoints,
                self.out,
                device=device,
                progress=self.progress or Silent(),
                overwrite=self.overwrite,
            )

    def _to_memory(self, work: _Work) -> MergeResult:
        work.checkpoints.materialize()
        sink = MemorySink(work.plan)
        done = self._execute(work, sink)
        fit = check_fit(work.plan, done.items, work.checkpoints)
        stats = merge_stats(work.plan, done.items)
        warnings, noticed = told_of(work.plan, stats, fit)
        return MergeResult(
            path=None,
            tensors=sink.tensors,
            heads=read_heads(work.plan, work.checkpoints),
            recipe=work.plan.recipe,
            stats=stats,
            run=run_report(done, work.memory),
            timeline=done.spans,
            notes=(*work.plan.notes, *noticed),
            warnings=warnings,
            masks=sink.masks,
        )

    def _to_disk(self, work: _Work, out: Path) -> MergeResult:
        check_not_input(out, work.checkpoints.paths())
        if not (self.resume or self.overwrite):
            # Before anything is downloaded. What an earlier merge holds may be the space that this
            # one will use; the writer reserves its space in any case.
            room_for([work.plan], out).check()
        with Staging(out, overwrite=self.overwrite, resume=self.resume) as staging:
            work.checkpoints.materialize()
            digest = work.plan.digest(work.checkpoints.identity())
            # A journal of another plan is an error that leaves the earlier work as it is; whatever
            # goes wrong after it leaves nothing behind.
            begin = Journal.resume if staging.resuming else Journal.create
            with begin(staging.journal, digest) as journal:
                try:
                    model = ModelFolder(staging.folder, work.plan, work.checkpoints)
                    with Fingerprints(work.checkpoints) as fingerprints:
                        done = self._execute(work, model.sink(journal), fingerprints.follow)
                        warnings = check_fit(work.plan, done.items, work.checkpoints)
                        result = model.finish(
                            done, fingerprints, work.memory, out, warnings=warnings
                        )
                except Exception:  # whatever it was; Ctrl-C is none, and keeps the work
                    staging.discard()
                    raise
            staging.commit()
        return replace(result, notes=(*result.notes, *staging.notes))

    def _execute(
        self, work: _Work, sink: Sink, follow: Callable[[float], None] | None = None
    ) -> RunStats:
        work.checkpoints.check_ties(work.plan)
        with torch_threads(self.threads):
            (done,) = run(
                [(work.plan, sink)],
                work.checkpoints.sources(),
                context_of(work.plan, work.device),
                in_flight=work.memory.in_flight,
                lanes=work.memory.lanes,
                progress=self.progress or Silent(),
                follow=follow,
            )
        return done


@dataclass(frozen=True)
class _Work:
    """What a job has settled before its first tensor."""

    plan: Plan
    checkpoints: OpenCheckpoints
    memory: MemoryPlan
    device: torch.device


def context_of(plan: Plan, device: torch.device, *, compare: bool = False) -> Context:
    """What the engine needs to know beside the plan."""
    weights = {name: expert.weight for name, expert in plan.recipe.experts.items()}
    return Context(weights, plan.compute_dtype, device, compare=compare)


@contextmanager
def torch_threads(count: int | None) -> Generator[None]:
    """Give torch this many threads for a while; None leaves its setting."""
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
