"""One batch from its operands to its bytes, in a process that does one after the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from covmerge.base.errors import CheckpointError
from covmerge.run.engine.executor import Batch, Done, Span, Task
from covmerge.run.engine.inputs import read_inputs
from covmerge.run.engine.thread_count import use_threads
from covmerge.run.engine.worker import work

_LOOKS = 25  # how often bytes that another machine wrote are read


def serve(index: int, batch: Batch, task: Task, threads: int) -> Iterator[Done]:
    """Read the operands of a batch, do its work, and write what becomes of them.

    It computes with the number of threads that the executor of threads gives it, so that the bytes are
    the same.

    Args:
        index: of the batch.
        batch: its items.
        task: what they need.
        threads: of an item that takes all cores.

    Raises:
        CovmergeError: as the stages raise.
    """
    use_threads(cores_of(batch, task, threads))
    start = time.perf_counter()
    inputs = read_inputs(batch, task.sources)
    spans = [("read", start, time.perf_counter())]
    results = work(batch, inputs, task.context, task.selections)
    for number, item in enumerate(batch):
        start = time.perf_counter()
        result = next(results)
        spans.append(("compute", start, time.perf_counter()))
        checksum = ""
        if task.outputs:
            checksum = task.outputs[number].write(item.places, result.tensors)
            spans.append(("write", spans[-1][2], time.perf_counter()))
        taken = tuple(Span(stage, id(task), begun, ended) for stage, begun, ended in spans)
        yield Done(index, number, checksum, result.stats, taken)
        spans = []


def cores_of(batch: Batch, task: Task, threads: int) -> int:
    """How many threads compute a batch: one, beside others or a GPU, or all, alone."""
    device = task.context.device
    return 1 if device.type != "cpu" or batch[0].is_narrow(device) else threads


def check_there(done: Done, batch: Batch, task: Task, who: str, wait: Callable[[], object]) -> None:
    """Read what another machine has written; a network's file system may take its time to show it.

    Raises:
        CheckpointError: what is there is something else.
    """
    if not task.outputs:
        return
    item = batch[done.number]
    for _ in range(_LOOKS):
        if task.outputs[done.number].read_back(item.places) == done.checksum:
            return
        wait()
    raise CheckpointError(
        f"{who} has written '{item.tensor.name}', and what is read of it here is something else: is the "
        "output on a folder that all machines share, whose file system shows one what another has written?"
    )
