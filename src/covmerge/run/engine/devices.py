"""Which device the mathematics of a process runs on: of several processes of a machine a GPU each."""

from __future__ import annotations

import platform
from collections.abc import Generator, Iterable
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from covmerge.base.errors import InputError, ResourceError
from covmerge.base.settings import Hint
from covmerge.plan.planning.work import WorkItem
from covmerge.plan.recipe import format_size
from covmerge.run.engine.executor import Batch

AUTO_DEVICE = "auto"
_TYPES = ("cpu", "cuda", "mps")


def named_device(name: str) -> torch.device:
    """Return the device that a name means, which another machine may have.

    `auto` is a GPU of CUDA's where this machine has one.
    """
    if name == AUTO_DEVICE:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.partition(":")[0] not in _TYPES:
        raise InputError(
            f"{Hint('device', name)} cannot be used here: it is cpu, cuda, cuda:1, mps, or auto, which "
            "is cuda where there is one and cpu else"
        )
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise _unusable(name, error) from error


def usable_device(name: str) -> torch.device:
    """Return a device that can hold a tensor here."""
    device = named_device(name)
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise _unusable(name, error) from error
    return device


def own_device(name: str, place: int, count: int | None = None) -> torch.device:
    """Return the device of one of several processes of a machine: `cuda` is a GPU for each, in turn.

    Args:
        name: as it was given; what names one GPU, or is none, is obeyed as it stands.
        place: of the process among those of its machine, from 0.
        count: of the GPUs that it sees, which CUDA_VISIBLE_DEVICES may have left it; None: as CUDA says.

    Example:
        >>> [str(own_device("cuda", place, 2)) for place in range(3)]
        ['cuda:0', 'cuda:1', 'cuda:0']
        >>> str(own_device("cuda:1", 0, 2)), str(own_device("cpu", 1, 2)), str(own_device("cuda", 1, 0))
        ('cuda:1', 'cpu', 'cuda')
    """
    device, several = named_device(name), gpus_of(name, count)
    return torch.device("cuda", place % several) if several else device


def gpus_of(name: str, count: int | None = None) -> int:
    """Return among how many GPUs of this machine a name leaves a choice; 0: among none."""
    device = named_device(name)
    if device.type != "cuda" or is_one(device):
        return 0
    return torch.cuda.device_count() if count is None else count


def precision_of_products(device: torch.device) -> str:
    """What the caller's process lets torch do to float32 products there; "highest": nothing."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # it was set by `torch.backends`, as torch 2.9 and newer has it
        backend: Any = torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn
        return str(backend.matmul.fp32_precision)


def processor_of(device: torch.device) -> str:
    """Return the processor's or the GPU's name; of a CPU also the instructions that torch uses."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return f"{device.type} of {platform.machine()}"
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            key, _, name = line.partition(":")
            if key.strip() == "model name":
                return f"{name.strip()}, {torch.backends.cpu.get_cpu_capability()}"
    return f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"


def is_one(device: torch.device) -> bool:
    """Whether a device has a number: one of several of its kind, and not whichever.

    Example:
        >>> is_one(torch.device("cuda:0")), is_one(torch.device("cuda"))
        (True, False)
    """
    return device != torch.device(device.type)


def _unusable(name: str, error: Exception) -> InputError:
    # torch lists all that it knows of other devices after the first sentence.
    reason = str(error).splitlines()[0].partition(". ")[0]
    return InputError(f"{Hint('device', name)} cannot be used here: {reason}")


# Whether what is computed at once has room in the memory of a GPU.

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
    """Name the tensor over which a device ran full, whatever its plan had said."""
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
    computed = [item for item in batch if not item.tensor.operation.copies]
    if not computed:
        return 0
    return max(item.device_memory for item in computed) + shared * batch[0].read_bytes
