"""Whether what is computed at once has room in the memory of a GPU."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager

import torch

from covmerge.base.errors import ResourceError
from covmerge.base.settings import Hint
from covmerge.plan.planning.operations import Copy
from covmerge.plan.planning.work import WorkItem
from covmerge.plan.recipe import format_size
from covmerge.run.engine.executor import Batch

# What a process takes of a GPU beside tensors of the plan: its context, what cuBLAS and cuSOLVER keep. A
# guess.
_BESIDE = 512 * 2**20


def check_room(
    batches: Iterable[Batch],
    device: torch.device,
    *,
    processes: int = 1,
    shared: int = 0,
    free: int | None = None,
) -> int | None:
    """Refuse what has no room on a device; the memory of the machine is the plan's matter (`plan_memory`).

    Nothing is computed elsewhere in its place: the bytes of the output would hang on what is free.

    Args:
        batches: of the run.
        device: where it is computed.
        processes: that share the device.
        shared: copies of a layer's updates that methods running together may keep.
        free: bytes; None: what the device says.

    Returns:
        Bytes that are left beside the largest of it; None: the device has no memory of its own.

    Raises:
        ResourceError: something takes more than a process may.
    """
    free = _free_on(device) if free is None else free
    if free is None:
        return None
    given = list(batches)
    sizes = [_size(batch, shared) for batch in given]
    needed = max(sizes, default=0)
    room = max(0, free // processes - _BESIDE)
    if needed > room:
        name = given[sizes.index(needed)][0].tensor.name
        raise ResourceError(
            f"'{name}' needs {format_size(needed)} of the memory of {device}, and "
            f"{format_size(room)} are free for it"
            + (
                f" in each of {processes} processes: take fewer {Hint('workers')}, "
                if processes > 1
                else ": "
            )
            + _ways_out()
        )
    return room - needed


@contextmanager
def naming_where_full(item: WorkItem, device: torch.device) -> Generator[None]:
    """Name the tensor over which a device ran full, whatever its plan had said.

    Raises:
        ResourceError: it did.
    """
    try:
        yield
    except torch.cuda.OutOfMemoryError as error:
        raise ResourceError(
            f"'{item.tensor.name}' found the memory of {device} full ({str(error).splitlines()[0]}): "
            f"{_ways_out()}"
        ) from error


def _ways_out() -> str:
    return (
        f"free more, compute on the CPU ({Hint('device', 'cpu')}), or merge that tensor by `average` with "
        "a rule"
    )


def _free_on(device: torch.device) -> int | None:
    """Bytes that this process may take; None: the device has no memory of its own, or does not say."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    # What torch keeps of freed tensors is taken to the device, and free to this process.
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def _size(batch: Batch, shared: int) -> int:
    """Bytes of a batch, whose items are computed one after the other; what is copied stays on the CPU."""
    computed = [item for item in batch if not isinstance(item.tensor.operation, Copy)]
    if not computed:
        return 0
    return max(item.device_memory for item in computed) + shared * batch[0].read_bytes
