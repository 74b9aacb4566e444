"""One safetensors file, read by ranges of rows straight into the memory of a tensor.

Nothing is memory-mapped, so the memory of a merge is what its plan says and not what the kernel
keeps resident, and a failing disk is an error and not a signal.
"""

from __future__ import annotations

from collections.abc import Mapping

from covmerge.files.checkpoints.header import LENGTH_BYTES, data_start, parse_header
from covmerge.files.checkpoints.layout import Slot
from covmerge.files.checkpoints.ranges import SlottedFile, open_stored, read_into
from covmerge.files.stores.store import Opened, StoredFile


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
