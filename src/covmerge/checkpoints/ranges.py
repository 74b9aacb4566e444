"""Bytes of a stored file, all that were asked for or an error that names the file."""

from __future__ import annotations

from covmerge.errors import CheckpointError
from covmerge.stores.store import Opened, StoredFile


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
