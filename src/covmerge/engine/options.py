"""The options of one run: how it is done, and nothing that decides its result."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from covmerge.engine.budget import MemoryPlan, plan_memory
from covmerge.engine.executor import Executor
from covmerge.engine.processes import Opener, Processes
from covmerge.engine.progress import Progress, Silent
from covmerge.engine.threads import Threads
from covmerge.errors import InputError
from covmerge.plan import Plan
from covmerge.statistics import Progress as Collecting


@dataclass(frozen=True)
class RunOptions:
    """How a run is done.

    Attributes:
        device: where the mathematics runs.
        threads: CPU threads of the mathematics; None: torch's setting.
        workers: processes that share the work; 1: this one does it, in threads. They import the main
            script anew, which must merge under `if __name__ == "__main__":` then.
        max_memory: bytes that the process may take; None: what the machine has free.
        resume: go on with an interrupted run.
        overwrite: replace an output of covmerge.
        progress: called for every finished piece of work; None: nothing is.
        collecting: called for every batch that the base is run on, where its inputs are made first.
    """

    device: str = "cpu"
    threads: int | None = None
    workers: int = 1
    max_memory: int | None = None
    resume: bool = False
    overwrite: bool = False
    progress: Progress | None = None
    collecting: Collecting | None = None

    @property
    def torch_device(self) -> torch.device:
        """The device; see `usable_device`."""
        return usable_device(self.device)

    @property
    def shown_progress(self) -> Progress:
        """What is called for finished work; see `Silent`."""
        return self.progress or Silent()

    def memory(self, plans: Sequence[Plan], *, held: int = 0, shared: int = 0) -> MemoryPlan:
        """Divide the memory; see `plan_memory`."""
        return plan_memory(
            plans,
            self.max_memory,
            device=self.torch_device,
            threads=self.threads,
            workers=self.workers,
            held=held,
            shared=shared,
        )

    def executor(self, memory: MemoryPlan, opener: Callable[[], Opener]) -> Executor:
        """Return what carries the work out; `opener` says how other processes open the sources."""
        if memory.workers > 1:
            return Processes(memory.workers, opener())
        return Threads(in_flight=memory.in_flight, lanes=memory.lanes)


@contextmanager
def torch_threads(count: int | None) -> Generator[None]:
    """Give torch this many threads for a while; None leaves its setting."""
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def usable_device(name: str) -> torch.device:
    """Return a device that can hold a tensor here.

    Raises:
        InputError: it cannot.
    """
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"--device {name} cannot be used here: {reason}") from error
    return device
