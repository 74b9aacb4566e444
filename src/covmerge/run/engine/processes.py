"""The executor of processes: each process opens the sources and does its share of the work in threads."""

from __future__ import annotations

import os
import pickle
import signal
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from shutil import rmtree
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Any

import torch
from filelock import FileLock

from covmerge.base.errors import InputError, ResourceError
from covmerge.base.settings import Caller, Hint, caller_now, hints_for
from covmerge.base.types import Json
from covmerge.files.checkpoints.base import Checkpoint
from covmerge.run.engine.devices import usable_device
from covmerge.run.engine.executor import (
    Batch,
    Done,
    Executor,
    Opener,
    Task,
    largest_first,
    moved_together,
    portable,
)
from covmerge.run.engine.hashing import WeightsCheck
from covmerge.run.engine.inputs import Sources
from covmerge.run.engine.outputs import in_memory
from covmerge.run.engine.thread_count import use_threads
from covmerge.run.engine.threads import Threads

# A batch and its number.
_Load = tuple[int, Batch]

_SPAWN = get_context("spawn")  # a fork of a process with threads may hang
# Bytes of batches that are searched ahead for the largest. The hashes of the sources follow the batches
# taken so far (`InStep`), in the order of the files. They may be this far ahead of the reader and no
# further, so that each finds in the page cache the bytes that the other has read.
_LOOK_AHEAD = 2 * 2**30


