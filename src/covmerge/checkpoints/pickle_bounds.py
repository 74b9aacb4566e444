"""What files of pickles may cost, looked at before anything of them is made.

Both that read such files ask here: torch's own loader (`torch_file.py`), and ours (`pickled.py`).
"""

from __future__ import annotations

import pickletools
import zipfile
from collections.abc import Generator
from typing import IO, cast

from covmerge.errors import CheckpointError

ZIP_MAGIC = b"PK\x03\x04"
MAX_WHOLE_BYTES = 4 * 2**30  # of formats without an index
SAVE_AGAIN = "load it where you trust it, and save its state dict with safetensors.torch.save_file"

_MAX_PICKLE_BYTES = 100_000_000
MAX_STEPS = 2_000_000  # a tensor takes 40
_FIXED = 8  # bytes of the longest argument whose length is not told by the file


def check_whole(size: int, where: str) -> None:
    """Refuse a file that has to be loaded whole and is too large for it.

    Raises:
        CheckpointError: it is.
    """
    if size > MAX_WHOLE_BYTES:
        raise CheckpointError(
            f"{where} is {size} bytes in torch's format from before 1.6, which has to be loaded "
            f"whole, and the most that is loaded so is {MAX_WHOLE_BYTES}: {SAVE_AGAIN}"
        )


def check_archive(archive: zipfile.ZipFile, where: str) -> None:
    """Check what torch takes for granted about its own zip files, and count the steps of the pickle.

    Raises:
        CheckpointError: it is code, is compressed, or describes its tensors at too great length.
    """
    entries = archive.infolist()
    if any(entry.filename.endswith("/constants.pkl") for entry in entries):
        raise CheckpointError(f"{where} is TorchScript, which is code: {SAVE_AGAIN}")
    for entry in entries:
        if entry.compress_type != zipfile.ZIP_STORED:
            raise CheckpointError(
                f"{where} holds the compressed entry {entry.filename!r}, which torch would map as "
                f"if it were tensors: {SAVE_AGAIN}"
            )
        if not entry.filename.endswith("/data.pkl"):
            continue
        if entry.file_size > _MAX_PICKLE_BYTES:
            raise CheckpointError(
                f"{where} describes its tensors in {entry.file_size} bytes, and the most that is "
                f"read is {_MAX_PICKLE_BYTES}: {SAVE_AGAIN}"
            )
        with archive.open(entry) as description:
            check_steps(description, where)


def check_steps(pickled: IO[bytes], where: str, pickles: int = 1, *, most: int = MAX_STEPS) -> None:
    """Count the steps of some pickles in a row, each of which may make an object.

    What is no pickle is left to whoever loads it.

    Raises:
        CheckpointError: there are too many.
    """
    left = most
    bounded = _Bounded(pickled, where)
    for _ in range(pickles):
        for _ in _opcodes(bounded):
            left -= 1
            if left < 0:
                raise CheckpointError(
                    f"{where} describes its tensors in more than {most} steps, which is far "
                    f"more than any model needs: {SAVE_AGAIN}"
                )


class _Bounded:
    """A file in which no step has an argument longer than what is left: room would be made for it first."""

    def __init__(self, file: IO[bytes], where: str) -> None:
        self._file, self._where = file, where
        place = file.tell()
        self._size = file.seek(0, 2)
        file.seek(place)

    def read(self, count: int) -> bytes:
        """Read some bytes, as `pickletools` asks for them."""
        left = self._size - self._file.tell()
        if count > max(left, _FIXED):  # shorter ones `pickletools` finds cut short for itself
            raise CheckpointError(
                f"{self._where} is cut short: a step of its pickle has {count} bytes, and {left} are "
                "left: fetch the file again"
            )
        return self._file.read(count)

    def readline(self) -> bytes:
        """Read a line."""
        return self._file.readline()

    def tell(self) -> int:
        """Return the place in the file."""
        return self._file.tell()


def _opcodes(pickled: _Bounded) -> Generator[object]:
    try:
        yield from pickletools.genops(cast("IO[bytes]", pickled))
    except (ValueError, MemoryError):
        return
