"""One run: global passes, then every item that is not finished; the journal is kept here."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

from typing_extensions import TypedDict

from covmerge.base.types import Json
from covmerge.files.checkpoints.journal import Entry, Journal
from covmerge.plan.planning.types import Plan
from covmerge.plan.planning.work import WorkItem
from covmerge.run.engine.executor import (
    Batch,
    Done,
    Executor,
    Span,
    Task,
    moved_together,
    read_together,
)
from covmerge.run.engine.global_pass import find_thresholds, global_pass_bytes
from covmerge.run.engine.inputs import Sources
from covmerge.run.engine.layer import Context
from covmerge.run.engine.outputs import Output
from covmerge.run.engine.progress import Progress
from covmerge.run.engine.selection import Selections


class Times(TypedDict):
    """Seconds of a run, and of its stages, which overlap.

    Reading and global passes serve all plans of a run; `compute_seconds` are of one plan. Where several
    items were computed at once, their seconds add up.
    """

    seconds: float
    survey_seconds: float
    read_seconds: float
    compute_seconds: float
    write_seconds: float


class Figures(Times):
    """Seconds of the stages, and bytes of memory."""

    peak_memory: int
    expected_peak_memory: int


@dataclass(frozen=True)
class RunResult:
    """What a run did by one plan: what there is to say of each item, in plan order, and its cost.

    An item that an earlier run finished has no seconds. `spans` say when all of it happened, in seconds
    from its start.
    """

    items: tuple[Mapping[str, Json], ...]
    times: Times
    resumed_items: int
    item_seconds: tuple[float | None, ...]
    spans: tuple[Span, ...] = ()


def run(
    work: Sequence[tuple[Plan, Output]],
    sources: Sources,
    context: Context,
    *,
    executor: Executor,
    progress: Progress,
    journal: Journal | None = None,
    follow: Callable[[float], None] | None = None,
) -> list[RunResult]:
    """Carry out every item of one or several plans, reading each tensor once for all of them.

    Args:
        work: each plan and where its results go; item by item the plans have the same rows
            (`covmerge.plan.planning.build_plans`).
        sources: the checkpoints.
        context: what the work needs to know; the global passes' thresholds are found here.
        executor: does the work.
        progress: called for every finished item.
        journal: of one plan, what is finished; without one the work cannot be resumed.
        follow: called with the share of the sources that the last pass has come to.

    Raises:
        CovmergeError: as the work raises; the first error ends it.
    """
    plans = [plan for plan, _ in work]
    batches = _batches(plans)
    progress.start(global_pass_bytes(plans) + sum(map(moved_together, batches)))
    begun = time.perf_counter()
    try:
        task = _with_thresholds(work, Task(sources, context), executor, progress.advance)
        ranked = time.perf_counter()
        record = _Record(batches, task, journal, progress, follow)
        # Closed by hand: an error here must not leave threads at work.
        with closing(executor.run(record.unfinished(), task)) as finished:
            for done in finished:
                record.take(done)
        record.tell_resumed()
    finally:
        progress.finish()
    ranking = Span("global pass", 0, 0.0, ranked - begun)
    seconds = time.perf_counter() - begun
    return [record.result(number, begun, seconds, ranking) for number in range(len(plans))]


def run_part(
    plan: Plan, output: Output, sources: Sources, context: Context, *, executor: Executor
) -> None:
    """Do a part of what another process runs, keeps the journal of, and ends."""
    task = _with_thresholds([(plan, output)], Task(sources, context), executor, _untold)
    with closing(executor.run(enumerate(_batches([plan])), task)) as finished:
        for _ in finished:
            pass


def _untold(what: str, size: int) -> None:
    """Who keeps the journal tells how far the work is."""


def _batches(plans: Sequence[Plan]) -> list[Batch]:
    return list(zip(*(plan.items for plan in plans), strict=True))


def _with_thresholds(
    work: Sequence[tuple[Plan, Output]],
    task: Task,
    executor: Executor,
    advance: Callable[[str, int], None],
) -> Task:
    """Find the thresholds, and return what the merge needs."""

    def count(counted: Sequence[Batch], selections: Selections) -> Generator[Done]:
        return executor.run(enumerate(counted), replace(task, selections=selections))

    thresholds = find_thresholds([plan for plan, _ in work], count, advance)
    context = replace(task.context, thresholds=thresholds)
    return replace(task, context=context, outputs=[output for _, output in work])


class _Record:
    """What has been done, of all batches."""

    def __init__(
        self,
        batches: Sequence[Batch],
        task: Task,
        journal: Journal | None,
        progress: Progress,
        follow: Callable[[float], None] | None,
    ) -> None:
        self._batches = batches
        self._outputs = outputs = task.outputs
        self._journal = journal
        self._progress = progress
        self._follow = follow
        self._found: list[dict[int, Mapping[str, Json]]] = [{} for _ in outputs]
        self._done: list[dict[int, Done]] = [{} for _ in outputs]
        self._resumed: list[int] = []

    def unfinished(self) -> Iterator[tuple[int, Batch]]:
        """The batches that are to be done; what an earlier run has finished is passed over."""
        total, passed = sum(map(read_together, self._batches)), 0
        for index, batch in enumerate(self._batches):
            earlier = self._earlier(batch)
            if all(stats is not None for stats in earlier):
                for found, stats in zip(self._found, earlier, strict=True):
                    found[index] = stats or {}
                self._resumed.append(index)
            else:
                yield index, batch
            # The executor comes back when it has read the batch.
            passed += read_together(batch)
            if self._follow is not None:
                self._follow(passed / max(1, total))

    def take(self, done: Done) -> None:
        """Note an item; a line in the journal stands for bytes that are there."""
        self.tell_resumed()
        batch = self._batches[done.index]
        self._found[done.number][done.index] = done.stats
        self._done[done.number][done.index] = done
        if self._journal is not None:
            self._journal.append(Entry(*batch[done.number].key, done.checksum, done.stats))
        if done.number == len(batch) - 1:
            self._progress.advance(batch[0].tensor.name, moved_together(batch))

    def tell_resumed(self) -> None:
        """Report what was found done, which another thread has found."""
        while self._resumed:
            batch = self._batches[self._resumed.pop()]
            self._progress.advance(batch[0].tensor.name, moved_together(batch), resumed=True)

    def result(self, number: int, begun: float, seconds: float, ranking: Span) -> RunResult:
        """Return what was done by one of the plans."""
        done = self._done[number]
        shared = [span for other in self._done for d in other.values() for span in d.spans]
        computing = {i: s for i, d in done.items() for s in d.spans if s.stage == "compute"}
        reading = [span for span in shared if span.stage == "read"]
        writing = [span for span in shared if span.stage == "write"]
        spans = [*reading, *computing.values(), *writing]
        return RunResult(
            items=tuple(self._found[number][index] for index in range(len(self._batches))),
            times={
                "seconds": seconds,
                "survey_seconds": ranking.stop - ranking.start,
                "read_seconds": _seconds(reading),
                "compute_seconds": _seconds(computing.values()),
                "write_seconds": _seconds(writing),
            },
            resumed_items=len(self._batches) - len(done),
            item_seconds=tuple(
                span and span.stop - span.start
                for span in map(computing.get, range(len(self._batches)))
            ),
            spans=(
                ranking,
                *(replace(s, start=s.start - begun, stop=s.stop - begun) for s in spans),
            ),
        )

    def _earlier(self, batch: Batch) -> list[Mapping[str, Json] | None]:
        pairs = zip(batch, self._outputs, strict=True)
        return [self._finished(item, output) for item, output in pairs]

    def _finished(self, item: WorkItem, output: Output) -> Mapping[str, Json] | None:
        """Statistics of a journaled item whose bytes still have their checksum."""
        entry = self._journal and self._journal.finished.get(item.key)
        if entry is None or entry.checksum != output.read_back(item.places):
            return None
        return entry.stats


def _seconds(spans: Iterable[Span]) -> float:
    return sum(span.stop - span.start for span in spans)
