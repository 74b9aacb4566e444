"""Files as the system opens them: no link followed, nothing waited for, bytes at an offset.

Windows has neither the flags nor the calls that read and write at an offset at once. A descriptor
belongs to one thread here, so that to go to the offset first does the same everywhere.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Generator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

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
