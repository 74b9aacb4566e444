"""The options of one run: they set how the run is done, not which merge it computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Literal

import psutil
import torch

from covmerge.base.errors import InputError, ResourceError
from covmerge.base.settings import Hint
from covmerge.base.sizes import format_size
from covmerge.plan.planning.types import Plan
from covmerge.plan.statistics import Progress as Collecting
from covmerge.run.engine.budget import MemoryPlan, plan_memory
from covmerge.run.engine.cluster.executor import CLIENT_HOLDS, Cluster
from covmerge.run.engine.devices import (
    check_room,
    gpus_of,
    named_device,
    own_device,
    precision_of_products,
    processor_of,
    usable_device,
)
from covmerge.run.engine.executor import Executor, Opener, moved_together
from covmerge.run.engine.global_pass import global_pass_bytes
from covmerge.run.engine.processes import Processes
from covmerge.run.engine.progress import Progress, Silent
from covmerge.run.engine.ranks.rank import Rank
from covmerge.run.engine.thread_count import usable_cores
from covmerge.run.engine.threads import Threads
from covmerge.run.engine.transfer import pinned_bytes

Workers = int | Literal["auto"]
AUTO = "auto"


@dataclass(frozen=True)
class RunOptions:
    """The options of one run.

    Attributes:
        device: the device that computes; with `cuda`, the processes of a machine take its GPUs in turn;
            `auto` means `cuda` if this machine (or a machine of the cluster) has a GPU, else `cpu`.
        threads: CPU threads that compute; None: torch's setting.
        workers: number of processes that share the work; 1: this process works alone, in threads; "auto": a
            number chosen by the work, the cores and the memory. Worker processes import the main script
            again, so the script must merge under `if __name__ == "__main__":`.
        rank: this process among several that were all started to do this merge; None: it is alone.
        cluster: address of the Ray cluster that does the work; None: this machine does.
        patience: seconds without news after which a rank is considered gone.
        max_memory: bytes that the process may take; None: the free memory of the machine.
        resume: whether to continue an interrupted run.
        overwrite: whether to replace an existing output of covmerge.
        progress: called for every finished piece of work; None: progress is not reported.
        collecting: called for every batch that runs through the base, where its inputs are collected first.

    Raises:
        InputError: `workers` is neither a number above 0 nor "auto".
    """

    device: str = "cpu"
    threads: int | None = None
    workers: Workers = 1
    rank: Rank | None = None
    cluster: str | None = None
    patience: float = 120.0
    max_memory: int | None = None
    resume: bool = False
    overwrite: bool = False
    progress: Progress | None = None
    collecting: Collecting | None = None

    def __post_init__(self) -> None:
        workers = self.workers
        if workers != AUTO and not (type(workers) is int and workers > 0):
            raise InputError(
                f"{Hint('workers')}: {workers!r} is neither a number of processes nor '{AUTO}'"
            )

    def check_in_memory(self) -> None:
        """Check the options of a run whose result stays in memory.

        Raises:
            InputError: `overwrite` or `resume` is set; both need an output folder.
        """
        given = {Hint("overwrite"): self.overwrite, Hint("resume"): self.resume}
        for hint in (hint for hint, wanted in given.items() if wanted):
            raise InputError(
                f"{hint} is about an output folder, and none is given: give one, or leave out {hint}"
            )

    @property
    def torch_device(self) -> torch.device:
        """The device that computes items; the device of other machines is checked there, not here."""
        if self.cluster is not None:
            return named_device(self.device)
        return usable_device(str(self._devices(1)[0]))

    def _devices(self, workers: int) -> list[torch.device]:
        """Return the device of each of `workers` processes that do the work of this process."""
        first = 0 if self.rank is None else self.rank.place * workers
        return [own_device(self.device, first + number) for number in range(workers)]

    @property
    def shown_progress(self) -> Progress:
        """The object that is called for finished work; `Silent` where progress is not reported."""
        return self.progress or Silent()

    def memory(self, plans: Sequence[Plan], *, held: int = 0, shared: int = 0) -> MemoryPlan:
        """Divide the memory; see `plan_memory`. Other machines check against their own memory."""
        if self.cluster is not None:
            resident = psutil.Process().memory_info().rss + held + CLIENT_HOLDS
            return MemoryPlan(resident, 0, 0, lanes=1)
        if self.workers == AUTO:
            return self._memory_of_chosen(plans, held, shared)
        return self._memory_of(self.workers, plans, held, shared)

    def _memory_of_chosen(self, plans: Sequence[Plan], held: int, shared: int) -> MemoryPlan:
        workers, why = choose_workers(
            plans,
            device=self.torch_device,
            threads=self.threads or torch.get_num_threads(),
            in_memory=held > 0,
            gpus=gpus_of(self.device) // (1 if self.rank is None else self.rank.local),
        )
        if workers > 1:
            try:
                memory = self._memory_of(workers, plans, held, shared)
            except ResourceError:
                why = "the memory holds no more than one process"
            else:
                few = "" if memory.workers == workers else "; the memory holds no more"
                return replace(memory, why=why + few)
        return replace(self._memory_of(1, plans, held, shared), why=why)

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
        # Inputs that go ahead lie on the device, beside the item that is computed.
        ahead = pinned_bytes(self.torch_device) > 0
        return replace(memory, ahead=ahead and (left is None or memory.own_in_flight <= left))

    def computed(self) -> str:
        """Return a phrase on the settings that decide how products are rounded: device and precision.

        A run is resumed only with the same settings; else parts of the output would be rounded differently.
        """
        precision = precision_of_products(self.torch_device)
        products = "" if precision == "highest" else f", float32 products in {precision} precision"
        return f"on {self.torch_device.type}{products}"

    @property
    def processor(self) -> str:
        """The name of the CPU or GPU that computes; another model may round sums differently."""
        return "a cluster's" if self.cluster is not None else processor_of(self.torch_device)

    def threads_for(self, plan: Plan) -> int | None:
        """Return how many CPU threads compute a large matrix; the number decides how sums are rounded.

        None: a GPU computes, the plan merges no large matrix, or all large ones element by element.
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
        """Return the executor of the run; `opener` returns how other processes open the sources."""
        if self.cluster is not None:
            return Cluster(self.cluster, opener(), self.max_memory)
        threads = Threads(
            in_flight=memory.own_in_flight,
            lanes=memory.lanes,
            ahead=memory.ahead,
            kept_above=memory.kept_above,
        )
        if memory.workers == 1:
            return threads
        return Processes(self._devices(memory.workers), opener(), threads, hands=memory.hands)


