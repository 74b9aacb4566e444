"""The pipeline: one thread reads ahead, one computes, one writes behind."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from queue import Queue
from typing import Protocol

import torch
from torch import Tensor

from covmerge.checkpoints import Checkpoint
from covmerge.engine.budget import Budget
from covmerge.engine.sinks import Sink
from covmerge.engine.worker import Inputs, compute, read_inputs
from covmerge.plan import Plan, WorkItem
from covmerge.types import Json


class Progress(Protocol):
    """Hears of the run's advance; called from one thread at a time."""

    def start(self, plan: Plan) -> None:
        """Work begins."""
        ...

    def advance(self, item: WorkItem, *, resumed: bool) -> None:
        """An item is written, or was found written by an earlier run."""
        ...

    def finish(self) -> None:
        """Work is over, in success or failure."""
        ...


@dataclass(frozen=True)
class RunStats:
    """What a run did: statistics per item, in plan order, and its cost."""

    items: tuple[Mapping[str, Json], ...]
    seconds: float
    read_seconds: float
    compute_seconds: float
    write_seconds: float
    resumed_items: int


class _Clock:
    """Adds up the time one stage spends working."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self._start


def run(
    plan: Plan,
    base: Checkpoint,
    experts: Mapping[str, Checkpoint],
    sink: Sink,
    *,
    in_flight: int,
    device: torch.device,
    progress: Progress,
) -> RunStats:
    """Carry out every item of the plan.

    Args:
        plan: the plan.
        base: the base checkpoint.
        experts: checkpoints by expert name.
        sink: where results go.
        in_flight: bytes of inputs read ahead and results not yet written, at least those of one
            item (see `plan_memory`).
        device: where the mathematics runs.
        progress: hears of every finished item.

    Raises:
        CovmergeError: as the stages raise; the first error stops all of them.
    """
    weights = {name: expert.weight for name, expert in plan.recipe.experts.items()}
    budget = Budget(in_flight)
    to_compute: Queue[tuple[int, WorkItem, Inputs] | None] = Queue()
    to_write: Queue[tuple[int, WorkItem, Tensor, dict[str, Json]] | None] = Queue()
    collected: dict[int, Mapping[str, Json]] = {}
    errors: list[BaseException] = []
    reading, computing, writing = _Clock(), _Clock(), _Clock()
    resumed = 0
    progress_lock = threading.Lock()

    def read() -> None:
        nonlocal resumed
        for index, item in enumerate(plan.items):
            with reading:
                earlier = sink.finished(item)
            if earlier is not None:
                collected[index] = earlier
                resumed += 1
                with progress_lock:
                    progress.advance(item, resumed=True)
                continue
            if not budget.acquire(item.read_bytes + item.write_bytes):
                return
            with reading:
                inputs = read_inputs(item, base, experts)
            to_compute.put((index, item, inputs))
            del inputs  # or the last item's inputs would outlive its turn

    def write() -> None:
        while (task := to_write.get()) is not None:
            index, item, rows, stats = task
            with writing:
                sink.write(item, rows, stats)
            del task, rows
            collected[index] = stats
            budget.release(item.write_bytes)
            with progress_lock:
                progress.advance(item, resumed=False)

    def guarded(stage: Callable[[], None]) -> None:
        try:
            stage()
        except BaseException as error:
            errors.append(error)
            budget.close()
        finally:
            # The computing loop must wake up, however a stage ended.
            to_compute.put(None)

    start = time.perf_counter()
    reader = threading.Thread(target=guarded, args=(read,), name="covmerge-read", daemon=True)
    writer = threading.Thread(target=guarded, args=(write,), name="covmerge-write", daemon=True)
    progress.start(plan)
    reader.start()
    writer.start()
    try:
        while not errors and (task := to_compute.get()) is not None:
            index, item, inputs = task
            del task
            with computing:
                rows, stats = compute(item, inputs, weights, plan.compute_dtype, device)
            del inputs
            budget.release(item.read_bytes)
            to_write.put((index, item, rows, stats))
            del rows
    finally:
        budget.close()
        to_write.put(None)
        reader.join()
        writer.join()
        progress.finish()
    if errors:
        raise errors[0]
    return RunStats(
        items=tuple(collected[index] for index in range(len(plan.items))),
        seconds=time.perf_counter() - start,
        read_seconds=reading.seconds,
        compute_seconds=computing.seconds,
        write_seconds=writing.seconds,
        resumed_items=resumed,
    )
