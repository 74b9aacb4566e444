"""The pipeline: one thread reads ahead, some compute, one writes behind."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from queue import Queue
from typing import Protocol

import torch

from covmerge.engine.budget import Budget, is_narrow, read_together
from covmerge.engine.inputs import Inputs, Sources, read_inputs
from covmerge.engine.sinks import Sink
from covmerge.engine.survey import run_surveys, survey_bytes
from covmerge.engine.worker import Context, Result, compute
from covmerge.plan import Plan, WorkItem
from covmerge.types import Json

# What is done with the rows of an item, or of one for each plan.
Worker = Callable[[Sequence[WorkItem], Inputs, Context], Iterator[Result]]


class Progress(Protocol):
    """Hears of the run's advance; called from one thread at a time."""

    def start(self, total: int) -> None:
        """Work begins: so many bytes will be read and written."""
        ...

    def advance(self, what: str, size: int, *, resumed: bool = False) -> None:
        """So many of them are done, or were found done by an earlier run; `what` was the last."""
        ...

    def finish(self) -> None:
        """Work is over, in success or failure."""
        ...


@dataclass(frozen=True)
class Span:
    """What one thread did for one item, in seconds from the start of the run."""

    stage: str
    thread: int
    start: float
    stop: float


@dataclass(frozen=True)
class RunStats:
    """What a run did by one plan: statistics per item, in plan order, and its cost.

    Reading and surveys serve all plans of a run; only `compute_seconds`, and those of the items, are
    this plan's own; where several items were computed at once, their seconds add up. An item that an
    earlier run finished has None. `spans` say when all of it happened.
    """

    items: tuple[Mapping[str, Json], ...]
    seconds: float
    survey_seconds: float
    read_seconds: float
    compute_seconds: float
    write_seconds: float
    resumed_items: int
    item_seconds: tuple[float | None, ...]
    spans: tuple[Span, ...] = ()


class _Clock:
    """When the threads of one stage were working."""

    def __init__(self, stage: str, begun: float) -> None:
        self.spans: list[Span] = []
        self._stage = stage
        self._begun = begun

    @property
    def seconds(self) -> float:
        """All of it, over all threads."""
        return sum(span.stop - span.start for span in self.spans)

    @contextmanager
    def running(self) -> Generator[None]:
        """Note what is done meanwhile."""
        start = time.perf_counter()
        try:
            yield
        finally:
            stop = time.perf_counter()
            begun = self._begun
            span = Span(self._stage, threading.get_ident(), start - begun, stop - begun)
            self.spans.append(span)


def run(
    work: Sequence[tuple[Plan, Sink]],
    sources: Sources,
    context: Context,
    *,
    in_flight: int,
    lanes: int,
    progress: Progress,
    follow: Callable[[float], None] | None = None,
    worker: Worker = compute,
) -> list[RunStats]:
    """Carry out every item of one or several plans, reading each tensor once for all of them.

    Args:
        work: each plan and where its results go; item by item the plans have the same rows
            (`covmerge.plan.build_plans`).
        sources: the checkpoints.
        context: what the work needs to know; the surveys' thresholds are found here.
        in_flight: bytes of inputs read ahead and results not yet written, at least those of one
            item (see `plan_memory`).
        lanes: small items that are computed at once, a core each (see `plan_memory`).
        progress: hears of every finished item.
        follow: hears after each reading what share of the sources has been read in the last pass.
        worker: what is done with each item.

    Raises:
        CovmergeError: as the stages raise; the first error stops all of them.
    """
    start = time.perf_counter()
    plans = [plan for plan, _ in work]
    together = list(zip(*(plan.items for plan in plans), strict=True))
    progress.start(survey_bytes(plans) + sum(map(_moved, together)))
    surveying = _Clock("survey", start)
    try:
        with surveying.running():
            thresholds = run_surveys(
                plans, sources, context, progress.advance, lanes=lanes, in_flight=in_flight
            )
        sinks = [sink for _, sink in work]
        informed = replace(context, thresholds=thresholds)
        pipeline = _Pipeline(together, sinks, sources, informed, worker, progress, follow, start)
        pipeline.run(in_flight, lanes)
    finally:
        progress.finish()
    return [
        RunStats(
            items=tuple(collected[index] for index in range(len(plans[0].items))),
            seconds=time.perf_counter() - start,
            survey_seconds=surveying.seconds,
            read_seconds=pipeline.reading.seconds,
            compute_seconds=computing.seconds,
            write_seconds=pipeline.writing.seconds,
            resumed_items=pipeline.resumed,
            item_seconds=tuple(seconds.get(index) for index in range(len(plans[0].items))),
            spans=(
                *surveying.spans,
                *pipeline.reading.spans,
                *computing.spans,
                *pipeline.writing.spans,
            ),
        )
        for collected, computing, seconds in zip(
            pipeline.collected, pipeline.computing, pipeline.item_seconds, strict=True
        )
    ]


def _moved(items: Sequence[WorkItem]) -> int:
    """Bytes read and written for the same rows by several plans."""
    return read_together(items) + sum(item.write_bytes for item in items)


