"""The only way in which strangers' files are opened: regular files, without anything that could block."""

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

# Files opened by the system's calls: without following links or waiting, with reads at an offset.
#
# Windows has neither these flags nor calls that read and write at an offset. A descriptor belongs to one
# thread here, so seeking to the offset first has the same effect everywhere.

_NO_LINK = getattr(os, "O_NOFOLLOW", 0)
_NO_WAIT = getattr(os, "O_NONBLOCK", 0)  # not for another process at the other end of a pipe
_BINARY = getattr(os, "O_BINARY", 0)  # without it Windows changes the ends of lines

_MOST = 2**30  # bytes per call: Linux moves at most 2 GiB - 4 KiB, macOS refuses 2 GiB


def open_descriptor(path: Path, flags: int, *, follow: bool = False) -> int:
    """Open a file like `os.open`; `follow` says whether `path` may be a link.

    Raises:
        OSError: as for `os.open`, or `path` is a link and may not be one.
    """
    if not (follow or _NO_LINK) and path.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    return os.open(path, flags | _BINARY | _NO_WAIT | (0 if follow else _NO_LINK), 0o666)


@contextmanager
def opened(path: Path, flags: int) -> Generator[int, None, None]:
    """Open a file of covmerge after `check_own`, and close it at the end."""
    fd = open_descriptor(path, flags)
    try:
        check_own(fd, path)
        yield fd
    finally:
        os.close(fd)


def is_own(path: Path) -> bool:
    """Return whether a path is a regular file that is no link and has no other name."""
    try:
        status = path.lstat()
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_nlink <= 1


def check_own(fd: int, path: Path) -> None:
    """Check that a file is regular and has no other name; a write would change it under that name too.

    Raises:
        OSError: the file is not regular, or has another name.
    """
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "It is no regular file", str(path))
    if status.st_nlink > 1:
        raise OSError(errno.EMLINK, "It is a hard link: the same file has another name", str(path))


def read_at(file: FileIO, target: memoryview, offset: int) -> int:
    """Read straight into memory, and return the number of bytes; 0 at the end of the file."""
    file.seek(offset)
    return file.readinto(target[:_MOST])


def write_at(fd: int, data: memoryview, offset: int) -> None:
    """Write all of the data at an offset."""
    os.lseek(fd, offset, os.SEEK_SET)
    while data:  # less than asked for is written if the disk fills up
        data = data[os.write(fd, data[:_MOST]) :]


def reserve(fd: int, size: int) -> None:
    """Set the length of a file, and reserve its space if the file system can."""
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(fd, 0, size)
            return
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise
    os.ftruncate(fd, size)


_PIECE = 2**20


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file like `open_raw`, with a small read-ahead buffer."""
    return BufferedReader(open_raw(path))


def open_raw(path: Path, *, follow: bool = True, only_name: bool = False) -> FileIO:
    """Open a regular file for reading bytes; `follow` says whether `path` may be a link.

    `only_name` says that the file must not have another name either (`check_own`).

    Opening a pipe would wait, and a device may have no end. The kind of a path may change between a check
    and its use, so it is checked on the open file.

    Raises:
        OSError: there is no such file, it cannot be read, it is no regular file, or no file can have this
            name.

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
        CheckpointError: the file is larger, is not regular, or cannot be read.
        FileNotFoundError: there is no such file.
    """
    with reading(path), open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise CheckpointError(f"{path} is larger than {limit} bytes, which no such file is")
        return file.read(size)  # read(limit) would allocate memory for the limit first


def read_some(file: IO[bytes], limit: int) -> bytes:
    """Return the next bytes of an open file, at most `limit`; memory is allocated by the file's size."""
    size = os.fstat(file.fileno()).st_size
    return file.read(min(limit, size + 1))  # one more, to notice that the file grew


def pieces(file: IO[bytes]) -> Iterator[bytes]:
    """Yield the content of an open file in pieces of at most 1 MiB."""
    while piece := read_some(file, _PIECE):
        yield piece


@contextmanager
def reading(path: object) -> Generator[None]:
    """Turn errors that keep a file from being read into a CheckpointError with its name.

    Raises:
        CheckpointError: any OSError except FileNotFoundError.
        FileNotFoundError: there is no such file.
    """
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error


@contextmanager
def failing_as(fault: str) -> Generator[None]:
    """Turn any OSError into a CheckpointError that says what cannot be done, and why."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{fault}: {error.strerror or error}") from error