class Processes(Executor):
    """An executor of processes, which start with the first work and live until it is closed.

    Every item is computed with as many threads as the executor of threads uses, so that the bytes of
    the output are the same. There is one process for each device. It opens the sources by `opener`, which
    is pickled, and works by the executor `inner`. It has `hands` batches at once; with two, one is read
    while the other is computed.
    """

    def __init__(
        self, devices: Sequence[torch.device], opener: Opener, inner: Threads, *, hands: int = 1
    ) -> None:
        self._devices = devices
        self._opener = opener
        self._inner = inner
        self._hands = hands
        self._threads = 1
        self._workers: list[_Worker] = []
        self._folder = TemporaryDirectory(prefix="covmerge-")
        self._alone = Path(self._folder.name) / "alone"

    def run(self, batches: Iterable[tuple[int, Batch]], task: Task) -> Generator[Done]:
        """See `Executor.run`. Batches that a process had not finished when it died are done again.

        Raises:
            ResourceError: two processes died over one batch, or while they sent their counters.
            InputError: a process could not start, or the output is in memory.
        """
        if in_memory(task.outputs):
            raise InputError(
                f"a merge in memory cannot be shared by processes: leave out {Hint('workers')}"
            )
        ordered = largest_first(batches, _size, within=_LOOK_AHEAD)
        stage = _Stage(ordered, replace(task, sources=Sources({})))
        self._threads = torch.get_num_threads()
        for device in self._devices[len(self._workers) :]:
            self._workers.append(self._start(device))
        try:
            for _ in range(self._hands):  # so that no process has two batches before each has one
                for worker in self._workers:
                    worker.give(stage)
            while any(worker.loads for worker in self._workers):
                for worker in self._ready():
                    yield from self._take(worker, stage)
                if not any(worker.loads for worker in self._workers):
                    self._collect(stage)
        except BaseException:
            self.close()  # the work in progress is of no use any more
            raise
        for counts in stage.counts:
            assert task.selections is not None
            # Only after all processes have ended: a new process starts with a copy of the selections.
            task.selections.absorb_counted(memoryview(counts))

    def read_files(
        self, sizes: Mapping[str, int], file_check: WeightsCheck, base: Checkpoint
    ) -> Mapping[str, Json]:
        """See `Executor.read_files`. End the other processes, which are done, and read in this one."""
        self.close()
        return super().read_files(sizes, file_check, base)

    def close(self) -> None:
        """End the processes."""
        for worker in self._workers:
            worker.stop()
        self._workers = []
        self._folder.cleanup()

    def _ready(self) -> list[_Worker]:
        busy = [worker for worker in self._workers if worker.loads]
        ready = wait([worker.connection for worker in busy])
        return [worker for worker in busy if worker.connection in ready]

    def _take(self, worker: _Worker, stage: _Stage) -> Iterator[Done]:
        """Yield an item that a process has finished; after the last of a batch, give it a new batch."""
        try:
            done: Done = worker.receive()
        except (EOFError, ConnectionError, pickle.UnpicklingError):
            self._replace(worker, stage)
            return
        worker.answered = True
        index, batch = worker.loads[0]
        if (done.index, done.number) == (index, len(batch) - 1):
            worker.ended.append(worker.loads.popleft())
            worker.give(stage)
        if (done.index, done.number) not in stage.handed_on:
            stage.handed_on.add((done.index, done.number))
            yield done

    def _collect(self, stage: _Stage) -> None:
        """End the stage in the processes, and take their counters.

        If a process has died, its batches are counted again.
        """
        for worker in list(self._workers):
            try:
                worker.end(stage)
            except (EOFError, ConnectionError, pickle.UnpicklingError):
                self._replace(worker, stage)

    def _replace(self, dead: _Worker, stage: _Stage) -> None:
        """Replace a dead process by a new one, which first does the batches that the dead one had."""
        dead.process.join()
        if not dead.answered and (dead.process.exitcode or 0) > 0:
            raise InputError(
                f"a worker process could not start ({_ended(dead.process)}; its own message is above). "
                "Each imports the main script anew, so a script that merges with workers, which is a "
                "file, does it under `if __name__ == '__main__':`; or leave out the workers"
            )
        if dead.loads:
            index, batch = dead.loads[0]
            if index in stage.retried:  # it was retried alone, unless counters were lost since
                raise ResourceError(
                    f"two worker processes ended over '{batch[0].tensor.name}' (the last by "
                    f"{_ended(dead.process)}): is the memory used up? Take fewer {Hint('workers')}"
                )
            stage.retried.update(load[0] for load in dead.loads)
        elif stage.lost_counts:
            raise ResourceError(
                f"two worker processes ended while they handed over what they had counted (the last by "
                f"{_ended(dead.process)}): is the memory used up? Take fewer {Hint('workers')}"
            )
        else:
            stage.lost_counts = True
        if stage.task.selections is not None:
            stage.again.extend(dead.ended)  # its counters are gone
        place = self._workers.index(dead)
        dead.stop()
        self._workers[place] = worker = self._start(dead.device)
        # Any of these batches may have killed the process. Each is done alone, so that a second death shows
        # which. A process that is given one batch at first has one at a time until the stage ends.
        worker.left = dead.loads
        worker.give(stage)

    def _start(self, device: torch.device) -> _Worker:
        ours, theirs = _SPAWN.Pipe()
        alone, caller = str(self._alone), caller_now()
        given = (theirs, self._opener, device, self._threads, alone, self._inner, caller)
        process = _SPAWN.Process(target=_serve, args=given, daemon=True)
        process.start()
        theirs.close()  # so that the pipe ends when the process ends
        return _Worker(process, ours, device)


@dataclass
class _Stage:
    """The state of one run over batches that the processes share.

    Attributes:
        loads: batches that no process has begun.
        task: the task without its sources, which every process opens itself.
        lost_counts: whether a process has died while it sent its counters.
        again: batches to count again, because the process that had counted them died.
        retried: indices of the batches that a process had when it died.
        handed_on: items already yielded, as (index of the batch, place in the batch).
        counts: the counters of each process, as bytes.
    """

    loads: Iterator[_Load]
    task: Task
    lost_counts: bool = False
    again: deque[_Load] = field(default_factory=deque[_Load])
    retried: set[int] = field(default_factory=set[int])
    handed_on: set[tuple[int, int]] = field(default_factory=set[tuple[int, int]])
    counts: list[bytes] = field(default_factory=list[bytes])

    def next(self) -> _Load | None:
        """Return the next batch; None: no batch is left."""
        return self.again.popleft() if self.again else next(self.loads, None)


