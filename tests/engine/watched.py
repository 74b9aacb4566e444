"""Rows that go to a device late, and worker processes that note what they do.

Apart from the tests, as the processes import it: it needs little beside covmerge.
"""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from covmerge.plan.planning.operations import Count
from covmerge.run.engine import threads
from covmerge.run.engine.processes import Opener
from covmerge.run.engine.transfer import Transfer

SMALL = 1000  # bytes of a buffer: a matrix takes some, and the last piece does not fill one


class Mark:
    """When all that a late stream was given before is done."""

    task = None

    def synchronize(self):
        if self.task is not None:
            self.task.result()


class Late(Transfer):
    """As a GPU has it: copies are done in order, by another thread, some time after they were begun."""

    def __init__(self, device, size=SMALL):
        self.stream = ThreadPoolExecutor(1)
        self.pieces = 0
        super().__init__(device, size)

    def _arrival(self):
        return Mark()

    def _begin(self, target, host):
        def copy():
            time.sleep(1e-3)
            target.copy_(host)

        self.pieces += 1
        self.stream.submit(copy)

    def _recorded(self, arrival):
        arrival.task = self.stream.submit(int)
        return arrival


class Noted(Late):
    """Leaves a file for every tensor that it has sent."""

    folder = Path()

    def __init__(self, device):
        super().__init__(device, SMALL)

    def send(self, inputs):
        sent = super().send(inputs)
        note(self.folder, f"sent-{self.pieces}")
        return sent


def note(folder, what):
    (folder / f"{os.getpid()}-{what}").touch()


def noted(folder, what):
    """Which processes have noted it."""
    return {path.name.partition("-")[0] for path in folder.glob(f"*-{what}")}


@dataclass
class Watched:
    """Opens the sources in a worker process, and has that note what it does.

    Attributes:
        opener: opens them.
        folder: for notes.
        waits: the first load of each process is computed when a second has been read.
        dies: the name of a tensor over which it dies.
        at: the stage in which it does so.
        counting: in a pass before the merge.
        times: how often, of all processes.
    """

    opener: Opener
    folder: Path
    waits: bool = False
    dies: str = ""
    at: str = "compute"
    counting: bool = False
    times: int = 1

    @contextmanager
    def __call__(self):
        Noted.folder, threads.Transfer = self.folder, Noted
        read, work = threads.read_inputs, threads.work
        seen = {"read": 0, "computed": 0}

        def reading(items, sources):
            self.die("read", items)
            inputs = read(items, sources)
            seen["read"] += 1
            return inputs

        def working(items, *given):
            self.die("compute", items)
            until = time.monotonic() + 300
            while self.waits and not seen["computed"] and seen["read"] < 2:
                assert time.monotonic() < until
                time.sleep(0.001)
            seen["computed"] += 1
            yield from work(items, *given)

        threads.read_inputs, threads.work = reading, working
        with self.opener() as sources:
            yield sources

    def die(self, at, items):
        tensor = items[0].tensor
        counting = isinstance(tensor.operation, Count)
        if (at, tensor.name, counting) != (self.at, self.dies, self.counting):
            return
        if len(list(self.folder.glob("*-died"))) < self.times:
            note(self.folder, "died")
            os.kill(os.getpid(), signal.SIGKILL)
