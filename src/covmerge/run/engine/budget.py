"""The memory of a run: its division before the run, and the budget that the pipeline's stages share."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import psutil
import torch

from covmerge.base.errors import ResourceError
from covmerge.base.memory import allowance
from covmerge.base.settings import Hint
from covmerge.base.sizes import format_size
from covmerge.plan.planning.types import Plan
from covmerge.run.engine.executor import held_together
from covmerge.run.engine.selection import counters_of
from covmerge.run.engine.transfer import pinned_bytes

# Bytes that a process that has not started yet is assumed to hold beside its item (Python, torch, the
# buffers of BLAS): a guess, from a small merge on the development machine.
PROCESS_HOLDS = 512 * 2**20
_NO_PROCESS = 10**6  # bytes; no process runs with so few: the user forgot the unit

# Bytes that the process holds beside the tensors of the plan: BLAS packing buffers, and blocks that malloc
# keeps for each thread. The most found was 51 MiB, by `ace` with memory for its largest item only. Where
# one thread frees memory of another, malloc kept up to 230 MiB (`dare_ties`). Malloc therefore has to
# return freed memory once a process holds `_KEPT` bytes beside the tensors of the plan.
_OVERHEAD = 160 * 2**20
_KEPT = 40 * 2**20
# Bytes that malloc keeps for each further thread that computes: glibc returns freed blocks above 32 MiB
# at once, and keeps smaller blocks in a heap for each thread. Without this term, `ace` on two
# 768 x 3072 experts in several threads took up to 67 MiB more than planned.
_LANE_HEAP = 96 * 2**20
# Small items are read this many bytes ahead, and up to `_MOST_AHEAD` where several are computed at once.
_READ_AHEAD = 128 * 2**20
_MOST_AHEAD = 2**30
# Workspace that all items computed at once may take together, unless a single item needs more.
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
        """Wait until `size` bytes are free, then take them; return False if the budget was closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._used + size <= self._limit)
            if self._closed:
                return False
            self._used += size
            return True

    def release(self, size: int) -> None:
        """Return `size` bytes to the budget."""
        with self._changed:
            self._used -= size
            self._changed.notify_all()

    def close(self) -> None:
        """Wake every waiting thread, because the run is over."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


@dataclass(frozen=True)
class MemoryPlan:
    """The division of the memory of a run."""

    resident: int  # bytes of the process before the run, with BLAS buffers and allocator slack
    workspace: int  # the most bytes that computing takes beside the inputs and results of items
    in_flight: (
        int  # the most bytes of inputs read ahead and results not yet written, in all processes
    )
    lanes: int  # number of small items that are computed at once
    workers: int = 1  # number of processes that share the work; 1: this process alone
    hands: int = 1  # number of items that each worker process has at once
    why: str = ""  # the reason for the number of workers, where the user did not give the number
    ahead: bool = False  # whether inputs go to the device before their computation begins

    @property
    def peak(self) -> int:
        """Expected peak memory of the process, in bytes."""
        return self.resident + self.workspace + self.in_flight

    @property
    def own_in_flight(self) -> int:
        """The share of `in_flight` that each computing process may take."""
        return self.in_flight // self.workers

    @property
    def kept_above(self) -> int:
        """Bytes that each computing process may hold before malloc has to return freed memory."""
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
    """Divide the memory of a run, or raise an error before any work.

    Several plans run together over the same reading. The process may take `max_memory` bytes; None: the
    free memory of the machine, which `processes` like this one share. `held` bytes stay allocated for the
    whole run. Methods that run together may keep `shared` copies of a layer's updates. Fewer than `workers`
    processes are planned where not all of them fit.

    Without `max_memory` two of the largest items may be in flight, so that reading and writing
    overlap computing. The peak then follows the size of the largest tensor, not of the model. Small
    items are computed at once, on one core each, while their workspaces fit together.

    Raises:
        ResourceError: a single item does not fit `max_memory`, or the machine's free memory.
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
    # The memory that the process already has counts towards a limit on the whole process, but not towards
    # the machine's free memory.
    present = 0 if allowed.in_all else resident - held - counters - pinned
    limit = allowed.size + present
    if resident + workspace + largest > limit:
        beside, more = " beside what the process has", "Free"
        taken = f"{format_size(held)} for the output, " if held else ""
        taken += f"{format_size(counters)} to count for thresholds, " if counters else ""
        taken += f"{format_size(pinned)} for buffers to {device.type}, " if pinned else ""
        if allowed.in_all:
            beside, more, taken = "", "Allow", f"{format_size(resident)} for the process, "
        few = allowed.in_all and allowed.size <= _NO_PROCESS
        unit = " (a number alone counts bytes)" if few else ""
        rule = ", or merge that tensor by `average` with a rule"
        raise ResourceError(
            f"the merge needs {format_size(resident + workspace + largest - present)}{beside}, and "
            f"{format_size(allowed.size)} {allowed.given}{unit}: {taken}"
            f"{format_size(workspace + largest)} for the largest tensor, "
            f"'{plans[0].peak_item.tensor.name}'. {more} more"
            f"{rule if resident + largest < limit else ''}."
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
    """Return how many items a worker process has: on a GPU two, one computed and one read.

    Reading keeps a CPU busy too, so a second item would wait there while another process is idle.
    """
    return 1 if device.type == "cpu" else 2


def _among(
    workers: int, hands: int, resident: int, workspace: int, largest: int, limit: int
) -> MemoryPlan:
    """Divide the memory among processes, each as large as this one and with at least one item.

    Raises:
        ResourceError: two worker processes do not fit.
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
    # All that the workers hold beside the items in flight counts as workspace of this process.
    return MemoryPlan(
        resident, fitting * each, fitting * in_flight, lanes=1, workers=fitting, hands=hands
    )