@dataclass
class _Worker:
    """A worker process and its batches.

    Attributes:
        left: batches of a dead process that this one does first.
        loads: batches that the process has, in the order in which it does them.
        ended: batches of the current stage that the process has finished.
        answered: whether the process has ever finished an item.
    """

    process: BaseProcess
    connection: Connection[Any, Any]
    device: torch.device
    left: deque[_Load] = field(default_factory=deque[_Load])
    loads: deque[_Load] = field(default_factory=deque[_Load])
    ended: list[_Load] = field(default_factory=list[_Load])
    answered: bool = False

    def give(self, stage: _Stage) -> None:
        """Send the next batch, if one is left; before the first batch of a stage, send the task."""
        load = self.left.popleft() if self.left else stage.next()
        if load is None:
            return
        if not self.loads and not self.ended:
            self._send(stage.task)
        self.loads.append(load)
        self._send(load)

    def receive(self) -> Any:
        """Return the next message of the process; raise it if it is an error."""
        answer = self.connection.recv()
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def end(self, stage: _Stage) -> None:
        """End the stage in the process, if it has done a batch, and add its counters to the stage."""
        if self.ended:
            self._send(None)
            if stage.task.selections is not None:
                stage.counts.append(self.receive())
            self.ended = []

    def stop(self) -> None:
        """Kill the process and close the connection."""
        self.process.kill()
        self.process.join()
        self.connection.close()

    def _send(self, message: object) -> None:
        # A process that has died is noticed when its answer is read.
        with suppress(BrokenPipeError, ConnectionError):
            self.connection.send(message)


def _size(load: _Load) -> int:
    return moved_together(load[1])


def _ended(process: BaseProcess) -> str:
    code = process.exitcode or 0
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _serve(
    connection: Connection[Any, Any],
    opener: Opener,
    device: torch.device,
    threads: int,
    alone: str,
    inner: Threads,
    caller: Caller,
) -> None:
    """Do the work of a worker process until its parent kills it or is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C, the parent ends the run
    if (parent := parent_process()) is not None:
        Thread(target=_end_with, args=(parent, Path(alone).parent), daemon=True).start()
    on_cpu = device.type == "cpu"
    use_threads(threads if on_cpu else 1)
    # A lock of the operating system, which frees it when the process is killed.
    lock = FileLock(alone) if on_cpu else nullcontext()
    try:
        usable_device(str(device))
        with hints_for(caller), opener() as sources:
            while True:
                task: Task = connection.recv()
                context = replace(task.context, device=device)
                task = replace(task, sources=sources, context=context)
                _work(connection, inner, task, lock)
    except EOFError:
        return
    except BaseException as error:
        _tell(connection, error)


def _end_with(parent: BaseProcess, folder: Path) -> None:
    """End this process when its parent is killed, so that it writes nothing into a later merge's files.

    The parent's temporary folder is removed, as the parent no longer can.
    """
    parent.join()
    rmtree(folder, ignore_errors=True)
    os._exit(1)


def _work(
    connection: Connection[Any, Any],
    inner: Threads,
    task: Task,
    alone: AbstractContextManager[object],
) -> None:
    """Do the batches of one stage that the parent sends, then send the counters."""
    loads: Iterator[_Load] = iter(connection.recv, None)
    with inner.running(loads, task, alone) as finished:
        try:
            for done in finished:
                connection.send(done)
        except BaseException as error:
            # Sent at once: the block would wait for the reading thread, which waits for its next batch. The
            # parent kills this process when it gets the error.
            _tell(connection, error)
            raise
    if task.selections is not None:
        connection.send(task.selections.counted())


def _tell(connection: Connection[Any, Any], error: BaseException) -> None:
    with suppress(ConnectionError):  # the parent is gone, and that is the error
        connection.send(portable(error))
