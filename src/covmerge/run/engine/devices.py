"""Which device the mathematics of a process runs on: of several processes of a machine a GPU each."""

from __future__ import annotations

import platform
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from covmerge.base.errors import InputError
from covmerge.base.settings import Hint

AUTO_DEVICE = "auto"
_TYPES = ("cpu", "cuda", "mps")


def named_device(name: str) -> torch.device:
    """Return the device that a name means, which another machine may have.

    `auto` is a GPU of CUDA's where this machine has one.

    Raises:
        InputError: it means none.
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
    """Return a device that can hold a tensor here.

    Raises:
        InputError: it cannot.
    """
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

    Raises:
        InputError: it means no device.

    Example:
        >>> [str(own_device("cuda", place, 2)) for place in range(3)]
        ['cuda:0', 'cuda:1', 'cuda:0']
        >>> str(own_device("cuda:1", 0, 2)), str(own_device("cpu", 1, 2)), str(own_device("cuda", 1, 0))
        ('cuda:1', 'cpu', 'cuda')
    """
    device, several = named_device(name), gpus_of(name, count)
    return torch.device("cuda", place % several) if several else device


def gpus_of(name: str, count: int | None = None) -> int:
    """Return among how many GPUs of this machine a name leaves a choice; 0: among none.

    Args:
        name: of a device.
        count: see `own_device`.
    """
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