# The number of processes for a merge (`--workers auto`).

# Bytes read and written below which starting the processes would take a good part of the merge's time.
_SMALL = 8 * 2**30


def choose_workers(
    plans: Sequence[Plan],
    *,
    device: torch.device,
    threads: int,
    cores: int | None = None,
    gpus: int = 0,
    in_memory: bool = False,
) -> tuple[int, str]:
    """Choose the number of processes by the work, with the reason; the memory may lower it later.

    One process reads in one thread, writes in one thread, and computes on all of its cores: small items at
    once, one core each, and large items in turn, on all cores. More processes help if the machine has
    cores beside these, or if reading and converting is most of the work. Each of several GPUs gets a
    process.

    This process computes on `threads` of the machine's `cores` (None: ask the system). `in_memory` says
    whether the result stays in the memory of this process.
    """
    cores = usable_cores() if cores is None else cores
    batches = list(zip(*(plan.items for plan in plans), strict=True))
    size = global_pass_bytes(plans) + sum(map(moved_together, batches))
    flops = [sum(item.flops for item in batch) for batch in batches]
    wide = sum(
        work for work, batch in zip(flops, batches, strict=True) if not batch[0].is_narrow(device)
    )
    if in_memory:
        return 1, "the result stays in this process"
    if device.type != "cpu" and gpus < 2:
        return 1, f"the mathematics runs on {device}, which one process keeps busy"
    if device.type == "cpu" and cores < 2:
        return 1, "there is one core"
    if size < _SMALL:
        why = "are soon read and written, and processes take seconds to start"
        return 1, f"{format_size(size)} {why}"
    if device.type != "cpu":
        return min(gpus, len(batches)), f"{gpus} GPUs, a process for each"
    if wide > sum(flops) / 2 and 2 * threads > cores:
        return 1, "most of the mathematics is of matrices that each take all cores"
    workers = min(max(2, cores // threads if threads < cores else cores), len(batches))
    return workers, f"{format_size(size)} to read and write, and {cores} cores"
