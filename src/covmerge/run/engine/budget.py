"""A budget of bytes shared by the stages of the pipeline, and what a run will take of it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import psutil
import torch

from covmerge.base.errors import ResourceError
from covmerge.base.memory import allowance
from covmerge.base.settings import Hint
from covmerge.plan.planning.types import Plan
from covmerge.plan.recipe import format_size
from covmerge.run.engine.executor import held_together
from covmerge.run.engine.selection import counters_of
from covmerge.run.engine.transfer import pinned_bytes

# What a process that has not started yet is taken to hold beside its item (Python, torch, the buffers of
# BLAS): a guess, as of a small merge here.
PROCESS_HOLDS = 512 * 2**20
_NO_PROCESS = 10**6  # bytes that no process does with: the unit was forgotten

# What the process holds beside tensors of the plan: BLAS packing buffers, blocks that malloc keeps
# for each thread. The most that was found is 51 MiB, of `ace` let no more than its largest item. Where one
# thread frees what another took, malloc kept up to 230 MiB (`dare_ties`): above this much, it gives back.
_OVERHEAD = 160 * 2**20
_KEPT = 40 * 2**20
# What malloc keeps of the blocks that one more thread has freed: glibc returns those above 32 MiB at
# once, and gives each thread a heap of its own. Two 768 x 3072 experts by `ace`
# on several threads went up to 67 MiB over the plan without it.
_LANE_HEAP = 96 * 2**20
# Small items are read this far ahead, and further where several are computed at once.
_READ_AHEAD = 128 * 2**20
_MOST_AHEAD = 2**30
# What items that are computed at once may take together, unless one of them takes more.
_LANES_WORKSPACE = 2 * 2**30


class Budget:
    """Bytes that may be alive at once; a thread that would exceed them waits for another to finish.

    Items acquire in plan order and one item always fits, so waiting always ends.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._used = 0
        self._changed = threading.Condition()
        self._closed = False

    def acquire(self, size: int) -> bool:
        """Wait until `size` bytes are free and take them; False when the budget was closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._used + size <= self._limit)
            if self._closed:
                return False
            self._used += size
            return True

    def release(self, size: int) -> None:
        """Give bytes back."""
        with self._changed:
            self._used -= size
            self._changed.notify_all()

    def close(self) -> None:
        """Wake every waiter: the run is over."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


@dataclass(frozen=True)
class MemoryPlan:
    """How the memory of a run is divided.

    Attributes:
        resident: what the process holds before the run, BLAS buffers and allocator slack included.
        workspace: the most that computing an item takes beside its inputs and result.
        in_flight: inputs read ahead plus results not yet written, at most, of all that compute.
        lanes: items that are computed at once, where they are small.
        workers: processes that share the work; 1: none but this.
        hands: items that each of these has at once.
        why: so many, where that was not said.
        ahead: what is read goes to the device before it is computed.
    """

    resident: int
    workspace: int
    in_flight: int
    lanes: int
    workers: int = 1
    hands: int = 1
    why: str = ""
    ahead: bool = False

    @property
    def peak(self) -> int:
        """Expected peak of the process."""
        return self.resident + self.workspace + self.in_flight

    @property
    def own_in_flight(self) -> int:
        """What of `in_flight` each process that computes may take."""
        return self.in_flight // self.workers

    @property
    def kept_above(self) -> int:
        """What each process that computes may hold before malloc has to give back what it keeps."""
        workers = self.workspace + self.in_flight
        held = self.peak if self.workers == 1 else workers // self.workers
        return held - _OVERHEAD + _KEPT


