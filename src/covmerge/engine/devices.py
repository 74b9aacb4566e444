"""Which device the mathematics of a process runs on."""

from __future__ import annotations

import torch

from covmerge.errors import InputError


def named_device(name: str) -> torch.device:
    """Return the device that a name means, which another machine may have.

    Raises:
        InputError: it means none.
    """
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


def _unusable(name: str, error: Exception) -> InputError:
    return InputError(f"--device {name} cannot be used here: {str(error).splitlines()[0]}")