class _Pipeline:
    """Threads that read, compute and write, and the queues between them."""

    def __init__(
        self,
        together: Sequence[tuple[WorkItem, ...]],
        sinks: Sequence[Sink],
        sources: Sources,
        context: Context,
        worker: Worker,
        progress: Progress,
        follow: Callable[[float], None] | None,
        begun: float,
    ) -> None:
        self._together = together
        self._sinks = sinks
        self._sources = sources
        self._context = context
        self._worker = worker
        self._progress = progress
        self._follow = follow
        self._progress_lock = threading.Lock()
        self._to_compute: Queue[tuple[int, Inputs] | None] = Queue()
        self._to_write: Queue[tuple[int, int, Result] | None] = Queue()
        self._errors: list[BaseException] = []
        self.reading, self.writing = _Clock("read", begun), _Clock("write", begun)
        self.computing = [_Clock("compute", begun) for _ in sinks]
        self.item_seconds: list[dict[int, float]] = [{} for _ in sinks]
        self.collected: list[dict[int, Mapping[str, Json]]] = [{} for _ in sinks]
        self.resumed = 0

    def run(self, in_flight: int, lanes: int) -> None:
        """Start reader and writer, hand out the work in this thread, wait for all."""
        budget, free = Budget(in_flight), Budget(lanes)
        with ThreadPoolExecutor(2, thread_name_prefix="covmerge") as pool:
            try:
                # Within the `try`: Ctrl-C may come while the threads start, and a thread that is
                # still in torch when Python exits aborts the process.
                for stage in (self._read, self._write):
                    pool.submit(self._guarded, stage, budget)
                with ThreadPoolExecutor(
                    lanes, "covmerge-lane", initializer=torch.set_num_threads, initargs=(1,)
                ) as narrow:
                    while not self._errors and (task := self._to_compute.get()) is not None:
                        self._hand_out(*task, narrow, budget, free, lanes)
                        del task
            finally:
                budget.close()
                self._to_write.put(None)
        if self._errors:
            raise self._errors[0]

    def _hand_out(
        self,
        index: int,
        inputs: Inputs,
        narrow: ThreadPoolExecutor,
        budget: Budget,
        free: Budget,
        lanes: int,
    ) -> None:
        """Compute an item on one core, beside others; or on all of them, alone."""
        one_core = is_narrow(self._together[index][0], self._context.device)
        free.acquire(1 if one_core else lanes)
        if not one_core:
            self._compute(index, inputs)
            budget.release(read_together(self._together[index]))
            free.release(lanes)
            return

        def on_one_core(held: list[Inputs]) -> None:
            try:
                if not self._errors:
                    self._compute(index, held.pop())
                    budget.release(read_together(self._together[index]))
            except BaseException as error:
                self._errors.append(error)
                budget.close()
                self._to_compute.put(None)
            finally:
                free.release(1)

        # In a list that is emptied: the pool would hold the inputs until it has another task.
        narrow.submit(on_one_core, [inputs])

    def _guarded(self, stage: Callable[[Budget], None], budget: Budget) -> None:
        try:
            stage(budget)
        except BaseException as error:
            self._errors.append(error)
            budget.close()
        finally:
            # The computing loop must wake up, however a stage ended.
            self._to_compute.put(None)

    def _read(self, budget: Budget) -> None:
        total, read = sum(map(read_together, self._together)), 0
        for index, items in enumerate(self._together):
            read += read_together(items)
            with self.reading.running():
                earlier = [
                    sink.finished(item) for sink, item in zip(self._sinks, items, strict=True)
                ]
            if all(stats is not None for stats in earlier):
                for collected, stats in zip(self.collected, earlier, strict=True):
                    collected[index] = stats or {}
                self.resumed += 1
                self._advance(items, resumed=True)
                continue
            if not budget.acquire(_moved(items)):
                return
            with self.reading.running():
                inputs = read_inputs(items, self._sources)
            if self._follow is not None:
                self._follow(read / max(1, total))
            self._to_compute.put((index, inputs))
            del inputs  # or the last item's inputs would outlive its turn

    def _compute(self, index: int, inputs: Inputs) -> None:
        results = self._worker(self._together[index], inputs, self._context)
        for number, clock in enumerate(self.computing):
            before = time.perf_counter()
            with clock.running():
                result = next(results)
            self.item_seconds[number][index] = time.perf_counter() - before
            self._to_write.put((index, number, result))
            del result

    def _write(self, budget: Budget) -> None:
        while (task := self._to_write.get()) is not None:
            index, number, result = task
            items = self._together[index]
            item = items[number]
            with self.writing.running():
                self._sinks[number].write(item, result)
            self.collected[number][index] = result.stats
            del task, result
            budget.release(item.write_bytes)
            if number == len(self._sinks) - 1:
                self._advance(items, resumed=False)

    def _advance(self, items: Sequence[WorkItem], *, resumed: bool) -> None:
        with self._progress_lock:
            self._progress.advance(items[0].tensor.name, _moved(items), resumed=resumed)