def plan_memory(
    plans: Sequence[Plan],
    max_memory: int | None,
    *,
    device: torch.device,
    threads: int | None = None,
    workers: int = 1,
    processes: int = 1,
    held: int = 0,
    shared: int = 0,
) -> MemoryPlan:
    """Divide the memory, or refuse before any work.

    Args:
        plans: one plan, or several that run together over the same reading.
        max_memory: bytes that the process may take; None: what the machine has free.
        device: where the work is done.
        threads: cores of the CPU; None: torch's setting.
        workers: processes that are to share the work, as far as all of them fit.
        processes: as many as this one on the machine, which share what it has free.
        held: bytes that stay taken throughout.
        shared: copies of a layer's updates that methods running together may keep.

    Without `max_memory` two of the largest items may be in flight, so that reading and writing
    overlap computing, and the peak follows the largest tensor, not the model. Small items are
    computed on one core each as far as their workspaces fit together.

    Raises:
        ResourceError: one item at a time does not fit `max_memory`, or the machine's free memory.
    """
    counters, pinned = counters_of(plans), pinned_bytes(device)
    resident = psutil.Process().memory_info().rss + _OVERHEAD + held + counters + pinned
    together = list(zip(*(plan.items for plan in plans), strict=True))
    moved = [held_together(items) + sum(item.write_bytes for item in items) for items in together]
    spaces = [
        max(item.workspace for item in items) + shared * items[0].read_bytes for items in together
    ]
    narrow = [items[0].is_narrow(device) for items in together]
    largest, workspace = max(moved), max(spaces)
    beside = max((space for space, small in zip(spaces, narrow, strict=True) if small), default=0)
    ahead = max((size for size, small in zip(moved, narrow, strict=True) if small), default=0)
    allowed = allowance(max_memory, processes)
    # What the process has counts against what it may have in all, and not against what is free beside it.
    present = 0 if allowed.in_all else resident - held - counters - pinned
    limit = allowed.size + present
    if resident + workspace + largest > limit:
        beside, more = " beside what the process has", "Free"
        taken = f"{format_size(held)} for the output, " if held else ""
        taken += f"{format_size(counters)} to count for thresholds, " if counters else ""
        taken += f"{format_size(pinned)} for buffers to {device.type}, " if pinned else ""
        if allowed.in_all:
            beside, more, taken = "", "Allow", f"{format_size(resident)} for the process, "
        unit = (
            " (a number alone counts bytes)"
            if allowed.in_all and allowed.size <= _NO_PROCESS
            else ""
        )
        raise ResourceError(
            f"the merge needs {format_size(resident + workspace + largest - present)}{beside}, and "
            f"{format_size(allowed.size)} {allowed.given}{unit}: {taken}"
            f"{format_size(workspace + largest)} for the largest tensor, "
            f"'{plans[0].peak_item.tensor.name}'. {more} more"
            + (
                ", or merge that tensor by `average` with a rule."
                if resident + largest < limit
                else "."
            )
        )
    if workers > 1:
        return _among(workers, _hands(device), resident, workspace, largest, limit)
    room = min(max(workspace, _LANES_WORKSPACE), limit - resident - largest)
    heap = min(beside, _LANE_HEAP)
    lanes = max(1, min(threads or torch.get_num_threads(), (room + heap) // max(1, beside + heap)))
    workspace = max(workspace, lanes * beside + (lanes - 1) * heap)
    wanted = max(2 * largest, min((lanes + 1) * ahead, _MOST_AHEAD), _READ_AHEAD)
    in_flight = min(wanted, limit - resident - workspace)
    return MemoryPlan(resident, workspace, in_flight, lanes)


def _hands(device: torch.device) -> int:
    """How many items a worker process has: what its device computes, and what it reads meanwhile.

    On a CPU, which reading keeps busy too, it has one: a second would wait there while another process has
    nothing to do.
    """
    return 1 if device.type == "cpu" else 2


def _among(
    workers: int, hands: int, resident: int, workspace: int, largest: int, limit: int
) -> MemoryPlan:
    """Divide the memory among processes: each holds what this one does, and has an item at least.

    Raises:
        ResourceError: two of them do not fit.
    """
    each = resident + workspace
    fitting = min(workers, (limit - resident) // (each + largest))
    if fitting < 2:
        raise ResourceError(
            f"{workers} workers do not fit: this process and two of them take "
            f"{format_size(resident + 2 * (each + largest))}, and {format_size(limit)} may be taken: "
            f"leave out {Hint('workers')}"
        )
    in_flight = min(hands * largest, (limit - resident) // fitting - each)
    # What the workers hold beside is workspace to this process.
    return MemoryPlan(
        resident, fitting * each, fitting * in_flight, lanes=1, workers=fitting, hands=hands
    )
