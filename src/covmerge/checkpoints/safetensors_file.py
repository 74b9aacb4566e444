"""One safetensors file, read by ranges of rows straight into the memory of a tensor.

Nothing is memory-mapped, so the memory of a merge is what its plan says and not what the kernel
keeps resident, and a failing disk is an error and not a signal.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from covmerge.checkpoints.base import check_unchanged, find_header
from covmerge.checkpoints.header import LENGTH_BYTES, data_start, parse_header
from covmerge.checkpoints.layout import Slot
from covmerge.checkpoints.ranges import open_stored, read_into
from covmerge.errors import CheckpointError
from covmerge.stores.store import Opened, StoredFile
from covmerge.types import TensorHeader


class SafetensorsFile:
    """A safetensors file whose header has been checked.

    Every read opens the file anew: a sharded model times its experts would else hold more files
    open than a process may.
    """

    notes: tuple[str, ...] = ()

    def __init__(self, file: StoredFile) -> None:
        self._file = file
        self._where = str(file)
        with open_stored(file) as opened:
            self._stamp = opened.stamp
            self._slots = _read_slots(opened, self._stamp[0], self._where)
        self.headers: Mapping[str, TensorHeader] = MappingProxyType(
            {name: slot.header for name, slot in self._slots.items()}
        )

    def read(self, name: str, rows: range | None = None) -> Tensor:
        """See `Checkpoint.read`."""
        header = find_header(self.headers, name, rows, self._where)
        offset, nbytes = self._slots[name].span(rows)
        data = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        with open_stored(self._file) as opened:
            check_unchanged(self._file, self._stamp, opened.stamp)
            read_into(data.numpy().data, opened, offset, f"{self._where}: tensor '{name}'")
        if header.dtype is torch.bool and nbytes and int(data.max()) > 1:
            raise CheckpointError(
                f"{self._where}: tensor '{name}' is BOOL and holds bytes other than 0 and 1: "
                "save the file again"
            )
        shape = header.shape if rows is None else (len(rows), *header.shape[1:])
        return data.view(header.dtype).reshape(shape)

    def close(self) -> None:
        """Nothing stays open between reads."""


def _read_slots(opened: Opened, size: int, where: str) -> Mapping[str, Slot]:
    length = bytearray(min(size, LENGTH_BYTES))
    read_into(memoryview(length), opened, 0, where)
    header = bytearray(data_start(bytes(length), size, where) - LENGTH_BYTES)
    read_into(memoryview(header), opened, LENGTH_BYTES, where)
    return parse_header(bytes(header), size, where)
