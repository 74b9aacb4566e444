"""Does one run: global passes, then every unfinished item; it also keeps the journal."""

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
from covmerge.run.engine.progress import Progress, Silent
from covmerge.run.engine.selection import Selections


class Times(TypedDict):
    """Seconds of a run and of its stages, which overlap.

    Reading, writing and global passes are counted for all plans of a run together, `compute_seconds` for
    one plan. The seconds of items that were computed at once are added up.
    """

    seconds: float
    survey_seconds: float
    read_seconds: float
    compute_seconds: float
    write_seconds: float


class Figures(Times):
    """Seconds of a run and its stages, and its peak memory in bytes."""

    peak_memory: int
    expected_peak_memory: int


@dataclass(frozen=True)
class RunResult:
    """The result of a run for one plan: measurements of each item, in plan order, and times.

    An item that an earlier run finished has None as its seconds. `spans` are the times of all stages, in
    seconds from the start of the run.
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

    `work` has each plan and where its results go; item by item the plans have the same rows. This function
    adds the thresholds of the global passes to the context. The journal has the finished items of a single
    plan. `follow` is called with the share of the sources that the last pass has read.

    Raises:
        CovmergeError: the first error of the work; it ends the run.
    """
    plans = [plan for plan, _ in work]
    batches = _batches(plans)
    progress.start(global_pass_bytes(plans) + sum(map(moved_together, batches)))
    begun = time.perf_counter()
    try:
        task = _with_thresholds(work, Task(sources, context), executor, progress.advance)
        ranked = time.perf_counter()
        record = _Record(batches, task, journal, progress, follow)
        # Closed explicitly, so that an error here leaves no thread at work.
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
    """Do a part of a run whose journal, progress and end are in the hands of another process."""
    # The process that keeps the journal reports the progress.
    told = Silent().advance
    task = _with_thresholds([(plan, output)], Task(sources, context), executor, told)
    with closing(executor.run(enumerate(_batches([plan])), task)) as finished:
        for _ in finished:
            pass


def _batches(plans: Sequence[Plan]) -> list[Batch]:
    return list(zip(*(plan.items for plan in plans), strict=True))


def _with_thresholds(
    work: Sequence[tuple[Plan, Output]],
    task: Task,
    executor: Executor,
    advance: Callable[[str, int], None],
) -> Task:
    """Find the thresholds, and return the task of the merge."""

    def count(counted: Sequence[Batch], selections: Selections) -> Generator[Done]:
        return executor.run(enumerate(counted), replace(task, selections=selections))

    thresholds = find_thresholds([plan for plan, _ in work], count, advance)
    context = replace(task.context, thresholds=thresholds)
    return replace(task, context=context, outputs=[output for _, output in work])


class _Record:
    """The record of the finished items of all batches."""

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
        """Yield the unfinished batches; note the results of batches that an earlier run has finished."""
        total, passed = sum(map(read_together, self._batches)), 0
        for index, batch in enumerate(self._batches):
            earlier = list(map(self._finished, batch, self._outputs))
            if all(stats is not None for stats in earlier):
                for found, stats in zip(self._found, earlier, strict=True):
                    found[index] = stats or {}
                self._resumed.append(index)
            else:
                yield index, batch
            # The executor asks for the next batch after it has read this one.
            passed += read_together(batch)
            if self._follow is not None:
                self._follow(passed / max(1, total))

    def take(self, done: Done) -> None:
        """Note a finished item; a journal entry is written only after the item's bytes are."""
        self.tell_resumed()
        batch = self._batches[done.index]
        self._found[done.number][done.index] = done.stats
        self._done[done.number][done.index] = done
        if self._journal is not None:
            self._journal.append(Entry(*batch[done.number].key, done.checksum, done.stats))
        if done.number == len(batch) - 1:
            self._progress.advance(batch[0].tensor.name, moved_together(batch))

    def tell_resumed(self) -> None:
        """Report batches of an earlier run to `progress`; `unfinished` finds them in another thread."""
        while self._resumed:
            batch = self._batches[self._resumed.pop()]
            self._progress.advance(batch[0].tensor.name, moved_together(batch), resumed=True)

    def result(self, number: int, begun: float, seconds: float, ranking: Span) -> RunResult:
        """Return the result of plan `number`."""
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

    def _finished(self, item: WorkItem, output: Output) -> Mapping[str, Json] | None:
        """Return the statistics of a journaled item if its bytes still have their checksum, else None."""
        entry = self._journal and self._journal.finished.get(item.key)
        if entry is None or entry.checksum != output.read_back(item.places):
            return None
        return entry.stats


def _seconds(spans: Iterable[Span]) -> float:
    return sum(span.stop - span.start for span in spans)
