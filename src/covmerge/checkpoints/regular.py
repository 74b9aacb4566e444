"""Regular files only: a pipe waits for ever, and a device has no end."""

from __future__ import annotations

import os
import stat
from collections.abc import Generator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

from covmerge.errors import CheckpointError


@contextmanager
def open_regular(path: Path, *, follow: bool = True) -> Generator[FileIO, None, None]:
    """Open a file to read it; errors while it is read are told with its name.

    Args:
        path: the file.
        follow: whether `path` may be a link.

    Raises:
        CheckpointError: it is something else, or cannot be read.
        FileNotFoundError: there is none.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
    try:
        fd = os.open(path, flags)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise CheckpointError(f"{path} is no regular file: put the file itself there")
            yield FileIO(fd, closefd=False)
        finally:
            os.close(fd)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error


def read_regular(path: Path, limit: int, *, follow: bool = True) -> bytes:
    """Return the content of a regular file of at most `limit` bytes; see `open_regular`.

    Raises:
        CheckpointError: it is larger, something else, or cannot be read.
        FileNotFoundError: there is none.
    """
    with open_regular(path, follow=follow) as file:
        if os.fstat(file.fileno()).st_size > limit:
            raise CheckpointError(f"{path} is larger than {limit} bytes, which no such file is")
        return file.readall()
