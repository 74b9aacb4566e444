"""The executor of processes: each opens the sources for itself, and does its share in threads."""

from __future__ import annotations

import pickle
import signal
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
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
from covmerge.run.engine.hashing import FileCheck
from covmerge.run.engine.inputs import Sources
from covmerge.run.engine.thread_count import use_threads
from covmerge.run.engine.threads import Threads

# A batch and its number.
_Load = tuple[int, Batch]

_SPAWN = get_context("spawn")  # a fork of a process with threads may hang
# How far ahead the largest item is looked for. Hashes of the sources follow what has been looked at
# (`InStep`), in the order of the files: they may be as far ahead of the reader, and no further, so that
# each finds in the page cache what the other has read.
_LOOK_AHEAD = 2 * 2**30


class Processes(Executor):
    """An executor. The processes start with the first work, and live until it is closed.

    Every item is computed with the number of threads that the executor of threads gives it, so that
    the bytes are the same.

    Args:
        devices: where each of them computes; as many as there are to be.
        opener: opens the sources; it is pickled.
        inner: does the work of each.
        hands: batches that each has at once: with two, one is read while the other is computed.
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
        """See `Executor.run`. What a process that died had not handed over is done once more.

        Raises:
            ResourceError: two processes died over one batch.
            InputError: a process could not start.
        """
        if task.outputs and not all(output.in_files for output in task.outputs):
            raise InputError(
                f"a merge in memory cannot be shared by processes: leave out {Hint('workers')}"
            )
        ordered = largest_first(batches, _size, within=_LOOK_AHEAD)
        stage = _Stage(ordered, replace(task, sources=Sources({})))
        self._threads = torch.get_num_threads()
        for device in self._devices[len(self._workers) :]:
            self._workers.append(self._start(device))
        try:
            for _ in range(self._hands):  # so that none has two before each has one
                for worker in self._workers:
                    worker.give(stage)
            while any(worker.loads for worker in self._workers):
                for worker in self._ready():
                    yield from self._take(worker, stage)
                if not any(worker.loads for worker in self._workers):
                    self._collect(stage)
        except BaseException:
            self.close()  # whatever the processes are at is of no use any more
            raise
        for counts in stage.counts:
            assert task.selections is not None
            # Not before all have ended: a process starts with what is there.
            task.selections.absorb_counted(memoryview(counts))

    def read_files(
        self, sizes: Mapping[str, int], file_check: FileCheck, base: Checkpoint
    ) -> Mapping[str, Json]:
        """See `Executor.read_files`: by this process; the others have done all that there is for them."""
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
        """Hand on what a process has done, and give it more."""
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
        """Tell the processes that this was all, and take over what they have counted.

        What one had that died is counted again.
        """
        for worker in list(self._workers):
            try:
                worker.end(stage)
            except (EOFError, ConnectionError, pickle.UnpicklingError):
                self._replace(worker, stage)

    def _replace(self, dead: _Worker, stage: _Stage) -> None:
        """Start another process in the place of one that died."""
        dead.process.join()
        if not dead.answered and (dead.process.exitcode or 0) > 0:
            raise InputError(
                f"a worker process could not start ({_ended(dead.process)}; its own message is above). "
                "Each imports the main script anew, so a script that merges with workers, which is a "
                "file, does it under `if __name__ == '__main__':`; or leave out the workers"
            )
        if dead.loads:
            index, batch = dead.loads[0]
            if index in stage.retried:  # by itself, unless what it had counted was lost since
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
        # Whichever of these it died over: each is done by itself, so that a second death tells. Who was
        # given one load at first has one at a time until the stage ends.
        worker.left = dead.loads
        worker.give(stage)

    def _start(self, device: torch.device) -> _Worker:
        ours, theirs = _SPAWN.Pipe()
        process = _SPAWN.Process(
            target=_serve,
            args=(
                theirs,
                self._opener,
                device,
                self._threads,
                str(self._alone),
                self._inner,
                caller_now(),
            ),
            daemon=True,
        )
        process.start()
        theirs.close()  # so that the end of the process is the end of the pipe
        return _Worker(process, ours, device)


@dataclass
class _Stage:
    """One run over batches, as the processes share it.

    Attributes:
        loads: those that nobody has begun.
        task: without sources, which every process opens for itself.
        lost_counts: whether one died as it handed over what it had counted.
        again: what a process had counted when it died.
        retried: the loads, by their index, that one had in hand when it died.
        handed_on: what has been handed on, as index and place in the batch.
        counts: what the processes have counted, one by one.
    """

    loads: Iterator[_Load]
    task: Task
    lost_counts: bool = False
    again: deque[_Load] = field(default_factory=deque[_Load])
    retried: set[int] = field(default_factory=set[int])
    handed_on: set[tuple[int, int]] = field(default_factory=set[tuple[int, int]])
    counts: list[bytes] = field(default_factory=list[bytes])

    def next(self) -> _Load | None:
        """Return what is to be done next; None: nothing."""
        return self.again.popleft() if self.again else next(self.loads, None)


@dataclass
class _Worker:
    """A process, and what it is doing.

    Attributes:
        process: itself.
        connection: to it.
        device: where it computes.
        left: what it is to do first, of one that died.
        loads: what it has in hand; it does one after the other.
        ended: what it has done of the stage that was sent to it.
        answered: whether it has ever done anything.
    """

    process: BaseProcess
    connection: Connection[Any, Any]
    device: torch.device
    left: deque[_Load] = field(default_factory=deque[_Load])
    loads: deque[_Load] = field(default_factory=deque[_Load])
    ended: list[_Load] = field(default_factory=list[_Load])
    answered: bool = False

    def give(self, stage: _Stage) -> None:
        """Give it what is to be done next, if there is anything; before the first, tell it of the stage."""
        load = self.left.popleft() if self.left else stage.next()
        if load is None:
            return
        if not self.loads and not self.ended:
            self._send(stage.task)
        self.loads.append(load)
        self._send(load)

    def receive(self) -> Any:
        """Return what it sends, or raise it: an error."""
        answer = self.connection.recv()
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def end(self, stage: _Stage) -> None:
        """End a stage that was sent to it, and give what it has counted to that."""
        if self.ended:
            self._send(None)
            if stage.task.selections is not None:
                stage.counts.append(self.receive())
            self.ended = []

    def stop(self) -> None:
        """End it."""
        self.process.kill()
        self.process.join()
        self.connection.close()

    def _send(self, message: object) -> None:
        # One that has died is noticed when it should answer.
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
    """What a worker process does until the run is over, or its parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the run is ended by its parent
    on_cpu = device.type == "cpu"
    use_threads(threads if on_cpu else 1)
    # Of the system: it ends with a process that is killed.
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


def _work(
    connection: Connection[Any, Any],
    inner: Threads,
    task: Task,
    alone: AbstractContextManager[object],
) -> None:
    """Do what is given of one stage, and hand over what was counted."""
    loads: Iterator[_Load] = iter(connection.recv, None)
    with inner.running(loads, task, alone) as finished:
        try:
            for done in finished:
                connection.send(done)
        except BaseException as error:
            # At once: the block ends with the thread that reads, and that waits for its next load. The
            # parent, once told, ends this process.
            _tell(connection, error)
            raise
    if task.selections is not None:
        connection.send(task.selections.counted())


def _tell(connection: Connection[Any, Any], error: BaseException) -> None:
    with suppress(ConnectionError):  # the parent is gone, and that is the error
        connection.send(portable(error))
