"""Sends stored rows to a GPU through two pinned buffers, while another item is computed there.

The reader fills one buffer while the device reads the other, on a separate stream. Large tensors are sent
in pieces, so the buffers are as small for a large item as for a small one. On the CPU, which only tests
use, the same calls do the same copies at once, through memory that is not pinned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from covmerge.base.types import LowRank, Measured
from covmerge.plan.planning.work import WorkItem
from covmerge.run.engine.inputs import Inputs, Update

# Devices that copy from pinned memory without the CPU.
_COPIES = ("cuda",)
# Size of each buffer: copying this much takes far longer than starting the copy. It is a power of two,
# because torch rounds pinned memory up to one.
_BYTES = 32 * 2**20


class Arrival(Protocol):
    """An event that happens when all copies begun before it are done."""

    def synchronize(self) -> None:
        """Wait for the event."""


def pinned_bytes(device: torch.device) -> int:
    """Return the bytes of host memory that the buffers take; 0 for devices without buffers."""
    return 2 * _BYTES if device.type in _COPIES else 0


def goes_ahead(items: Sequence[WorkItem]) -> bool:
    """Return whether the rows of a batch are needed only on the device.

    False where an item is not merged (copies stay on the CPU), is packed (packed rows are compared with
    the base on the CPU), or has a tensor pass (the computation reads the rows itself).
    """
    return all(
        item.tensor.merge is not None and not item.tensor.form.format and not item.tensor_pass
        for item in items
    )


@dataclass
class _Buffer:
    """A buffer in host memory; `read` happens when the device has read its content."""

    memory: Tensor
    read: Arrival


class Transfer:
    """A sender of inputs. One thread sends; another computes on the device's current stream."""

    def __init__(self, device: torch.device, size: int = _BYTES) -> None:
        self._device = device
        self._copies = device.type in _COPIES
        # The CPU has streams and events of the same names; they do nothing, as its copies are done at once.
        self._module: Any = torch.get_device_module(device)
        self._stream = self._module.Stream(device=device) if self._copies else self._module.Stream()
        self._buffers = [
            _Buffer(torch.empty(size, dtype=torch.uint8, pin_memory=self._copies), self._arrival())
            for _ in range(2)
        ]

    def send(self, inputs: Inputs) -> tuple[Inputs, Arrival]:
        """Begin to copy the stored rows of an item.

        Return the inputs on the device, and the event of their arrival; they must not be read before it.
        """
        measured = {
            kind: {expert: self._measured(statistic) for expert, statistic in found.items()}
            for kind, found in inputs.measured.items()
        }
        sent = replace(
            inputs,
            base=inputs.base if inputs.base.is_meta else self._tensor(inputs.base),
            experts={expert: self._update(update) for expert, update in inputs.experts.items()},
            measured=measured,
        )
        return sent, self._recorded(self._arrival())

    def _update(self, update: Update) -> Update:
        if update is None:
            return None
        if isinstance(update, tuple):
            return tuple(self._factors(matrix) for matrix in update)
        return self._factors(update) if isinstance(update, LowRank) else self._tensor(update)

    def _factors(self, update: LowRank) -> LowRank:
        return LowRank(self._tensor(update.left), self._tensor(update.right))

    def _measured(self, measured: Measured) -> Measured:
        return replace(measured, value=self._tensor(measured.value))

    def _tensor(self, tensor: Tensor) -> Tensor:
        with self._module.stream(self._stream):
            there = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
        if self._copies:
            # The memory belongs to the copying stream, which must not reuse it before the operations that
            # the computation has begun on the tensor are done.
            there.record_stream(self._module.current_stream(self._device))
        source, target = tensor.reshape(-1), there.view(-1)
        step = len(self._buffers[0].memory) // tensor.itemsize
        for start in range(0, len(source), step):
            piece = slice(start, start + step)
            self._piece(source[piece], target[piece])
        return there

    def _piece(self, source: Tensor, target: Tensor) -> None:
        buffer = self._buffers[0]
        self._buffers.reverse()
        buffer.read.synchronize()
        host = buffer.memory[: source.nbytes].view(source.dtype)
        host.copy_(source)
        with self._module.stream(self._stream):
            self._begin(target, host)
        self._recorded(buffer.read)

    def _begin(self, target: Tensor, host: Tensor) -> None:
        target.copy_(host, non_blocking=True)

    def _arrival(self) -> Any:
        return self._module.Event()

    def _recorded(self, arrival: Any) -> Arrival:
        """Record the event after all copies that the stream has been given, and return it."""
        arrival.record(self._stream)
        return cast("Arrival", arrival)
