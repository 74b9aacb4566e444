"""The one way in which files of strangers are opened: regular files, and nothing that could block."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from io import BufferedReader, FileIO
from pathlib import Path
from typing import IO

from covmerge.base.errors import CheckpointError
from covmerge.files.stores.descriptor import check_own, open_descriptor

_PIECE = 2**20


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file as `open_raw` does, and read ahead a little."""
    return BufferedReader(open_raw(path))


def open_raw(path: Path, *, follow: bool = True, only_name: bool = False) -> FileIO:
    """Open a regular file to read its bytes; `follow` says whether `path` may be a link.

    `only_name` says that it may have no other name either (`check_own`).

    A pipe would be waited for, and a device may have no end. What a path is may change between a
    question and its use, so that the file is asked when it is open.

    Raises:
        OSError: there is no such file, it may not be read, it is something else, or its name is none
            that a file can have.

    Example:
        >>> open_raw(Path("/dev/zero"))
        Traceback (most recent call last):
        OSError: [Errno 22] It is a pipe or a device, not a regular file: '/dev/zero'
    """
    try:
        fd = open_descriptor(path, os.O_RDONLY, follow=follow)
    except ValueError as error:  # a NUL, or half of a surrogate pair
        raise OSError(errno.EINVAL, f"No file can have this name ({error})", repr(path)) from error
    mode = os.fstat(fd).st_mode
    if stat.S_ISREG(mode):
        file = FileIO(fd)
        if only_name:
            try:
                check_own(fd, path)
            except OSError:
                file.close()
                raise
        return file
    os.close(fd)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "It is a pipe or a device, not a regular file", str(path))


def read_regular(path: Path, limit: int) -> bytes:
    """Return the content of a regular file of at most `limit` bytes.

    Raises:
        CheckpointError: it is larger, something else, or cannot be read.
        FileNotFoundError: there is none.
    """
    with reading(path), open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise CheckpointError(f"{path} is larger than {limit} bytes, which no such file is")
        return file.read(size)  # of the limit, memory would be asked for first


def read_some(file: IO[bytes], limit: int) -> bytes:
    """Return the next bytes of an open file, `limit` at most; memory is asked for by the file's size."""
    size = os.fstat(file.fileno()).st_size
    return file.read(min(limit, size + 1))  # one more, to notice that it grew


def pieces(file: IO[bytes]) -> Iterator[bytes]:
    """Yield the content of an open file, 1 MiB at most at a time."""
    while piece := read_some(file, _PIECE):
        yield piece


@contextmanager
def reading(path: object) -> Generator[None]:
    """Tell what keeps a file from being read as a CheckpointError with its name.

    Raises:
        CheckpointError: any OSError but the next.
        FileNotFoundError: there is no such file.
    """
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
