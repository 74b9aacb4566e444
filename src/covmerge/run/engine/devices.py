"""The device that a process computes on; several processes of one machine take a GPU each."""

from __future__ import annotations

import platform
from collections.abc import Generator, Iterable
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from covmerge.base.errors import InputError, ResourceError
from covmerge.base.settings import Hint
from covmerge.base.sizes import format_size
from covmerge.plan.planning.work import WorkItem
from covmerge.run.engine.executor import Batch

AUTO_DEVICE = "auto"
_TYPES = ("cpu", "cuda", "mps")


def named_device(name: str) -> torch.device:
    """Return the device that a name means, without checking that this machine has the device.

    `auto` means `cuda` if this machine has a CUDA GPU, else `cpu`.
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
    """Return the device of a name, after checking that it can hold a tensor on this machine."""
    device = named_device(name)
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise _unusable(name, error) from error
    return device


def own_device(name: str, place: int) -> torch.device:
    """Return the device of a process, by its place among those of its machine.

    `cuda` gives them the GPUs in turn; `cuda:1` or `cpu` is returned unchanged.
    """
    device, several = named_device(name), gpus_of(name)
    return torch.device("cuda", place % several) if several else device


def gpus_of(name: str) -> int:
    """Return how many GPUs a name allows that this process sees; 0: no GPU, or one of a given number."""
    device = named_device(name)
    return 0 if device.type != "cuda" or is_one(device) else torch.cuda.device_count()


def precision_of_products(device: torch.device) -> str:
    """Return torch's precision setting for float32 products on a device; "highest": full float32."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # it was set by `torch.backends`, as torch 2.9 and newer has it
        backend: Any = torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn
        return str(backend.matmul.fp32_precision)


def processor_of(device: torch.device) -> str:
    """Return the name of the CPU or GPU; for a CPU also the instruction set that torch uses."""
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
    """Return whether a device has a number (`cuda:0`), so that it means one device of its type.

    Example:
        >>> is_one(torch.device("cuda:0")), is_one(torch.device("cuda"))
        (True, False)
    """
    return device != torch.device(device.type)


def _unusable(name: str, error: Exception) -> InputError:
    # After the first sentence, torch lists its other device types.
    reason = str(error).splitlines()[0].partition(". ")[0]
    return InputError(f"{Hint('device', name)} cannot be used here: {reason}")


# The check that each batch has room in the memory of a GPU.

# Bytes that a process takes of a GPU beside the tensors of the plan: its context, and the buffers of cuBLAS
# and cuSOLVER. A guess.
_BESIDE = 512 * 2**20


def check_room(
    batches: Iterable[Batch],
    device: torch.device,
    *,
    processes: int = 1,
    shared: int = 0,
    free: int | None = None,
) -> int | None:
    """Check that every batch has room on the device; `plan_memory` checks the memory of the machine.

    A batch without room is not computed on another device: the bytes of the output would then depend on
    how much memory is free. `processes` share the device. Methods that run together may keep `shared`
    copies of a layer's updates. The device has `free` bytes; None: ask it.

    Return the bytes that stay free beside the largest batch; None: the device has no memory of its own.

    Raises:
        ResourceError: a batch has no room.
    """
    free = _free_on(device) if free is None else free
    if free is None:
        return None
    given = list(batches)
    sizes = [_size(batch, shared) for batch in given]
    needed = max(sizes, default=0)
    room = max(0, free // processes - _BESIDE)
    if needed > room:
        name, fewer = given[sizes.index(needed)][0].tensor.name, ": "
        if processes > 1:
            fewer = f" in each of {processes} processes: take fewer {Hint('workers')}, "
        raise ResourceError(
            f"'{name}' needs {format_size(needed)} of the memory of {device}, and "
            f"{format_size(room)} are free for it{fewer}{_ways_out()}"
        )
    return room - needed


@contextmanager
def naming_where_full(item: WorkItem, device: torch.device) -> Generator[None]:
    """Turn a CUDA out-of-memory error of the block into a ResourceError that names the item's tensor."""
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
    """Return the bytes that this process may take on a device; None: it is no CUDA device."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    # Memory that torch keeps of freed tensors counts as used on the device, but is free for this process.
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def _size(batch: Batch, shared: int) -> int:
    """Return the device memory of a batch: its items are computed in turn, and copies stay on the CPU."""
    computed = [item for item in batch if not item.tensor.operation.copies]
    if not computed:
        return 0
    return max(item.device_memory for item in computed) + shared * batch[0].read_bytes
