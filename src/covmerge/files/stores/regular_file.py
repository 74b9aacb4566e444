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

# Files as the system opens them: no link followed, nothing waited for, bytes at an offset.
#
# Windows has neither the flags nor the calls that read and write at an offset at once. A descriptor
# belongs to one thread here, so that to go to the offset first does the same everywhere.

_NO_LINK = getattr(os, "O_NOFOLLOW", 0)
_NO_WAIT = getattr(os, "O_NONBLOCK", 0)  # for another process at the other end of a pipe
_BINARY = getattr(os, "O_BINARY", 0)  # Windows changes the ends of lines otherwise

_MOST = 2**30  # bytes a call: Linux moves at most 2 GiB - 4 KiB, macOS refuses 2 GiB


def open_descriptor(path: Path, flags: int, *, follow: bool = False) -> int:
    """Open a file as `os.open` does; `follow` says whether `path` may be a link.

    Raises:
        OSError: as `os.open`, and for a link that may not be one.
    """
    if not (follow or _NO_LINK) and path.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    return os.open(path, flags | _BINARY | _NO_WAIT | (0 if follow else _NO_LINK), 0o666)


@contextmanager
def opened(path: Path, flags: int) -> Generator[int, None, None]:
    """Open a file of covmerge's own, as `check_own` has it, and close it again."""
    fd = open_descriptor(path, flags)
    try:
        check_own(fd, path)
        yield fd
    finally:
        os.close(fd)


def is_own(path: Path) -> bool:
    """Whether a path is a regular file that has no other name, and no link."""
    try:
        status = path.lstat()
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_nlink <= 1


def check_own(fd: int, path: Path) -> None:
    """Refuse a file that is not regular, or has another name: a write to it would change that file too.

    Raises:
        OSError: it is such a file.
    """
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "It is no regular file", str(path))
    if status.st_nlink > 1:
        raise OSError(errno.EMLINK, "It is a hard link: the same file has another name", str(path))


def read_at(file: FileIO, target: memoryview, offset: int) -> int:
    """Read straight into memory, and return how many bytes it were: 0 at the end of the file."""
    file.seek(offset)
    return file.readinto(target[:_MOST])


def write_at(fd: int, data: memoryview, offset: int) -> None:
    """Write all of the data."""
    os.lseek(fd, offset, os.SEEK_SET)
    while data:  # less than asked for is written where a disk fills up
        data = data[os.write(fd, data[:_MOST]) :]


def reserve(fd: int, size: int) -> None:
    """Make a file so long, and reserve its space where the file system can."""
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
