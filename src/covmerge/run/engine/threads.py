"""The executor of threads: one thread reads ahead, some compute, one writes behind."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from queue import Queue

import torch

from covmerge.base.memory import HeapTrimmer, give_back
from covmerge.base.threads import ThreadPool
from covmerge.plan.planning.forms import Result
from covmerge.run.engine.budget import Budget
from covmerge.run.engine.devices import naming_where_full
from covmerge.run.engine.executor import Batch, Done, Executor, Span, Task, held_together
from covmerge.run.engine.inputs import Inputs, read_inputs
from covmerge.run.engine.thread_count import use_threads
from covmerge.run.engine.transfer import Arrival, Transfer, goes_ahead
from covmerge.run.engine.worker import work


@dataclass(frozen=True)
class Threads(Executor):
    """An executor of threads, which end with every run.

    Attributes:
        in_flight: bytes of inputs read ahead and results not yet written, at least those of one
            item (see `plan_memory`).
        lanes: number of small items that are computed at once, on one core each.
        ahead: whether inputs go to the device while another item is computed (`engine.transfer`).
        kept_above: bytes that the process may hold before malloc has to return freed memory; None: any.
    """

    in_flight: int
    lanes: int
    ahead: bool = False
    kept_above: int | None = None

    def run(self, batches: Iterable[tuple[int, Batch]], task: Task) -> Generator[Done]:
        with self.running(batches, task) as finished:
            yield from finished

    def running(
        self,
        batches: Iterable[tuple[int, Batch]],
        task: Task,
        alone: AbstractContextManager[object] | None = None,
    ) -> AbstractContextManager[Iterator[Done]]:
        """Return a context with an iterator over the finished items; its end waits for the threads.

        The iterator raises errors before the block waits, because the reading thread may be waiting for a
        batch. `alone` is entered while an item is computed on all cores, because other processes would use
        the same cores; only one thread enters it.
        """
        return _Pipeline(batches, task, self, alone or nullcontext()).running()


@dataclass(frozen=True)
class _Read:
    """A batch with its inputs; `arrival` says when inputs that were sent ahead are on the device."""

    index: int
    batch: Batch
    inputs: Inputs
    span: Span
    arrival: Arrival | None = None


class _Pipeline:
    """Threads that read, compute and write, and the queues between them."""

    def __init__(
        self,
        batches: Iterable[tuple[int, Batch]],
        task: Task,
        how: Threads,
        alone: AbstractContextManager[object],
    ) -> None:
        self._batches = batches
        self._transfer = Transfer(task.context.device) if how.ahead else None
        self._trimmer = HeapTrimmer(how.kept_above)
        self._alone = alone
        self._task = task
        self._lanes = how.lanes
        self._threads = torch.get_num_threads()
        self._budget, self._free = Budget(how.in_flight), Budget(how.lanes)
        self._to_compute: Queue[list[_Read] | None] = Queue()
        self._to_write: Queue[tuple[int, int, Batch, Result, tuple[Span, ...]] | None] = Queue()
        self._done: Queue[Done | None] = Queue()
        self._errors: list[BaseException] = []

    @contextmanager
    def running(self) -> Generator[Iterator[Done]]:
        """Start a thread for each stage, and yield the finished items; end the threads after the block."""
        give_back()  # threads that have ended leave heaps that new threads do not use
        with ThreadPool(3, thread_name_prefix="covmerge") as pool:
            try:
                # Within the `try`: Ctrl-C may come while the threads start, and a thread that is
                # still in torch when Python exits aborts the process.
                for stage in (self._read, self._compute_all, self._write):
                    pool.submit(self._guarded, stage)
                yield self._finished()
            finally:
                self._stop()

    def _finished(self) -> Iterator[Done]:
        while (done := self._done.get()) is not None:
            yield done
        if self._errors:
            raise self._errors[0]

    def _stop(self) -> None:
        self._budget.close()
        self._free.close()
        self._to_compute.put(None)
        self._to_write.put(None)

    def _guarded(self, stage: Callable[[], None]) -> None:
        try:
            stage()
        except BaseException as error:
            self._failed(error)

    def _failed(self, error: BaseException) -> None:
        self._errors.append(error)
        self._stop()
        self._done.put(None)

    def _read(self) -> None:
        # Reading only converts and scales; a second thread of torch would wait on a core of the lanes.
        use_threads(1)
        for index, batch in self._batches:
            written = sum(item.write_bytes for item in batch)
            if not self._budget.acquire(held_together(batch) + written):
                return
            self._to_compute.put([self._read_one(index, batch)])
        self._to_compute.put(None)

    def _read_one(self, index: int, batch: Batch) -> _Read:
        arrival: Arrival | None = None
        with _span("read") as taken:
            inputs = read_inputs(batch, self._task.sources)
            if self._transfer is not None and goes_ahead(batch):
                with naming_where_full(batch[0], self._task.context.device):
                    inputs, arrival = self._transfer.send(inputs)
        return _Read(index, batch, inputs, taken[0], arrival)

    def _compute_all(self) -> None:
        use_threads(self._threads)
        with ThreadPool(
            self._lanes, "covmerge-lane", initializer=use_threads, initargs=(1,)
        ) as narrow:
            while not self._errors and (given := self._to_compute.get()) is not None:
                self._hand_out(given, narrow)
                del given
        self._to_write.put(None)

    def _hand_out(self, given: list[_Read], narrow: ThreadPool) -> None:
        """Compute a batch on one core, beside others, or alone on all cores.

        `given` holds one batch, which is taken out: the pool keeps its arguments until its next task, and
        would keep the inputs in memory.
        """
        batch = given[0].batch
        one_core = batch[0].is_narrow(self._task.context.device)
        cores = 1 if one_core else self._lanes
        if not self._free.acquire(cores):
            return
        if not one_core:
            with self._alone:
                self._compute(given.pop())
            self._finish(batch, cores)
            return

        def on_one_core() -> None:
            try:
                if not self._errors:
                    self._compute(given.pop())
            except BaseException as error:
                self._failed(error)
            finally:
                self._finish(batch, cores)

        narrow.submit(on_one_core)

    def _finish(self, batch: Batch, cores: int) -> None:
        self._trimmer.trim()  # before the budget lets more be read
        self._budget.release(held_together(batch))
        self._free.release(cores)

    def _compute(self, read: _Read) -> None:
        task, index, batch, reading = self._task, read.index, read.batch, read.span
        if read.arrival is not None:
            read.arrival.synchronize()
        results = work(batch, read.inputs, task.context, task.selections)
        del read  # only the work keeps the inputs now, so they end with it
        for number in range(len(batch)):
            with _span("compute") as taken:
                result = next(results)
            spans = (reading, *taken) if number == 0 else tuple(taken)
            self._to_write.put((index, number, batch, result, spans))
            del result

    def _write(self) -> None:
        while (given := self._to_write.get()) is not None:
            index, number, batch, result, spans = given
            item, checksum = batch[number], ""
            if self._task.outputs:
                with _span("write") as taken:
                    output = self._task.outputs[number]
                    checksum = output.write(item.places, result.tensors)
                spans = (*spans, *taken)
            self._done.put(Done(index, number, checksum, result.stats, spans))
            del given, result
            self._budget.release(item.write_bytes)
        self._done.put(None)


@contextmanager
def _span(stage: str) -> Generator[list[Span]]:
    """Measure the time of the block; the list that is yielded has its `Span` afterwards."""
    taken: list[Span] = []
    start = time.perf_counter()
    yield taken
    taken.append(Span(stage, threading.get_ident(), start, time.perf_counter()))
