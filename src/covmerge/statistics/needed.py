"""What memory it takes to run models and to keep the sums of their layers, known before they are loaded."""

from __future__ import annotations

import psutil
import torch

from covmerge.checkpoints import Checkpoint
from covmerge.errors import ResourceError
from covmerge.memory import allowance
from covmerge.tensors import describe_checkpoint, matrix_shapes
from covmerge.types import Role

_BESIDE = 512 * 2**20  # transformers, and a batch on its way through the model
_SUM = torch.float64.itemsize
_GRADIENT = torch.float32.itemsize
_GIB = 2**30


def memory_needed(*models: Checkpoint, grams: bool = True, fisher: bool = False) -> int:
    """Return what running models for their layers' inputs takes beside the process, from above.

    Their weights as they are stored and in float32, and a sum for every layer: layers with one input share
    theirs, but which these are shows when they are called. A batch is taken to be small.

    Args:
        *models: that are in memory together.
        grams: whether each layer's Gram matrix is summed.
        fisher: whether each weight's Fisher information is, of gradients.
    """
    total = _BESIDE
    for model in models:
        described = describe_checkpoint(model).tensors
        for name, header in model.headers.items():
            total += header.nbytes + header.numel * torch.float32.itemsize
            info = described[name]
            if grams and info.role in (Role.LINEAR, Role.CONV1D):
                total += sum(_SUM * d_in**2 for _, d_in in matrix_shapes(header.shape, info.layout))
            if fisher:
                total += header.numel * (_SUM + _GRADIENT)
    return total


def check_memory(needed: int, max_memory: int | None, what: str, otherwise: str) -> None:
    """Refuse what does not fit.

    Args:
        needed: bytes beside what the process has.
        max_memory: bytes that the process may take; None: what is free.
        what: takes them, for the message.
        otherwise: what to do, for the message.

    Raises:
        ResourceError: it does not fit.
    """
    allowed = allowance(max_memory)
    if allowed.in_all:
        needed += psutil.Process().memory_info().rss
    if needed > allowed.size:
        raise ResourceError(
            f"{what} take up to {needed / _GIB:.3g} GiB, and {allowed.size / _GIB:.3g} GiB "
            f"{allowed.given}: {otherwise}"
        )
