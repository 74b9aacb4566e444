"""The executor of processes: each opens the sources for itself, and writes what it has done."""

from __future__ import annotations

import pickle
import signal
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import torch
from filelock import FileLock

from covmerge.checkpoints import Checkpoint
from covmerge.engine.devices import usable_device
from covmerge.engine.executor import Batch, Done, Task, moved_together
from covmerge.engine.hashing import Contents, Hashing, InStep
from covmerge.engine.inputs import Sources
from covmerge.engine.lots import Lot
from covmerge.engine.order import largest_first
from covmerge.engine.portable import portable
from covmerge.engine.reading import FileLook, read_files
from covmerge.engine.serving import serve
from covmerge.errors import InputError, ResourceError
from covmerge.memory import Kept
from covmerge.types import Json

# What opens the sources of a run in another process.
Opener = Callable[[], AbstractContextManager[Sources]]

_SPAWN = get_context("spawn")  # a fork of a process with threads may hang
# How far ahead the largest item is looked for. Hashes of the sources follow what has been looked at
# (`InStep`), in the order of the files: they may be as far ahead of the reader, and no further, so that
# each finds in the page cache what the other has read.
_LOOK_AHEAD = 2 * 2**30


class Processes:
    """An executor. The processes start with the first work, and live until it is closed.

    Every item is computed with the number of threads that the executor of threads gives it, so that
    the bytes are the same.

    Args:
        devices: where each of them computes; as many as there are to be.
        opener: opens the sources; it is pickled.
        kept_above: bytes that each may hold before malloc has to give back what it keeps.
    """

    lots: Sequence[Lot] = ()  # see `Executor.lots`: every batch goes by itself

    def __init__(
        self, devices: Sequence[torch.device], opener: Opener, *, kept_above: int | None = None
    ) -> None:
        self._devices = devices
        self._opener = opener
        self._kept_above = kept_above
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
            raise InputError("a merge in memory cannot be shared by processes: leave out --workers")
        ordered = largest_first(batches, _size, within=_LOOK_AHEAD)
        stage = _Stage(ordered, replace(task, sources=Sources({})))
        self._threads = torch.get_num_threads()
        for device in self._devices[len(self._workers) :]:
            self._workers.append(self._start(device))
        try:
            for worker in self._workers:
                worker.begin(stage)
            while any(worker.batch is not None for worker in self._workers):
                for worker in self._ready():
                    yield from self._take(worker, stage)
                if not any(worker.batch is not None for worker in self._workers):
                    self._collect(stage)
        except BaseException:
            self.close()  # whatever the processes are at is of no use any more
            raise
        for counts in stage.counts:
            assert task.selections is not None
            # Not before all have ended: a process starts with what is there.
            task.selections.absorb_counted(memoryview(counts))

    def hashing(self, contents: Contents) -> Hashing:
        """See `Executor.hashing`: here, as hashes of one machine need threads and no processes."""
        return InStep(contents)

    def read_files(
        self, sizes: Mapping[str, int], look: FileLook, base: Checkpoint
    ) -> Mapping[str, Json]:
        """See `Executor.read_files`: by this process; the others have done all that there is for them."""
        self.close()
        return read_files(sizes, look, base)

    def close(self) -> None:
        """End the processes."""
        for worker in self._workers:
            worker.stop()
        self._workers = []
        self._folder.cleanup()

    def _ready(self) -> list[_Worker]:
        busy = [worker for worker in self._workers if worker.batch is not None]
        ready = wait([worker.connection for worker in busy])
        return [worker for worker in busy if worker.connection in ready]

    def _take(self, worker: _Worker, stage: _Stage) -> Iterator[Done]:
        """Hand on what a process has done, and give it more."""
        try:
            answer: list[Done] | BaseException = worker.connection.recv()
        except (EOFError, ConnectionError, pickle.UnpicklingError):
            self._replace(worker, stage)
            return
        if isinstance(answer, BaseException):
            raise answer
        assert worker.batch is not None
        worker.answered = True
        index, batch = worker.batch
        worker.counted.append((index, batch))
        first_time = index not in stage.seen
        stage.seen.add(index)
        worker.give(stage)
        if first_time:
            yield from answer

    def _collect(self, stage: _Stage) -> None:
        """Take over what the processes have counted; what one had that died is counted again."""
        for worker in list(self._workers):
            try:
                worker.hand_over(stage)
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
        if dead.batch is not None:
            index, batch = dead.batch
            if index in stage.retried:
                raise ResourceError(
                    f"two worker processes ended over '{batch[0].tensor.name}' (the last by "
                    f"{_ended(dead.process)}): is the memory used up? Take fewer --workers"
                )
            stage.retried.add(index)
            stage.again.append((index, batch))
        elif stage.lost_counts:
            raise ResourceError(
                f"two worker processes ended while they handed over what they had counted (the last by "
                f"{_ended(dead.process)}): is the memory used up? Take fewer --workers"
            )
        else:
            stage.lost_counts = True
        if stage.task.selections is not None:
            stage.again.extend(dead.counted)  # its counters are gone
        place = self._workers.index(dead)
        dead.stop()
        self._workers[place] = self._start(dead.device)
        self._workers[place].begin(stage)

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
                self._kept_above,
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
        batches: those that nobody has begun.
        task: without sources, which every process opens for itself.
        lost_counts: whether one died as it handed over what it had counted.
        again: what a process had when it died.
        retried: the batches during which one died.
        seen: the batches that have been handed on.
        counts: what the processes have counted, one by one.
    """

    batches: Iterator[tuple[int, Batch]]
    task: Task
    lost_counts: bool = False
    again: deque[tuple[int, Batch]] = field(default_factory=deque[tuple[int, Batch]])
    retried: set[int] = field(default_factory=set[int])
    seen: set[int] = field(default_factory=set[int])
    counts: list[bytes] = field(default_factory=list[bytes])

    def next(self) -> tuple[int, Batch] | None:
        """Return what is to be done next; None: nothing."""
        return self.again.popleft() if self.again else next(self.batches, None)


@dataclass
class _Worker:
    """A process, and what it is doing.

    Attributes:
        process: itself.
        connection: to it.
        device: where it computes.
        batch: what it was given last; None: it has nothing to do.
        counted: what its counters have of this stage.
        answered: whether it has ever done anything.
    """

    process: BaseProcess
    connection: Connection[Any, Any]
    device: torch.device
    batch: tuple[int, Batch] | None = None
    counted: list[tuple[int, Batch]] = field(default_factory=list[tuple[int, Batch]])
    answered: bool = False

    def begin(self, stage: _Stage) -> None:
        """Tell it of a stage, and give it the first batch."""
        self.counted = []
        self._send(stage.task)
        self.give(stage)

    def give(self, stage: _Stage) -> None:
        """Give it the next batch, if there is one."""
        self.batch = stage.next()
        if self.batch is not None:
            self._send(self.batch)

    def hand_over(self, stage: _Stage) -> None:
        """Give what it has counted to the stage."""
        if stage.task.selections is not None and self.counted:
            self._send(None)
            stage.counts.append(self.connection.recv())
            self.counted = []

    def stop(self) -> None:
        """End it."""
        self.process.kill()
        self.process.join()
        self.connection.close()

    def _send(self, message: object) -> None:
        # One that has died is noticed when it should answer.
        with suppress(BrokenPipeError, ConnectionError):
            self.connection.send(message)


def _size(numbered: tuple[int, Batch]) -> int:
    return moved_together(numbered[1])


def _ended(process: BaseProcess) -> str:
    code = process.exitcode or 0
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _serve(
    connection: Connection[Any, Any],
    opener: Opener,
    device: torch.device,
    threads: int,
    alone: str,
    kept_above: int | None,
) -> None:
    """What a worker process does until the run is over, or its parent is gone."""
    kept = Kept(kept_above)
    lock = FileLock(alone)  # of the system: it ends with a process that is killed
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the run is ended by its parent
    task: Task | None = None
    try:
        usable_device(str(device))
        with opener() as sources:
            while True:
                message = connection.recv()
                if isinstance(message, Task):
                    context = replace(message.context, device=device)
                    task = replace(message, sources=sources, context=context)
                    continue
                assert task is not None
                if message is None:
                    assert task.selections is not None
                    connection.send(task.selections.counted())
                    continue
                index, batch = cast("tuple[int, Batch]", message)
                connection.send(list(serve(index, batch, task, threads, lock)))
                kept.look()
    except EOFError:
        return
    except BaseException as error:
        with suppress(ConnectionError):  # the parent is gone, and that is the error
            connection.send(portable(error))
