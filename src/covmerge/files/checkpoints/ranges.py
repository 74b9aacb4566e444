"""Bytes of a stored file, all that were asked for or an error naming it; tensors that lie in a file."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from covmerge.base.errors import CheckpointError
from covmerge.base.types import TensorHeader
from covmerge.files.checkpoints.base import check_unchanged, find_header
from covmerge.files.checkpoints.header import LENGTH_BYTES, data_start, parse_header
from covmerge.files.checkpoints.layout import Slot
from covmerge.files.stores.store import Opened, Stamp, StoredFile


class SlottedFile:
    """A file in which each tensor lies in one piece, row by row.

    Every read opens the file anew: a sharded model times its experts would else hold more files
    open than a process may.

    Args:
        file: it.
        stamp: what it was when its header was read.
        slots: where the tensors lie, by name; checked against the file's size.
    """

    notes: tuple[str, ...] = ()
    settings: Mapping[str, Any] | None = None

    def __init__(self, file: StoredFile, stamp: Stamp, slots: Mapping[str, Slot]) -> None:
        self._file = file
        self._stamp = stamp
        self._slots = slots
        self.headers: Mapping[str, TensorHeader] = MappingProxyType(
            {name: slot.header for name, slot in slots.items()}
        )

    @property
    def stamp(self) -> Stamp:
        """What the file was when its header was read."""
        return self._stamp

    @property
    def slots(self) -> Mapping[str, Slot]:
        """Where its tensors lie."""
        return self._slots

    def read(self, name: str, rows: range | None = None) -> Tensor:
        header = find_header(self.headers, name, rows, str(self._file))
        offset, nbytes = self._slots[name].span(rows)
        data = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        with open_stored(self._file) as opened:
            check_unchanged(self._file, self._stamp, opened.stamp)
            read_into(data.numpy().data, opened, offset, f"{self._file}: tensor '{name}'")
        if header.dtype is torch.bool and nbytes and int(data.max()) > 1:
            raise CheckpointError(
                f"{self._file}: tensor '{name}' is BOOL and holds bytes other than 0 and 1: "
                "save the file again"
            )
        shape = header.shape if rows is None else (len(rows), *header.shape[1:])
        return data.view(header.dtype).reshape(shape)

    def close(self) -> None:
        """Nothing stays open between reads."""


@contextmanager
def still_readable(file: StoredFile) -> Generator[None]:
    """Name a file that can no longer be read.

    Raises:
        CheckpointError: in place of an OSError.
    """
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read any more: {error.strerror}") from error


def open_stored(file: StoredFile) -> Opened:
    """Open a file to be read.

    Raises:
        CheckpointError: it cannot be opened.
    """
    try:
        return file.open()
    except OSError as error:
        raise CheckpointError(f"{file} cannot be opened: {error.strerror}") from error


def read_into(target: memoryview, opened: Opened, offset: int, where: str) -> None:
    """Fill memory from a place in a file.

    Raises:
        CheckpointError: the disk fails, or the file ends early.
    """
    done = 0
    while done < len(target):
        try:
            count = opened.read_at(target[done:], offset + done)
        except OSError as error:
            raise CheckpointError(
                f"{where} cannot be read at byte {offset + done}: {error.strerror}"
            ) from error
        if count == 0:
            raise CheckpointError(
                f"{where} ends at byte {offset + done}, {len(target) - done} bytes early: "
                "fetch the file again"
            )
        done += count


# One safetensors file, read by ranges of rows straight into the memory of a tensor.
#
# Nothing is memory-mapped, so the memory of a merge is what its plan says and not what the kernel
# keeps resident, and a failing disk is an error and not a signal.


class SafetensorsFile(SlottedFile):
    """A safetensors file whose header has been checked."""

    def __init__(self, file: StoredFile) -> None:
        with open_stored(file) as opened:
            stamp = opened.stamp
            slots = _read_slots(opened, stamp[0], str(file))
        super().__init__(file, stamp, slots)


def _read_slots(opened: Opened, size: int, where: str) -> Mapping[str, Slot]:
    length = bytearray(min(size, LENGTH_BYTES))
    read_into(memoryview(length), opened, 0, where)
    header = bytearray(data_start(bytes(length), size, where) - LENGTH_BYTES)
    read_into(memoryview(header), opened, LENGTH_BYTES, where)
    text = bytes(header)
    del header  # of up to 100 MB, and what is parsed of them is more
    return parse_header(text, size, where)
