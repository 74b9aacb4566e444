"""The options of one run: how it is done, and nothing that decides its result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass, replace
from math import ceil

import psutil
import torch

from covmerge.base.errors import InputError, ResourceError
from covmerge.base.settings import Hint
from covmerge.plan.planning.types import Plan
from covmerge.plan.statistics import Progress as Collecting
from covmerge.run.engine.budget import MemoryPlan, plan_memory
from covmerge.run.engine.cluster import RayCluster
from covmerge.run.engine.devices import (
    check_room,
    gpus_of,
    named_device,
    own_device,
    precision_of_products,
    processor_of,
    usable_device,
)
from covmerge.run.engine.executor import Executor, Opener
from covmerge.run.engine.processes import Processes
from covmerge.run.engine.progress import Progress, Silent
from covmerge.run.engine.ranks.rank import Rank
from covmerge.run.engine.threads import Threads
from covmerge.run.engine.transfer import pinned_bytes
from covmerge.run.engine.workers import AUTO, Choice, Workers, choose_workers


@dataclass(frozen=True)
class RunOptions:
    """How a run is done.

    Attributes:
        device: where the mathematics runs; `cuda`: each process takes another GPU of its machine; `auto`:
            that where this machine has one, else the CPU; of other machines, where one of them has one.
        threads: CPU threads of the mathematics; None: torch's setting.
        workers: processes that share the work; 1: this one does it, in threads; "auto": as many as the
            work, the cores and the memory are worth. They import the main
            script anew, which must merge under `if __name__ == "__main__":` then.
        rank: which of several processes this is that were all started to do this merge; None: the only.
        elsewhere: the other machines that do the work; None: none do.
        patience: seconds for which a rank that is not heard of is taken to be there.
        max_memory: bytes that the process may take; None: what the machine has free.
        resume: go on with an interrupted run.
        overwrite: replace an output of covmerge.
        progress: called for every finished piece of work; None: nothing is.
        collecting: called for every batch that the base is run on, where its inputs are made first.
        cluster: address of a Ray cluster, which is put as `elsewhere`.

    Raises:
        InputError: `workers` is nothing of these.
    """

    device: str = "cpu"
    threads: int | None = None
    workers: Workers = 1
    rank: Rank | None = None
    elsewhere: RayCluster | None = None
    patience: float = 120.0
    max_memory: int | None = None
    resume: bool = False
    overwrite: bool = False
    progress: Progress | None = None
    collecting: Collecting | None = None
    cluster: InitVar[str | None] = None

    def __post_init__(self, cluster: str | None) -> None:
        """Refuse what are no workers, and put an address as the machines there."""
        if cluster is not None:
            nodes = RayCluster(cluster, named_device(self.device))
            object.__setattr__(self, "elsewhere", nodes)
        workers = self.workers
        if workers != AUTO and not (type(workers) is int and workers > 0):
            raise InputError(
                f"{Hint('workers')}: {workers!r} is neither a number of processes nor '{AUTO}'"
            )

    def check_in_memory(self) -> None:
        """Refuse what is about a folder, of a run whose result stays in memory.

        Raises:
            InputError: it is to replace one, or to go on with one.
        """
        given = {Hint("overwrite"): self.overwrite, Hint("resume"): self.resume}
        for hint in (hint for hint, wanted in given.items() if wanted):
            raise InputError(
                f"{hint} is about an output folder, and none is given: give one, or leave out {hint}"
            )

    @property
    def torch_device(self) -> torch.device:
        """Where items are computed. What other machines compute on they have, and check it there."""
        return self.device_here if self.elsewhere is None else self.elsewhere.device

    @property
    def device_here(self) -> torch.device:
        """The device of this process; see `own_device` and `usable_device`."""
        return usable_device(str(self._devices(1)[0]))

    def _devices(self, workers: int) -> list[torch.device]:
        """Where each of so many processes that do the work of this one computes."""
        first = 0 if self.rank is None else self.rank.place * workers
        return [own_device(self.device, first + number) for number in range(workers)]

    @property
    def shown_progress(self) -> Progress:
        """What is called for finished work; see `Silent`."""
        return self.progress or Silent()

    def memory(self, plans: Sequence[Plan], *, held: int = 0, shared: int = 0) -> MemoryPlan:
        """Divide the memory; see `plan_memory`. What other machines do is held against theirs instead."""
        if self.elsewhere is not None:
            resident = psutil.Process().memory_info().rss + held + self.elsewhere.client_holds
            return MemoryPlan(resident, 0, 0, lanes=1)
        if self.workers == AUTO:
            return self._memory_of_chosen(plans, held, shared)
        return self._memory_of(self.workers, plans, held, shared)

    def _memory_of_chosen(self, plans: Sequence[Plan], held: int, shared: int) -> MemoryPlan:
        """Divide the memory among as many processes as are worth it."""
        chosen = choose_workers(
            plans,
            device=self.torch_device,
            threads=self.threads or torch.get_num_threads(),
            in_memory=held > 0,
            gpus=gpus_of(self.device) // (1 if self.rank is None else self.rank.local),
        )
        if chosen.workers > 1:
            try:
                memory = self._memory_of(chosen.workers, plans, held, shared)
            except ResourceError:
                chosen = Choice(1, "the memory holds no more than one process")
            else:
                few = "" if memory.workers == chosen.workers else "; the memory holds no more"
                return replace(memory, why=chosen.why + few)
        return replace(self._memory_of(1, plans, held, shared), why=chosen.why)

    def _memory_of(self, workers: int, plans: Sequence[Plan], held: int, shared: int) -> MemoryPlan:
        memory = plan_memory(
            plans,
            self.max_memory,
            device=self.torch_device,
            threads=self.threads,
            workers=workers,
            processes=1 if self.rank is None else self.rank.local,
            held=held,
            shared=shared,
        )
        left = check_room(
            zip(*(plan.items for plan in plans), strict=True),
            self.torch_device,  # the GPUs of a machine are taken to be alike
            processes=ceil(memory.workers / max(1, gpus_of(self.device))),
            shared=shared,
        )
        # What is in flight is on the device then, beside what is computed.
        ahead = pinned_bytes(self.torch_device) > 0
        return replace(memory, ahead=ahead and (left is None or memory.own_in_flight <= left))

    def computed(self) -> str:
        """Say how matrices are computed, as far as their rounding hangs on it.

        A run is gone on with in the same way: else the output would have some of each.
        """
        precision = precision_of_products(self.torch_device)
        products = "" if precision == "highest" else f", float32 products in {precision} precision"
        return f"on {self.torch_device.type}{products}"

    @property
    def processor(self) -> str:
        """What computes: on another one of its kind sums may be rounded otherwise."""
        return "a cluster's" if self.elsewhere is not None else processor_of(self.torch_device)

    def threads_for(self, plan: Plan) -> int | None:
        """Return how many threads compute a large matrix of a plan: it decides how sums are rounded.

        None where there is none, or it goes element by element.
        """
        device = self.torch_device
        if device.type != "cpu":
            return None
        wide = (item.tensor.merge for item in plan.items if not item.is_narrow(device))
        merges = [merge for merge in wide if merge is not None]
        if all(merge.procedure.unit_for(merge.parameters) == "element" for merge in merges):
            return None
        return self.threads or torch.get_num_threads()

    def executor(self, memory: MemoryPlan, opener: Callable[[], Opener]) -> Executor:
        """Return what carries the work out; `opener` says how other processes open the sources."""
        if self.elsewhere is not None:
            return self.elsewhere.executor(opener(), self.max_memory)
        threads = Threads(
            in_flight=memory.own_in_flight,
            lanes=memory.lanes,
            ahead=memory.ahead,
            kept_above=memory.kept_above,
        )
        if memory.workers == 1:
            return threads
        return Processes(self._devices(memory.workers), opener(), threads, hands=memory.hands)
